"""From pieces to arrays: the one place where a LazyTensor's bytes are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyzero.container.mapped import map_range
from lazyzero.container.objects import Storage
from lazyzero.container.reader import Want, read_all
from lazyzero.dtypes import DType
from lazyzero.errors import MissingDependency
from lazyzero.tensor import LazyTensor, Mean, Piece

if TYPE_CHECKING:
    import torch

_SPAN = 1 << 20  # bytes of a strided block that are read at once


def wants(tensor: LazyTensor, start: int, stop: int, into: np.ndarray) -> Iterator[Want]:
    """What has to be read for elements [start, stop) to stand in `into` (1-D bytes).

    Strided blocks are read here, and means computed here, from one copy after the other.
    """
    if isinstance(tensor.data, Mean):
        _average(tensor, tensor.data, start, stop, into)
        return
    size = tensor.dtype.itemsize
    view, at = into.data, 0
    for piece in tensor.pieces(start, stop):
        nbytes = piece.numel * size
        if piece.shape is None:
            yield Want(piece.storage, piece.start, nbytes, view[at : at + nbytes])
        else:
            _read_block(piece, tensor.dtype, into[at : at + nbytes].view(tensor.dtype.numpy).reshape(piece.shape))
        at += nbytes


def read(tensor: LazyTensor, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) as a 1-D array of its own."""
    raw = np.empty((stop - start) * tensor.dtype.itemsize, np.uint8)
    read_all(wants(tensor, start, stop, raw))
    return raw.view(tensor.dtype.numpy)


def chunks(tensor: LazyTensor, size: int) -> Iterator[np.ndarray]:
    """The tensor as consecutive 1-D arrays of at most `size` bytes, each in the same buffer."""
    count = max(1, size // tensor.dtype.itemsize)
    buffer = np.empty(min(count, tensor.numel) * tensor.dtype.itemsize, np.uint8)
    for start in range(0, tensor.numel, count):
        stop = min(start + count, tensor.numel)
        raw = buffer[: (stop - start) * tensor.dtype.itemsize]
        read_all(wants(tensor, start, stop, raw))
        yield raw.view(tensor.dtype.numpy)


def to_numpy(tensor: LazyTensor, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop), 1-D and read-only: a view of the mapped file where one piece holds them."""
    mapped = _mapped(tensor, start, stop, private=False)
    array = read(tensor, start, stop) if mapped is None else mapped
    array.flags.writeable = False
    return array


def to_torch(tensor: LazyTensor) -> torch.Tensor:
    """The whole tensor for torch, on memory that may be written to without touching the file."""
    try:
        import torch
    except ImportError:
        raise MissingDependency("torch tensors need torch: pip install 'lazyzero[torch]'") from None
    array = _mapped(tensor, 0, tensor.numel, private=True)
    if array is None:
        array = read(tensor, 0, tensor.numel)
    # torch knows neither ml_dtypes nor, before 2.3, wide unsigned integers: hand over bytes and name the type.
    flat = torch.from_numpy(array.view(np.uint8)).view(getattr(torch, tensor.dtype.name))
    return flat.reshape(tensor.shape)


def select(tensor: LazyTensor, index: Any) -> np.ndarray:
    """numpy's basic indexing, reading only the rows that a leading int or slice names."""
    parts = index if isinstance(index, tuple) else (index,)
    if not tensor.shape or not parts or not all(map(_is_basic, parts)):
        return np.asarray(tensor.numpy()[index])  # next to an array, an int means something else
    first, rest = parts[0], parts[1:]
    if isinstance(first, (int, np.integer)):
        row = range(tensor.shape[0])[int(first)]
        return np.asarray(_rows(tensor, row, row + 1)[0][rest])
    if isinstance(first, slice):
        start, stop, step = first.indices(tensor.shape[0])
        picked = range(start, stop, step)
        low, high = (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1) if len(picked) else (0, 0)
        rows = _rows(tensor, low, high)
        return np.asarray(rows[::step][(slice(None), *rest)] if step > 0 else rows[::-1][::-step][(slice(None), *rest)])
    return np.asarray(tensor.numpy()[index])


def _is_basic(part: Any) -> bool:
    number = isinstance(part, (int, np.integer)) and not isinstance(part, bool)
    return number or part is None or part is Ellipsis or isinstance(part, slice)


def _rows(tensor: LazyTensor, start: int, stop: int) -> np.ndarray:
    width = math.prod(tensor.shape[1:])
    return to_numpy(tensor, start * width, stop * width).reshape(stop - start, *tensor.shape[1:])


def _average(tensor: LazyTensor, mean: Mean, start: int, stop: int, into: np.ndarray) -> None:
    total: np.ndarray | None = None
    for copy in mean.copies:
        values = read(LazyTensor(tensor.name, tensor.shape, copy, tensor.role), start, stop)
        if total is None:
            total = values
        else:
            total += values
    assert total is not None
    total /= total.dtype.type(len(mean.copies))
    into[...] = total.view(np.uint8)


def _mapped(tensor: LazyTensor, start: int, stop: int, *, private: bool) -> np.ndarray | None:
    if isinstance(tensor.data, Mean):
        return None
    pieces = tensor.pieces(start, stop)
    piece, more = next(pieces, None), next(pieces, None)
    if piece is None or more is not None or piece.shape is not None:
        return None
    at = piece.storage.offset + piece.start
    if at % tensor.dtype.itemsize:  # legacy archives align nothing
        return None
    mapping = map_range(piece.storage.source, at, piece.numel * tensor.dtype.itemsize, private=private)
    if mapping is None:
        return None
    return np.frombuffer(mapping[0], tensor.dtype.numpy, piece.numel, mapping[1])


def _read_block(piece: Piece, dtype: DType, into: np.ndarray) -> None:
    assert piece.shape is not None and piece.stride is not None
    _fill_strided(piece.storage, piece.start, dtype, piece.shape, piece.stride, into)


def _fill_strided(
    storage: Storage, start: int, dtype: DType, shape: tuple[int, ...], stride: tuple[int, ...], into: np.ndarray
) -> None:
    """Copies a strided block: what spans little is read whole, what spans much is halved along its widest axis."""
    extents = [(count - 1) * step for count, step in zip(shape, stride, strict=True)]
    nbytes = (sum(extents) + 1) * dtype.itemsize
    axis = max(range(len(shape)), key=lambda i: extents[i], default=0)
    if nbytes <= _SPAN or not shape or shape[axis] == 1:
        raw = np.empty(nbytes, np.uint8)
        read_all([Want(storage, start, nbytes, raw.data)])
        steps = tuple(step * dtype.itemsize for step in stride)
        into[...] = np.lib.stride_tricks.as_strided(raw.view(dtype.numpy), shape, steps, writeable=False)
        return
    half = shape[axis] // 2
    for first, count in ((0, half), (half, shape[axis] - half)):
        part = (*shape[:axis], count, *shape[axis + 1 :])
        where = (slice(None),) * axis + (slice(first, first + count),)
        at = start + first * stride[axis] * dtype.itemsize
        _fill_strided(storage, at, dtype, part, stride, into[where])
