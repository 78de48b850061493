"""`.bin` files: torch writes the archive around the data, which is then streamed into the places left for it.

The tensors torch is given lie in one read-only mapping of nothing: they have shapes, dtypes and storages, and no
memory. `torch.serialization.skip_data` (torch 2.6 on) leaves holes for their bytes; earlier versions write zeros. Where
each record lies is read back with the archive reader, and the checksums are corrected once the data is known.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import warnings
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lazyzero.container.archive import open_archive
from lazyzero.container.objects import Storage, TensorRef
from lazyzero.errors import MissingDependency, WriteError
from lazyzero.export.crc import combine
from lazyzero.export.plan import Shard
from lazyzero.export.safetensors import Place
from lazyzero.export.sink import FileSink, write_errors
from lazyzero.tensor import Placeholder

_ALIGN = 4096
_DESCRIPTOR = b"PK\x07\x08"


def require_torch() -> Any:
    """The torch module. Raises MissingDependency with what to install."""
    try:
        import torch
    except ImportError:
        raise MissingDependency(
            ".bin files need torch: pip install 'lazyzero[torch]'; safetensors files do not"
        ) from None
    return torch


def write_skeleton(path: Path, shard: Shard) -> None:
    """Writes the archive of `shard` to `path`, all but the tensors' bytes; tied names share one storage."""
    torch = require_torch()
    offsets, total = {}, 0
    for name, placeholder in shard.entries:
        if placeholder.tied_to not in offsets:
            offsets[name] = total
            total += placeholder.nbytes + -placeholder.nbytes % _ALIGN
    nothing = mmap.mmap(-1, max(total, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    tensors: dict[str, Any] = {}
    for name, placeholder in shard.entries:
        if name in offsets:
            tensors[name] = _hollow(torch, nothing, offsets[name], placeholder)
        else:
            tensors[name] = tensors[str(placeholder.tied_to)]
    skip = getattr(torch.serialization, "skip_data", contextlib.nullcontext)
    with write_errors(path, "written"), path.open("xb") as file:
        told = _Remembering(file)
        try:
            with skip():
                torch.save(tensors, told)
        except RuntimeError as error:
            raise told.error or WriteError(f"{path}: torch could not write it: {error!s:.200}") from None


class _Remembering:
    """A file that keeps the error of a write: torch goes on after it, and raises one of its own that says nothing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        """As the file does."""
        try:
            return self._file.write(data)
        except BaseException as error:
            self.error = self.error or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _hollow(torch: Any, memory: mmap.mmap, offset: int, placeholder: Placeholder) -> Any:
    dtype = getattr(torch, placeholder.dtype.name)
    if not placeholder.numel:
        return torch.empty(placeholder.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only, which is the point
        flat = torch.frombuffer(memory, dtype=dtype, count=placeholder.numel, offset=offset)
    return flat.reshape(placeholder.shape)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A written skeleton: where each storage's data goes, by the first of its names."""

    places: tuple[Place, ...]
    entries: tuple[int, ...]  # byte offset of each place's central directory entry


def read_skeleton(path: Path, shard: Shard) -> Skeleton:
    """Finds the places in the file `write_skeleton` wrote."""
    refs = open_archive(path).root
    rows, names = [], dict(shard.entries)
    for name, placeholder in shard.entries:
        ref = refs[name]
        if isinstance(ref, TensorRef) and placeholder.tied_to not in names:
            rows.append((Place(name, placeholder, ref.storage.offset), _entry(ref.storage)))
    rows.sort(key=lambda row: row[0].offset)
    return Skeleton(tuple(place for place, _ in rows), tuple(entry for _, entry in rows))


def _entry(storage: Storage) -> int:
    assert storage.member is not None
    return storage.member.entry


class Checksums:
    """A Draft that passes everything on and, when a place is full, corrects the checksum the archive has for it."""

    sequential = False

    def __init__(self, sink: FileSink, skeleton: Skeleton) -> None:
        self.path = sink.path
        self.size = sink.size
        self._sink = sink
        self._skeleton = skeleton
        self._starts = [place.offset for place in skeleton.places]
        self._lock = threading.Lock()
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}  # place -> offset -> (crc, length)
        self._filled: dict[int, int] = {}  # place -> bytes

    def write(self, offset: int, data: memoryview) -> None:
        """Writes `data`, which lies within one place."""
        crc = zlib.crc32(data)
        self._sink.write(offset, data)
        number = bisect_right(self._starts, offset) - 1
        place = self._skeleton.places[number]
        with self._lock:
            parts = self._parts.setdefault(number, {})
            parts[offset] = (crc, len(data))
            self._filled[number] = self._filled.get(number, 0) + len(data)
            if self._filled[number] < place.placeholder.nbytes:
                return
            del self._parts[number]
        self._correct(place, self._skeleton.entries[number], parts)

    def _correct(self, place: Place, entry: int, parts: dict[int, tuple[int, int]]) -> None:
        """Puts the checksum in the descriptor behind the data and in the directory."""
        crc = 0
        for _, (part, length) in sorted(parts.items()):
            crc = combine(crc, part, length)
        raw, end = memoryview(crc.to_bytes(4, "little")), place.offset + place.placeholder.nbytes
        if self._sink.read(end, 4) == _DESCRIPTOR:
            self._sink.write_in_place(end + 4, raw)
        self._sink.write_in_place(entry + 16, raw)

    def read(self, offset: int, count: int) -> bytes:
        """As in Draft."""
        return self._sink.read(offset, count)

    def seal(self) -> None:
        """As in Draft."""
        self._sink.seal()

    def publish(self) -> None:
        """As in Draft."""
        self._sink.publish()

    def abandon(self) -> None:
        """As in Draft."""
        self._sink.abandon()
