"""The layouts, asked in order; a new one is one module and one line here."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Final

from lazyzero.container.brief import brief
from lazyzero.errors import MissingFiles, UnsupportedLayout
from lazyzero.layout import moe, moments, nvme, pipeline, tensor_parallel, universal, zero0, zero1_old, zero3, zero12
from lazyzero.layout.contents import Contents, without_frozen
from lazyzero.layout.discover import FileSet
from lazyzero.layout.found import Found
from lazyzero.layout.ranks import spans
from lazyzero.layout.states import as_int
from lazyzero.layout.support import Support

# Each has `matches(found) -> bool`, `read(found) -> Contents`, its `SUPPORT` for the documentation, and `MOMENTS = True` where
# `read` honours `found.state`.
LAYOUTS: Final[tuple[ModuleType, ...]] = (
    universal, moe, pipeline, tensor_parallel, nvme, zero3, zero12, zero1_old, zero0,
)  # fmt: skip


def support() -> tuple[Support, ...]:
    """What all layouts support, for the tables in the documentation."""
    return tuple(row for layout in LAYOUTS for row in getattr(layout, "SUPPORT", ()))


def read_contents(found: Found) -> Contents:
    """Recognises the layout and reads its metadata. Raises UnsupportedLayout, MissingFiles, or what the layout raises."""
    contents = recognise(found)
    if not found.files.universal:
        _require_model_ranks(found.files, contents)
    contents = replace(contents, archives=tuple(archive.bare() for archive in contents.archives))
    if found.state is not None:
        return moments.only(contents)
    return without_frozen(contents) if found.exclude_frozen else contents


def recognise(found: Found) -> Contents:
    """The contents as the first layout reads them that knows the files; of one model-parallel rank or of all."""
    for layout in LAYOUTS:
        if layout.matches(found):
            if found.state is not None and not getattr(layout, "MOMENTS", False):
                raise UnsupportedLayout(f"{found.files.directory}: `{found.state}` is not read from this layout")
            contents: Contents = layout.read(found)
            return contents
    files = found.files
    if files.optim:
        keys = brief(list(found.optimizer.ranks[0].state), 300)
        raise UnsupportedLayout(f"{found.optimizer.ranks[0].path}: no known layout has the keys {keys}")
    if files.zero_model:
        raise MissingFiles(
            f"{files.directory}: found model files of ZeRO-3 ranks but no *_optim_states.pt, which hold the weights; copy them here"
        )
    raise UnsupportedLayout(f"{files.directory}: no known layout has these files")


def _require_model_ranks(files: FileSet, contents: Contents) -> None:
    """One model-parallel rank's files make a whole checkpoint by themselves, of a part of the model."""
    recorded = as_int(tensor_parallel.model_root(contents).get("mp_world_size"))
    if recorded is not None and recorded > len(files.model_ranks):
        raise MissingFiles(
            f"{files.directory}: it was saved by {recorded} model-parallel ranks, and there are files of "
            f"{spans(files.model_ranks)} only; copy the others from the nodes that wrote them"
        )
