"""The values of a generated model: every element of every parameter is known from its place, so any output can be checked.

A block of random numbers, of a prime length so that a shift shows, repeats through each parameter from a start of its own.
Sparse models have such values in a few short places of each parameter and zeros, which are holes in the files, between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np

_BLOCK: Final = 1_048_573  # elements, prime
_STRIDE: Final = 611_953  # between the starts of neighbouring parameters
_MARK: Final = 16  # elements
_MARKS: Final = 9  # places in a parameter, its first and last elements among them


@dataclass(frozen=True, slots=True)
class Values:
    """Values by parameter index; `sparse` leaves holes."""

    sparse: bool
    seed: int = 0
    _blocks: dict[int, np.ndarray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_blocks", _blocks(self.seed))

    def parts(self, index: int, numel: int, start: int, stop: int, itemsize: int) -> Iterator[memoryview | int]:
        """Bytes of elements [start, stop) of parameter `index`, which has `numel`; an int is a hole of so many bytes."""
        for first, last, filled in self._runs(numel, start, stop):
            if filled:
                yield from self._filled(index, first, last, itemsize)
            else:
                yield (last - first) * itemsize

    def expected(self, index: int, numel: int, start: int, stop: int, *, stored: int = 4) -> np.ndarray:
        """Elements [start, stop) as float32; `stored` is the item size they were saved with (2 for frozen weights)."""
        parts = [
            np.zeros(part // stored, f"u{stored}") if isinstance(part, int) else np.frombuffer(part, f"u{stored}")
            for part in self.parts(index, numel, start, stop, stored)
        ]
        raw = np.concatenate(parts) if parts else np.zeros(0, f"u{stored}")
        return raw.view(np.float32) if stored == 4 else (raw.astype(np.uint32) << 16).view(np.float32)

    def _runs(self, numel: int, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """[start, stop) cut into what is filled and what is not."""
        at = start
        for first, last in marks(numel) if self.sparse else [(0, numel)]:
            if last <= at or first >= stop:
                continue
            if first > at:
                yield at, first, False
                at = first
            yield at, min(last, stop), True
            at = min(last, stop)
        if at < stop:
            yield at, stop, False

    def _filled(self, index: int, start: int, stop: int, itemsize: int) -> Iterator[memoryview]:
        block = self._blocks[itemsize].data.cast("B")
        while start < stop:
            at = (index * _STRIDE + start) % _BLOCK
            count = min(stop - start, _BLOCK)
            yield block[at * itemsize : (at + count) * itemsize]
            start += count


def marks(numel: int) -> list[tuple[int, int]]:
    """The places of a parameter where a sparse model has values, as ranges of elements."""
    if numel <= _MARK * _MARKS:
        return [(0, numel)]
    firsts = [place * (numel - _MARK) // (_MARKS - 1) for place in range(_MARKS)]
    return [(first, first + _MARK) for first in firsts]


def round_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, to nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@lru_cache(maxsize=2)
def _blocks(seed: int) -> dict[int, np.ndarray]:
    """The block by item size, twice in a row so that a run of one block's length is contiguous wherever it begins."""
    block = np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32) * np.float32(0.02)
    return {4: np.tile(block, 2), 2: np.tile(round_bf16(block), 2)}
