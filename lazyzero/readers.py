"""Reads an output back through the official readers, a bounded number of blocks at a time.

Both readers map the file and keep what was touched resident, so a file is opened anew for every few MB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lazyzero.dtypes import DTYPES, FLOAT32, DType
from lazyzero.errors import BrokenArchive, MissingDependency

BLOCK = 4 << 20  # bytes

_BY_TAG = {dtype.tag: dtype for dtype in DTYPES.values() if dtype.tag}


@dataclass(frozen=True, slots=True)
class Stored:
    """What an output file says of one tensor; `storage` identifies the bytes, where the format can share them."""

    shape: tuple[int, ...]
    dtype: DType
    storage: object = None


@dataclass(frozen=True, slots=True)
class Block:
    """`count` elements of a tensor from element `start` on, in row-major order; `index` picks them out of the array."""

    name: str
    index: tuple[slice, ...]
    start: int
    count: int


class Reader(Protocol):
    """One output file. All methods raise BrokenArchive for a file that its official reader does not take."""

    def tensors(self) -> dict[str, Stored]:
        """All tensors in it."""

    def metadata(self) -> dict[str, str]:
        """The file's own metadata, empty where the format has none."""

    def read(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        """The values of each block, 1-D, by one opening of the file."""


def open_output(path: Path) -> Reader:
    """A reader for a .safetensors or .bin file."""
    return SafetensorsReader(path) if path.suffix == ".safetensors" else TorchReader(path)


class SafetensorsReader:
    """Through safetensors.safe_open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # numpy knows bfloat16 by name once ml_dtypes is imported, and the reader asks for it by name.
        import ml_dtypes  # noqa: F401

    @contextmanager
    def _open(self) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, "np") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise BrokenArchive(f"{self._path}: is no whole safetensors file: {error}") from None

    def tensors(self) -> dict[str, Stored]:
        """All tensors in it."""
        found = {}
        with self._open() as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                view = file.get_slice(name)
                dtype = _BY_TAG.get(view.get_dtype())
                if dtype is None:
                    raise BrokenArchive(
                        f"{self._path}: {name} has dtype {view.get_dtype()}, which is never written here"
                    )
                found[name] = Stored(tuple(view.get_shape()), dtype)
        return found

    def metadata(self) -> dict[str, str]:
        """The header's `__metadata__`."""
        with self._open() as file:
            return dict(file.metadata() or {})

    def read(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        """As in Reader."""
        with self._open() as file:
            for block in blocks:
                yield np.ascontiguousarray(self._values(file, block)).reshape(-1)

    def _values(self, file: Any, block: Block) -> np.ndarray:
        view = file.get_slice(block.name)
        if view.get_dtype().startswith("F8"):
            return self._raw(block, tuple(view.get_shape()), _BY_TAG[view.get_dtype()])
        return np.asarray(view[block.index] if block.index else file.get_tensor(block.name))

    def _raw(self, block: Block, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        """Past the reader, whose numpy side does not have the 8-bit floats."""
        import json

        with self._path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            first, _ = json.loads(file.read(size))[block.name]["data_offsets"]
        mapped = np.memmap(self._path, dtype.numpy, "r", 8 + size + first, shape or (1,))
        return np.array(mapped[block.index] if block.index else mapped)


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
            loaded = dict(self._torch.load(self._path, weights_only=True, mmap=True, map_location="cpu"))
        except Exception as error:  # torch raises whatever its parts raise
            first = str(error).strip().splitlines()[:1]
            raise BrokenArchive(f"{self._path}: torch cannot load it: {' '.join(first)[:200]}") from None
        for name, value in loaded.items():
            if not isinstance(value, self._torch.Tensor) or self._dtype(value) is None:
                raise BrokenArchive(f"{self._path}: {name!r:.200} is not a tensor of a dtype that is written here")
        return loaded

    def _dtype(self, tensor: Any) -> DType | None:
        return DTYPES.get(str(tensor.dtype).removeprefix("torch."))

    def tensors(self) -> dict[str, Stored]:
        """All tensors in it."""
        return {
            name: Stored(
                tuple(tensor.shape),
                self._dtype(tensor) or FLOAT32,
                (tensor.untyped_storage().data_ptr(), tensor.storage_offset()) if tensor.numel() else None,
            )
            for name, tensor in self._load().items()
        }

    def metadata(self) -> dict[str, str]:
        """None in this format."""
        return {}

    def read(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        """As in Reader."""
        loaded = self._load()
        for block in blocks:
            whole = loaded[block.name]
            flat = whole.reshape(-1)[block.start : block.start + block.count]
            dtype = self._dtype(whole) or FLOAT32
            yield flat.contiguous().view(self._torch.uint8).numpy().view(dtype.numpy)


def blocks_of(name: str, stored: Stored) -> Iterator[Block]:
    """The whole tensor in blocks of at most BLOCK bytes."""
    for index, start in cut(stored.shape, max(1, BLOCK // stored.dtype.itemsize)):
        inner = math.prod(stored.shape[len(index) :])
        yield Block(name, index, start, math.prod(one.stop - one.start for one in index) * inner)


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
