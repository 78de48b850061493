"""LazyTensor: a named array whose bytes still lie in the checkpoint's files. Placeholder: its shape and dtype alone.

Where the bytes are is described by a `Data`: a handful of numbers that yields the byte ranges (`Piece`) of any run of
elements on request. 405 billion parameters over 1024 ranks are a million pieces; none of them is stored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lazyzero.container.objects import Storage, TensorRef
from lazyzero.dtypes import DType
from lazyzero.errors import LazyZeroError

if TYPE_CHECKING:
    import numpy as np
    import torch


class Piece(NamedTuple):
    """A run of elements in one storage: `start` is the byte offset in the storage.

    A contiguous run has no `shape`; a strided block has its shape and strides (elements).
    A tuple, because millions are made.
    """

    storage: Storage
    start: int
    numel: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None


class Data(Protocol):
    """Where the elements of a tensor are, in row-major order."""

    @property
    def dtype(self) -> DType:
        """Element type as stored."""

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces that together hold elements [start, stop), in order."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor that lies in one storage, contiguous or strided."""

    ref: TensorRef

    @property
    def dtype(self) -> DType:
        return self.ref.dtype

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        ref = self.ref
        if start >= stop:
            return
        if ref.contiguous:
            yield Piece(ref.storage, (ref.offset + start) * ref.dtype.itemsize, stop - start)
        else:
            yield from _blocks(ref, ref.offset, ref.shape, ref.stride, start, stop)


def _blocks(
    ref: TensorRef, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], start: int, stop: int
) -> Iterator[Piece]:
    """Cuts a run of row-major elements of a strided array into rectangular blocks."""
    if not shape:
        yield Piece(ref.storage, offset * ref.dtype.itemsize, 1)
        return
    row = 1
    for size in shape[1:]:
        row *= size
    first, last = -(-start // row), stop // row  # whole rows [first, last)
    if first > last:  # within one row
        index = start // row
        yield from _blocks(
            ref, offset + index * stride[0], shape[1:], stride[1:], start - index * row, stop - index * row
        )
        return
    if start < first * row:
        inner = start - (first - 1) * row
        yield from _blocks(ref, offset + (first - 1) * stride[0], shape[1:], stride[1:], inner, row)
    if last > first:
        block = (last - first, *shape[1:])
        at = (offset + first * stride[0]) * ref.dtype.itemsize
        yield Piece(ref.storage, at, (last - first) * row, block, stride)
    if stop > last * row:
        yield from _blocks(ref, offset + last * stride[0], shape[1:], stride[1:], 0, stop - last * row)


class Chain:
    """1-D views read one after the other, as ZeRO-1/2's ranks are and ZeRO-3's sub-groups on one rank."""

    __slots__ = ("dtype", "ends", "total", "views")

    def __init__(self, views: Sequence[TensorRef], dtype: DType) -> None:
        self.views = tuple(view for view in views if view.numel)
        self.dtype = dtype
        self.ends = tuple(accumulate(view.numel for view in self.views))
        self.total = self.ends[-1] if self.ends else 0

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of elements [start, stop) of the whole chain."""
        at = bisect_right(self.ends, start)
        first = self.ends[at - 1] if at else 0
        while start < stop:
            view = self.views[at]
            end = min(stop, self.ends[at])
            yield Piece(view.storage, (view.offset + start - first) * self.dtype.itemsize, end - start)
            start = first = end
            at += 1


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [offset, offset + numel) of a chain."""

    chain: Chain
    offset: int

    @property
    def dtype(self) -> DType:
        return self.chain.dtype

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        yield from self.chain.pieces(self.offset + start, self.offset + stop)


@dataclass(frozen=True, slots=True)
class Striped:
    """A ZeRO-3 parameter: rank r holds elements [r * part, (r + 1) * part), at `offset` of its chain."""

    chains: tuple[Chain, ...]
    offset: int
    part: int

    @property
    def dtype(self) -> DType:
        return self.chains[0].dtype

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        rank, inner = divmod(start, self.part)
        while start < stop:
            count = min(stop - start, self.part - inner)
            yield from self.chains[rank].pieces(self.offset + inner, self.offset + inner + count)
            start += count
            rank, inner = rank + 1, 0


@dataclass(frozen=True, slots=True)
class Fragments:
    """A frozen ZeRO-3 parameter: rank r holds elements [r * part, (r + 1) * part) in a storage of their own, from
    element `offsets[r]` of it. 70 billion parameters over 64 ranks are 46,000 of these, so nothing else is kept."""

    storages: tuple[Storage, ...]
    offsets: tuple[int, ...]
    part: int
    dtype: DType

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        rank, inner = divmod(start, self.part)
        while start < stop:
            count = min(stop - start, self.part - inner)
            yield Piece(self.storages[rank], (self.offsets[rank] + inner) * self.dtype.itemsize, count)
            start += count
            rank, inner = rank + 1, 0


@dataclass(frozen=True, slots=True)
class Mean:
    """Values that stand in no file: the mean of copies, element by element, summed in their order and in their dtype.

    The one kind of data that is computed, so it only ever is a whole tensor's, never a part of other data.
    """

    copies: tuple[Data, ...]

    @property
    def dtype(self) -> DType:
        return self.copies[0].dtype

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The byte ranges the values are computed from: those of the first copy, then of the second, and so on."""
        for copy in self.copies:
            yield from copy.pieces(start, stop)


@dataclass(frozen=True, slots=True)
class Absent:
    """Data that some missing file holds; asking for it raises the error that says which."""

    dtype: DType
    error: LazyZeroError

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        raise self.error


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What planning knows of a tensor: no bytes, no file. `tied_to` names the owner of a tied entry."""

    shape: tuple[int, ...]
    dtype: DType
    tied_to: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, repr=False)
