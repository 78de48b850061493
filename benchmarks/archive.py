"""Writes torch's zip archives without torch: stored members, data aligned to 64 bytes, zip64 where needed, holes kept."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from benchmarks.pickled import Pickler, Storage

_ALIGNMENT: Final = 64
_NARROW: Final = 0xFFFFFFFF
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_DESCRIBED: Final = 0x0808  # UTF-8 names, sizes follow the data
_EMPTY: Final = 0x0800


def save(value: object, path: Path) -> None:
    """Writes `value` as `torch.save(value, path)` would."""
    write(pickled(value), path)


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value's pickle and the storages it refers to: all that a file needs but its name."""

    data: bytes
    storages: list[Storage]


def pickled(value: object) -> Pickled:
    """Pickles `value`, for several files of the same contents."""
    pickler = Pickler()
    return Pickled(pickler.dump(value), pickler.storages)


def write(value: Pickled, path: Path) -> None:
    """Writes the archive."""
    with path.open("wb") as file:
        writer = _Writer(file, path.name.removesuffix(".pt"))
        writer.member("data.pkl", [value.data])
        writer.member(".format_version", [b"1"])
        writer.member(".storage_alignment", [b"64"])
        writer.member("byteorder", [b"little"])
        for key, storage in enumerate(value.storages):
            written = writer.member(f"data/{key}", storage.content())
            if written != storage.nbytes:
                raise AssertionError(f"{path}: storage {key} has {written} bytes, expected {storage.nbytes}")
        writer.member("version", [b"3\n"])
        writer.member(".data/serialization_id", [writer.identity()])
        writer.finish()


def _after_zeros(crc: int, count: int) -> int:
    """The CRC-32 of what had `crc`, with `count` zero bytes appended, in time that grows with the digits of `count`."""
    crc ^= _NARROW
    for matrix in _POWERS:
        if count & 1:
            crc = _times(matrix, crc)
        count >>= 1
    return crc ^ _NARROW


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for row in matrix:
        if vector & 1:
            total ^= row
        vector >>= 1
    return total


def _powers() -> list[tuple[int, ...]]:
    """What 1, 2, 4, ... zero bytes do to a CRC: matrices over GF(2), up to 2 ** 47 bytes."""
    matrix = (0xEDB88320, *(1 << bit for bit in range(31)))  # one zero bit
    powers = []
    for _ in range(3 + 48):
        powers.append(matrix)
        matrix = tuple(_times(matrix, row) for row in matrix)
    return powers[3:]


_POWERS: Final = _powers()


class _Writer:
    def __init__(self, file: BinaryIO, root: str) -> None:
        self._file = file
        self._root = root
        self._at = 0
        self._directory = bytearray()
        self._count = 0

    def identity(self) -> bytes:
        """Forty digits that depend on every name and CRC so far."""
        digest = hashlib.sha256(self._directory).digest()
        return f"{int.from_bytes(digest[:16], 'little'):040d}"[-40:].encode()

    def member(self, name: str, parts: Iterable[bytes | memoryview | int]) -> int:
        """Appends a member; returns its size in bytes."""
        raw = f"{self._root}/{name}".encode()
        held = list(parts)  # the header depends on their size
        nbytes = sum(part if isinstance(part, int) else len(part) for part in held)
        wide = b"".join(struct.pack("<Q", value) for value in self._wide(nbytes))
        zip64 = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
        header = self._at
        start = header + _LOCAL.size + len(raw) + len(zip64) + 4
        padding = -start % _ALIGNMENT
        extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        flags = _DESCRIBED if nbytes else _EMPTY
        self._write(_LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(extra)) + raw + extra)
        crc = self._data(held)
        if nbytes:
            self._write(struct.pack("<4sL2Q" if wide else "<4s3L", b"PK\x07\x08", crc, nbytes, nbytes))
        narrow = min(nbytes, _NARROW)
        self._directory += _CENTRAL.pack(
            b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, narrow, narrow, len(raw), len(zip64), 0, 0, 0, 0,
            min(header, _NARROW),
        )  # fmt: skip
        self._directory += raw + zip64
        self._count += 1
        return nbytes

    def _wide(self, nbytes: int) -> list[int]:
        """What does not fit into 32 bits, in the order of the zip64 field."""
        sizes = [nbytes, nbytes] if nbytes >= _NARROW else []
        return sizes + ([self._at] if self._at >= _NARROW else [])

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._at += len(data)

    def _data(self, parts: list[bytes | memoryview | int]) -> int:
        crc = 0
        for part in parts:
            if isinstance(part, int):
                self._at += part
                self._file.seek(self._at)
                crc = _after_zeros(crc, part)
            else:
                crc = zlib.crc32(part, crc)
                self._write(part)
        return crc

    def finish(self) -> None:
        """Writes the directory; every torch archive has the zip64 records too."""
        start, size = self._at, len(self._directory)
        self._write(bytes(self._directory))
        end = self._at
        self._write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 798, 45, 0, 0, self._count, self._count, size, start))
        self._write(struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1))
        count = min(self._count, 0xFFFF)
        narrow = min(size, _NARROW), min(start, _NARROW)
        self._write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, *narrow, 0))
        self._file.flush()
        os.ftruncate(self._file.fileno(), self._at)
