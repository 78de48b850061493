"""Tensors put together from tensors: slabs one after the other along one dimension, or the mean of several copies.

Pieces are generated, as everywhere: a tensor split over ranks along its columns has a piece for each row and rank, none
of them stored. The runs of one rank are neighbours in its file, so a window of them is still one read for each rank.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lazyzero.dtypes import DType
from lazyzero.tensor import Data, LazyTensor, Piece


@dataclass(frozen=True, slots=True)
class Slab:
    """Indices [start, start + size) along the dimension, of a tensor that has `extent` of them."""

    data: Data
    extent: int
    start: int
    size: int


class Concat:
    """Slabs read one after the other along a dimension; `inner` is the number of elements at one index of it."""

    __slots__ = ("dtype", "ends", "inner", "slabs")

    def __init__(self, slabs: Sequence[Slab], inner: int) -> None:
        self.slabs = tuple(slab for slab in slabs if slab.size) or tuple(slabs[:1])
        self.inner = inner
        self.dtype: DType = self.slabs[0].data.dtype
        self.ends = tuple(accumulate(slab.size * inner for slab in self.slabs))

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of elements [start, stop), row-major over the whole."""
        while start < stop:
            outer, at = divmod(start, self.ends[-1])
            index = bisect_right(self.ends, at)
            slab = self.slabs[index]
            inside = at - (self.ends[index] - slab.size * self.inner)
            first = (outer * slab.extent + slab.start) * self.inner + inside
            count = min(stop - start, self.ends[index] - at)
            yield from slab.data.pieces(first, first + count)
            start += count


def joined(name: str, slabs: Sequence[Slab], shape: tuple[int, ...], dim: int, role: str) -> LazyTensor:
    """One tensor of `shape` out of slabs along `dim`; a single whole slab is taken as it is."""
    if len(slabs) == 1 and slabs[0].size == slabs[0].extent:
        return LazyTensor(name, shape, slabs[0].data, role)
    return LazyTensor(name, shape, Concat(slabs, math.prod(shape[dim + 1 :])), role)
