"""Decisions out of bytes, so that a fuzzer that mutates bytes mutates structured input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choice:
    """Takes decisions from `data`, and the first of everything once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not used yet."""
        return len(self._data) - self._at

    def byte(self) -> int:
        """The next byte, 0 at the end."""
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        return self.byte() % count if count <= 256 else (self.byte() << 8 | self.byte()) % count

    def of(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def bytes(self, most: int) -> bytes:
        """Up to `most` bytes as they stand."""
        size = min(self.below(most + 1), self.left)
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        """All that is left."""
        at, self._at = self._at, len(self._data)
        return self._data[at:]
