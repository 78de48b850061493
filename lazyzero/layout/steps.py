"""How many optimizer steps a rank's file has behind it: ranks that differ are of two saves.

torch's and DeepSpeed's optimizers count in `step`, an int or (torch 1.12 on) a tensor of one element; SGD and momentum count
nothing. The state of the groups is a dict by index, or in elastic checkpoints a list (up to 0.3.16: of lists).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from lazyzero.container.objects import TensorRef
from lazyzero.gather import read
from lazyzero.tensor import LazyTensor, View

_GROUPS = 8  # that are looked at


def step_of(state: dict[str, Any]) -> int | None:
    """The `step` of the first param group that has one, out of an `optimizer_state_dict`; reads a few bytes at most."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        for group in islice(_groups(state.get(key)), _GROUPS):
            step = _step(group.get("step"))
            if step is not None:
                return step
    return None


def _groups(base: Any) -> Iterable[dict[str, Any]]:
    if isinstance(base, dict):
        states = base.get("state")
        rows = list(islice(states.values(), _GROUPS)) if isinstance(states, dict) else []
    else:
        rows = base[:_GROUPS] if isinstance(base, list) else []
    for row in rows:
        first = row[0] if isinstance(row, list) and row else row
        if isinstance(first, dict):
            yield first


def _step(value: Any) -> int | None:
    if isinstance(value, TensorRef) and value.numel == 1 and not value.dtype.name.startswith("complex"):
        found = read(LazyTensor("step", value.shape, View(value), "module"), 0, 1)[0]
        value = int(found) if 0 <= found < 1 << 62 else None
    return value if type(value) is int and 0 <= value < 1 << 62 else None
