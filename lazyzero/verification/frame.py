"""Every byte of a `.bin` file that no reader looks at: the zip archive's frame must be the one torch writes.

    for each member: local header, name, [zip64 field], padding field "FB"; its data; a descriptor with its CRC and sizes
    central directory: for each member an entry with the same facts | zip64 end, its locator, end

All of it follows from the members' names, CRCs, sizes and places, so it is built anew and compared.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lazyzero.errors import ReadError

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_TAIL = _END64.size + 20 + 22  # bytes: the zip64 end, its locator, the end
_FULL = 0xFFFFFFFF  # a 32-bit field that refers to the zip64 field
_BLOCK = 1 << 20
_DESCRIBED = 8  # the flag of a member with a descriptor


class _Odd(Exception):
    """Something is not as torch writes it."""


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    flags: int
    crc: int
    size: int
    offset: int  # bytes, of its local header

    @property
    def wide(self) -> bytes:
        """The zip64 field: what does not fit into 32 bits."""
        values = [self.size] * 2 * (self.size >= _FULL) + [self.offset] * (self.offset >= _FULL)
        return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""

    @property
    def entry(self) -> bytes:
        """Its entry in the central directory."""
        size, extra = min(self.size, _FULL), self.wide
        fields = (0, 0, self.flags, 0, 0, 0, self.crc, size, size, len(self.name), len(extra), 0, 0, 0, 0)
        return _ENTRY.pack(b"PK\x01\x02", *fields, min(self.offset, _FULL)) + self.name + extra

    def header(self, extra_size: int) -> bytes:
        """Its local header with everything up to the data, `extra_size` bytes of fields among it."""
        pad = extra_size - len(self.wide) - 4
        fixed = _LOCAL.pack(b"PK\x03\x04", 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), extra_size)
        return fixed + self.name + self.wide + struct.pack("<2sH", b"FB", max(pad, 0)) + b"Z" * max(pad, 0)

    @property
    def descriptor(self) -> bytes:
        """What stands behind its data."""
        if not self.flags & _DESCRIBED:
            return b""
        return struct.pack("<4sL2Q" if self.wide else "<4s3L", b"PK\x07\x08", self.crc, self.size, self.size)


def faults(path: Path) -> Iterator[str]:
    """A line for the first thing that is wrong about the archive at `path`; nothing when all is right.

    Reads the whole file. Raises ReadError.
    """
    try:
        with path.open("rb") as file:
            _check(file)
    except _Odd as odd:
        yield f"{path.name}: {odd}"
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from None


def _check(file: BinaryIO) -> None:
    size = file.seek(0, 2)
    start, count = _ends(file, size)
    at = 0
    for member in _directory(file, start, size - _TAIL, count):
        if member.offset != at:
            raise _Odd(f"member {_shown(member)} should begin at byte {at}, is said to at {member.offset}")
        extra_size = int.from_bytes(_read(file, at + 28, 2), "little")
        at = _expect(file, at, member.header(extra_size), f"header of member {_shown(member)}")
        if at + member.size > start:
            raise _Odd(f"member {_shown(member)} reaches into the directory")
        if _crc(file, at, member.size) != member.crc:
            raise _Odd(f"the data of member {_shown(member)} does not have the CRC-32 on record")
        at = _expect(file, at + member.size, member.descriptor, f"descriptor of member {_shown(member)}")
    if at != start:
        raise _Odd(f"{start - at} bytes between the last member and the directory belong to neither")


def _ends(file: BinaryIO, size: int) -> tuple[int, int]:
    """Where the central directory begins, and how many entries it has."""
    if size < _TAIL:
        raise _Odd("is too short for an archive")
    fields = _END64.unpack(_read(file, size - _TAIL, _END64.size))
    count, length, start = fields[7:]
    made = _END64.pack(b"PK\x06\x06", 44, *fields[2:4], 0, 0, count, count, length, start)
    made += struct.pack("<4sLQL", b"PK\x06\x07", 0, size - _TAIL, 1)
    few = min(count, 0xFFFF)
    made += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, few, few, min(length, _FULL), min(start, _FULL), 0)
    _expect(file, size - _TAIL, made, "end of the archive")
    if fields[2:4] != (798, 45) or start + length != size - _TAIL:
        raise _Odd("the end of the archive is not as torch writes it")
    return start, count


def _directory(file: BinaryIO, at: int, end: int, count: int) -> Iterator[_Member]:
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise _Odd("the directory ends early")
        fields = _ENTRY.unpack(_read(file, at, _ENTRY.size))
        name = _read(file, at + _ENTRY.size, fields[10])
        size, offset = fields[9], fields[16]
        extra = _read(file, at + _ENTRY.size + len(name), fields[11])
        values = [value for (value,) in struct.iter_unpack("<Q", extra[4 : 4 + (len(extra) - 4) // 8 * 8])]
        if offset == _FULL and values:
            offset = values[-1]
        if size == _FULL and values:
            size = values[0]
        member = _Member(name, fields[3], fields[7], size, offset)
        at = _expect(file, at, member.entry, f"directory entry of {_shown(member)}")
        yield member
    if at != end:
        raise _Odd("the directory has bytes behind its last entry")


def _expect(file: BinaryIO, at: int, expected: bytes, what: str) -> int:
    """Requires these bytes at `at`; the offset behind them."""
    found = _read(file, at, len(expected))
    if found != expected:
        first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
        raise _Odd(f"byte {at + first}, in the {what}, is not as torch writes it")
    return at + len(expected)


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _crc(file: BinaryIO, at: int, count: int) -> int:
    crc = 0
    file.seek(at)
    while count:
        block = file.read(min(_BLOCK, count))
        if not block:
            raise _Odd("ends early")
        crc = zlib.crc32(block, crc)
        count -= len(block)
    return crc


def _shown(member: _Member) -> str:
    return repr(member.name.decode("utf-8", "backslashreplace"))
