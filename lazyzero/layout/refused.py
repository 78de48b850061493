"""Layouts that are recognised and not converted: each ends in an error that says what it is."""

from __future__ import annotations

from typing import NoReturn

from lazyzero.errors import UnsupportedLayout
from lazyzero.layout.found import Found


def matches(found: Found) -> bool:
    """Whether one of the refusals below applies."""
    return _reason(found) is not None


def read(found: Found) -> NoReturn:
    """Raises UnsupportedLayout."""
    raise UnsupportedLayout(f"{found.files.directory}: {_reason(found)}")


def _reason(found: Found) -> str | None:
    files = found.files
    if files.experts or files.expert_optim:
        return "a mixture-of-experts checkpoint (expert_*_model_states.pt), which is not supported yet"
    if files.layers:
        return "a pipeline checkpoint (layer_*-model_states.pt), which is not supported yet"
    parallel = (
        {mp for ranks in files.optim.values() for _, mp in ranks}
        | set(files.model)
        | {mp for _, mp in files.zero_model}
    )
    if len(parallel) > 1:
        return f"a tensor-parallel checkpoint (model-parallel ranks {sorted(parallel)}), which is not supported yet"
    return None