class LazyTensor:
    """One entry of a checkpoint; shape, dtype and size are known, bytes are read when asked for.

    `role` is "trainable", "frozen", "buffer" or "module" (saved only in the module's own copy); `tied_to` is the name
    of the owner when this is another name of the same parameter, else None.
    """

    name: str
    shape: tuple[int, ...]
    data: Data
    role: str
    tied_to: str | None = None

    @property
    def dtype(self) -> DType:
        """Element type as stored in the checkpoint."""
        return self.data.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, in the stored dtype."""
        return self.numel * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """The byte ranges of elements [start, stop) in row-major order; nothing is read."""
        return self.data.pieces(start, self.numel if stop is None else stop)

    def chunks(self, size: int = 4 << 20) -> Iterator[np.ndarray]:
        """1-D arrays of at most `size` bytes which together are the tensor; each is only valid until the next."""
        from lazyzero.gather import chunks

        return chunks(self, size)

    def numpy(self) -> np.ndarray:
        """The values: a read-only view of the mapped file where one piece holds them all, else an array of its own.

        bfloat16 and 8-bit floats come as ml_dtypes' types. As with any mapping, a view dies with the process (SIGBUS) when
        it is touched after the file was truncated; `chunks` and conversions copy, and raise SourceChanged instead.
        Raises ReadError or SourceChanged.
        """
        from lazyzero.gather import to_numpy

        return to_numpy(self, 0, self.numel).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """The values as a torch tensor of its own: writing to it never reaches the file.

        Where one piece holds them the file is mapped copy-on-write, so only pages that are touched cost memory; what
        `numpy` says of truncated files holds here too.
        Raises MissingDependency without torch, ReadError or SourceChanged.
        """
        from lazyzero.gather import to_torch

        return to_torch(self)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Basic numpy indexing; an int or a slice in the first place reads only those rows."""
        from lazyzero.gather import select

        return select(self, index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        tied = f", tied_to={self.tied_to!r}" if self.tied_to else ""
        return f"LazyTensor({self.name!r}, shape={list(self.shape)}, dtype={self.dtype}, {self.role}{tied})"
