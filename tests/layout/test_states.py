"""What a file may describe: counted as often as it is met, looked at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyzero.container.objects import Opaque
from lazyzero.errors import InconsistentCheckpoint
from lazyzero.layout import states


def opaque(value: Any) -> Opaque:
    """An inert object that holds a value in two of its places."""
    made = Opaque("kind", (value,))
    made.state = value
    return made


LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=3))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        inner.map(lambda one: [one, one]),  # the same object twice
        inner.map(opaque),
    ),
    max_leaves=30,
)


def size(value: Any) -> int:
    """Containers' entries, each as often as it is met."""
    if isinstance(value, Opaque):
        return 3 + size(value.args) + size(value.state) + size(value.items)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return len(inner) + sum(map(size, inner))


@given(VALUES, st.integers(1, 60))
def test_what_is_counted(value: Any, most: int) -> None:
    """Refused is exactly what describes more values than there may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_MOST_VALUES", most)
        if size(value) > most:
            with pytest.raises(InconsistentCheckpoint, match=f"x.pt: describes more than {most} values"):
                states.require_finite("x.pt", value)
        else:
            states.require_finite("x.pt", value)


def test_what_has_no_end() -> None:
    """A list in itself, near or far, and ten to the power of forty entries, are refused at once; depth alone is fine."""
    near: list[Any] = []
    near.append(near)
    far: list[Any] = [1]
    far.append(({"a": [far]},))
    laughs: list[Any] = [0]
    for _ in range(40):
        laughs = [laughs] * 10
    for value in (near, far, laughs):
        with pytest.raises(InconsistentCheckpoint, match="describes more than 1000000 values"):
            states.require_finite("x.pt", value)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    states.require_finite("x.pt", deep)
