"""The optimizer's moments (`exp_avg`, `exp_avg_sq`): flats built like the masters', so the masters' map is theirs too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from lazyzero.container.brief import brief
from lazyzero.container.objects import TensorRef
from lazyzero.errors import InvalidRequest
from lazyzero.layout.contents import Contents
from lazyzero.layout.states import OptimStates

STATES: Final = ("exp_avg", "exp_avg_sq")


def requested(state: str | None) -> str | None:
    """The state a user names, or None for the weights. Raises InvalidRequest for any other word."""
    if state is not None and state not in STATES:
        raise InvalidRequest(f"state {state!r} is not one of {', '.join(STATES)}")
    return state


def zero12_flats(rank: OptimStates, state: str) -> list[TensorRef]:
    """One rank's flat of each param group under `base_optimizer_state`.

    It is torch's `state_dict`, with the tail padding, from 0.4.6 on, and a list with the padding cut off like the
    masters' before that or with `elastic_checkpoint`. Raises InvalidRequest where the optimizer keeps no such state.
    """
    saved = rank.state.get("base_optimizer_state")
    states = saved if isinstance(saved, list) else _states(saved)
    return [flat(rank, group, state) for group in states]


def zero3_flats(rank: OptimStates, state: str) -> list[TensorRef]:
    """One rank's flat of each sub-group, in their order. Raises InvalidRequest where the optimizer keeps no such state."""
    return [flat(rank, group, state) for group in _states(rank.state.get("optimizer_state_dict"))]


def flat(rank: OptimStates, states: Any, name: str) -> TensorRef:
    """One flat's state. Raises InvalidRequest unless it is a 1-D tensor."""
    found = states.get(name) if isinstance(states, Mapping) else None
    if not isinstance(found, TensorRef) or len(found.shape) != 1 or not found.contiguous:
        names = islice(states, 20) if isinstance(states, Mapping) else ()
        kept = ", ".join(brief(name).strip("'") for name in names) or "none"
        raise InvalidRequest(
            f"{rank.path}: its optimizer kept no flat `{name}` (it has: {kept}); "
            "the optimizer has none, has not stepped yet, or its states were stripped"
        )
    return found


def only(contents: Contents) -> Contents:
    """What is left of the contents when moments are asked for: nothing but the optimizer's parameters, each once."""
    entries = {
        name: tensor
        for name, tensor in contents.entries.items()
        if tensor.role == "trainable" and tensor.tied_to is None
    }
    return replace(contents, entries=entries, missing={}, checks=())


def _states(saved: Any) -> list[Any]:
    """The values of torch's `state`, which numbers the flats."""
    state = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        return [None]
    return [state.get(index) for index in range(len(state))] or [None]
