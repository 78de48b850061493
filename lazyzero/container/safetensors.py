"""Reads the header of a safetensors file: its tensors as references to byte ranges, nothing else.

An unsigned little-endian 64-bit length, that much JSON {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, TypeGuard

from lazyzero.container.brief import brief
from lazyzero.container.objects import Storage, TensorRef
from lazyzero.container.source import Source
from lazyzero.dtypes import DTYPES
from lazyzero.errors import BrokenArchive, UnsafeArchive

_LARGEST_HEADER = 24 << 20  # bytes; some 150,000 tensors
_MOST_BRACKETS, _MOST_COMMAS = 600_000, 1_500_000  # which decide what the parsed header takes
_MOST_DIMENSIONS = 64
_BY_TAG = {dtype.tag: dtype for dtype in DTYPES.values() if dtype.tag}


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorRef]:
    """The tensors of the file by name, in the header's order. Raises BrokenArchive, CheckpointNotFound or ReadError."""
    source = Source.open(path)
    if source.size < 8:
        raise BrokenArchive(f"{source.path}: expected a safetensors file, found {source.size} bytes; copy it again")
    length = int.from_bytes(source.read(0, 8), "little")
    if not 2 <= length <= min(_LARGEST_HEADER, source.size - 8):
        raise BrokenArchive(
            f"{source.path}: expected a safetensors header, found one of {length} bytes in a file of {source.size}; "
            "truncated, or another kind of file"
        )
    raw = source.read(8, length)
    if raw.count(b"[") + raw.count(b"{") > _MOST_BRACKETS or raw.count(b",") > _MOST_COMMAS:
        raise UnsafeArchive(f"{source.path}: its header of {length} bytes describes more than any model; refused")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise BrokenArchive(f"{source.path}: its header is no JSON object; damaged, or another kind of file")
    return {name: _tensor(source, 8 + length, name, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor(source: Source, start: int, name: str, entry: Any) -> TensorRef:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = _BY_TAG.get(str(fields.get("dtype"))), fields.get("shape"), fields.get("data_offsets")
    if dtype is None or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise BrokenArchive(f"{source.path}: {brief(name, 60)} is described by {brief(entry, 120)}; damaged file")
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes or start + end > source.size:
        raise BrokenArchive(
            f"{source.path}: {brief(name, 60)}: expected {nbytes} bytes, found {begin} to {end} of {source.size - start}; "
            "truncated or damaged file"
        )
    storage = Storage(source, name, dtype, nbytes)
    storage.place(start + begin)
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorRef(storage, 0, tuple(shape), stride, dtype)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size < 1 << 62 for size in value)
