"""Reads an output back through the official readers, a bounded block at a time.

Both readers map the file and keep what was touched resident, so a file is opened anew for every few MB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lazyzero.dtypes import DTYPES, DType
from lazyzero.errors import BrokenArchive, LazyZeroError, MissingDependency

BLOCK = 8 << 20  # bytes

_BY_TAG = {dtype.tag: dtype for dtype in DTYPES.values() if dtype.tag}


@dataclass(frozen=True, slots=True)
class Stored:
    """What an output file says of one tensor; `storage` identifies the bytes, where the format can share them."""

    shape: tuple[int, ...]
    dtype: DType
    storage: object = None


class Reader(Protocol):
    """One output file."""

    def tensors(self) -> dict[str, Stored]:
        """All tensors in it."""

    def metadata(self) -> dict[str, str]:
        """The file's own metadata, empty where the format has none."""

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """The tensor as (first element, 1-D values) blocks in row-major order."""


def open_output(path: Path) -> Reader:
    """A reader for a .safetensors or .bin file."""
    return SafetensorsReader(path) if path.suffix == ".safetensors" else TorchReader(path)


class SafetensorsReader:
    """Through safetensors.safe_open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # numpy knows bfloat16 by name once ml_dtypes is imported, and the reader asks for it by name.
        import ml_dtypes  # noqa: F401

    def _open(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self._path, "np")
        except (SafetensorError, OSError) as error:
            raise BrokenArchive(f"{self._path}: is no whole safetensors file: {error}") from None

    def tensors(self) -> dict[str, Stored]:
        """All tensors in it."""
        found = {}
        with self._open() as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                view = file.get_slice(name)
                found[name] = Stored(tuple(view.get_shape()), _BY_TAG[view.get_dtype()])
        return found

    def metadata(self) -> dict[str, str]:
        """The header's `__metadata__`."""
        with self._open() as file:
            return dict(file.metadata() or {})

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """The tensor in blocks; one opening of the file for each."""
        stored = self.tensors()[name]
        for index, start in cut(stored.shape, max(1, BLOCK // stored.dtype.itemsize)):
            with self._open() as file:
                values = self._values(file, name, stored, index)
                yield start, np.ascontiguousarray(values).reshape(-1)

    def _values(self, file: Any, name: str, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
        if stored.dtype.name.startswith("float8"):
            return self._raw(name, stored, index)  # the reader's numpy side has no such dtype
        if not index:
            return np.asarray(file.get_tensor(name))
        return np.asarray(file.get_slice(name)[index])

    def _raw(self, name: str, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
        import json

        with self._path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            first, _ = json.loads(file.read(size))[name]["data_offsets"]
        mapped = np.memmap(self._path, stored.dtype.numpy, "r", 8 + size + first, stored.shape or (1,))
        return np.array(mapped[index] if index else mapped)


class TorchReader:
    """Through torch.load(weights_only=True, mmap=True)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            import torch
        except ImportError:
            raise MissingDependency("reading .bin files needs torch: pip install 'lazyzero[torch]'") from None
        self._torch: Any = torch

    def _load(self) -> dict[str, Any]:
        try:
            loaded = self._torch.load(self._path, weights_only=True, mmap=True, map_location="cpu")
        except LazyZeroError:
            raise
        except Exception as error:  # torch raises whatever its parts raise
            first = str(error).strip().splitlines()[:1]
            raise BrokenArchive(f"{self._path}: torch cannot load it: {' '.join(first)[:200]}") from None
        return dict(loaded)

    def tensors(self) -> dict[str, Stored]:
        """All tensors in it."""
        return {
            name: Stored(
                tuple(tensor.shape),
                DTYPES[str(tensor.dtype).removeprefix("torch.")],
                (tensor.untyped_storage().data_ptr(), tensor.storage_offset()) if tensor.numel() else None,
            )
            for name, tensor in self._load().items()
        }

    def metadata(self) -> dict[str, str]:
        """None in this format."""
        return {}

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """The tensor in blocks; one loading of the file for each."""
        whole = self._load()[name]
        dtype = DTYPES[str(whole.dtype).removeprefix("torch.")]
        count, numel = max(1, BLOCK // dtype.itemsize), whole.numel()
        del whole
        for start in range(0, numel, count):
            flat = self._load()[name].reshape(-1)[start : start + count]
            raw = flat.contiguous().view(self._torch.uint8).numpy()
            yield start, raw.view(dtype.numpy)


def cut(shape: tuple[int, ...], count: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Index tuples that cut an array, in row-major order, into blocks of at most `count` elements, with the first
    element of each; () for a scalar, nothing for an empty array."""
    if 0 in shape:
        return
    if not shape:
        yield (), 0
        return
    row = math.prod(shape[1:])
    if row <= count:
        step = count // row
        for first in range(0, shape[0], step):
            yield (slice(first, min(first + step, shape[0])),), first * row
        return
    for index in range(shape[0]):
        for rest, start in cut(shape[1:], count):
            yield (slice(index, index + 1), *rest), index * row + start
