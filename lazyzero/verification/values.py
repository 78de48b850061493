"""Every element of an output against the checkpoint it was made from, a few MB at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lazyzero.cast import cast, differing
from lazyzero.gather import read
from lazyzero.readers import BLOCK, Block, Reader, Stored, blocks_of
from lazyzero.tensor import LazyTensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one file that are read together."""

    reader: Reader
    tensors: dict[str, Stored]
    blocks: tuple[Block, ...]


def batches(reader: Reader, tensors: Mapping[str, Stored]) -> Iterator[Batch]:
    """All elements of a file's tensors: large ones in several batches, many small ones in one."""
    gathered: dict[str, Stored] = {}
    blocks: list[Block] = []
    filled = 0
    for name, stored in tensors.items():
        for block in blocks_of(name, stored):
            gathered[name] = stored
            blocks.append(block)
            filled += block.count * stored.dtype.itemsize
            if filled >= BLOCK:
                yield Batch(reader, gathered, tuple(blocks))
                gathered, blocks, filled = {}, [], 0
    if blocks:
        yield Batch(reader, gathered, tuple(blocks))


class Tally:
    """What differs in each tensor: how many elements, and the first of them. Told from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._first: dict[str, tuple[int, str]] = {}

    def add(self, name: str, at: int, what: str, count: int) -> None:
        """Of a block of tensor `name`, `count` elements differ, the first being element `at`."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count
            self._first[name] = min(self._first.get(name, (at, what)), (at, what))

    def lines(self, tensors: Iterable[LazyTensor]) -> Iterator[str]:
        """A line for each tensor that differs, in the order of `tensors`."""
        for tensor in tensors:
            if tensor.name in self._first:
                at, what = self._first[tensor.name]
                index = [int(i) for i in np.unravel_index(at, tensor.shape)]
                count = self._counts[tensor.name]
                yield f"{tensor.name}: element {index} {what} ({count} of {tensor.numel} elements differ)"


def compare(batch: Batch, checkpoint: Mapping[str, LazyTensor], tally: Tally) -> None:
    """Reads a batch and the same elements of the checkpoint, cast as the output was."""
    for block, values in zip(batch.blocks, batch.reader.read(batch.blocks), strict=True):
        tensor, dtype = checkpoint[block.name], batch.tensors[block.name].dtype
        source = read(tensor, block.start, block.start + block.count)
        expected = source
        if tensor.dtype != dtype:
            expected = np.empty(block.count, dtype.numpy)
            cast(source, expected)
        # A cast may leave any NaN for a NaN, depending on the processor; a copy may not.
        where = differing(expected, values, exact=tensor.dtype == dtype)
        if len(where):
            at = int(where[0])
            what = f"is {values[at]!s}, should be {expected[at]!s}"
            if f"{values[at]!s}" == f"{expected[at]!s}":
                what = f"is {values[at : at + 1].tobytes()[::-1].hex()}, should be {expected[at : at + 1].tobytes()[::-1].hex()}"
            tally.add(block.name, block.start + at, what, len(where))
