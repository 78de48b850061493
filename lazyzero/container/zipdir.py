"""The central directory of a torch zip archive: which members there are, and where their bytes lie.

Only what torch and DeepSpeed write is accepted: stored members, no encryption, one disk, little surprise. zip64 is
read wherever it appears. Members must not overlap, and must lie in front of the directory: lies about sizes end here.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from lazyzero.container.brief import brief
from lazyzero.container.source import Source
from lazyzero.errors import BrokenArchive, UnsafeArchive

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 65535
_MAX_DIRECTORY = 32 << 20  # bytes
_MAX_MEMBERS = 150_000


class Member(NamedTuple):
    """A stored member: byte offset of its local header, bytes of its data, byte offset of its entry in the central
    directory, and where the next member begins."""

    header: int
    size: int
    entry: int
    end: int


def read_directory(source: Source) -> dict[str, Member]:
    """All members by name. Raises BrokenArchive for a file that is damaged, UnsafeArchive for one that lies."""
    start, size, count, end = _find_directory(source)
    if size > _MAX_DIRECTORY or count > _MAX_MEMBERS:
        raise UnsafeArchive(
            f"{source.path}: a zip directory of {count} members and {size} bytes is more than any checkpoint needs"
        )
    if start + size > end:
        raise BrokenArchive(f"{source.path}: zip directory lies outside the file; the file is truncated or damaged")
    data = source.read(start, size)
    extents: dict[str, tuple[int, int, int]] = {}
    at = 0
    for _ in range(count):
        entry = start + at
        name, header, size, at = _entry(source, data, at)
        if name in extents:
            raise UnsafeArchive(f"{source.path}: member {brief(name)} appears twice")
        extents[name] = header, size, entry
    return _members(source, extents, start)


def data_offset(source: Source, member: Member) -> int:
    """Byte offset of a member's data, from its local header (whose extra field differs from the directory's)."""
    fields = _LOCAL.unpack(source.read(member.header, _LOCAL.size))
    if fields[0] != b"PK\x03\x04":
        raise BrokenArchive(
            f"{source.path}: expected a zip member at byte {member.header}, found other bytes; damaged file"
        )
    if fields[3] != 0:
        raise UnsafeArchive(f"{source.path}: the member at byte {member.header} is compressed; torch never writes that")
    offset = member.header + _LOCAL.size + int(fields[9]) + int(fields[10])
    if offset + member.size > member.end:
        raise UnsafeArchive(
            f"{source.path}: the member at byte {member.header} reaches past byte {member.end}, where the next begins"
        )
    return offset


def _find_directory(source: Source) -> tuple[int, int, int, int]:
    """Byte offset, size and number of entries of the directory, and the offset of the record that ends it."""
    tail_size = min(source.size, _END.size + _MAX_COMMENT)
    tail = source.read(source.size - tail_size, tail_size)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise BrokenArchive(
            f"{source.path}: starts like a zip archive but has no directory at its end; it is truncated"
        )
    _, disk, first_disk, _, count, size, start, _ = _END.unpack_from(tail, at)
    end = source.size - tail_size + at
    if end >= _END64_LOCATOR.size:
        locator = _END64_LOCATOR.unpack(source.read(end - _END64_LOCATOR.size, _END64_LOCATOR.size))
        if locator[0] == b"PK\x06\x07":
            if locator[2] + _END64.size > end:
                raise BrokenArchive(f"{source.path}: zip64 directory lies outside the file; damaged file")
            end64 = _END64.unpack(source.read(locator[2], _END64.size))
            if end64[0] != b"PK\x06\x06":
                raise BrokenArchive(f"{source.path}: zip64 end record not found where announced; damaged file")
            return int(end64[9]), int(end64[8]), int(end64[7]), int(locator[2])
    if disk or first_disk:
        raise UnsafeArchive(f"{source.path}: a zip archive in several parts is not a checkpoint")
    return start, size, count, end


def _entry(source: Source, data: bytes, at: int) -> tuple[str, int, int, int]:
    """Name, byte offset of the local header and size of a member, and where the next entry stands."""
    if at + _ENTRY.size > len(data):
        raise BrokenArchive(f"{source.path}: zip directory ends early; the file is truncated or damaged")
    fields = _ENTRY.unpack_from(data, at)
    if fields[0] != b"PK\x01\x02":
        raise BrokenArchive(f"{source.path}: zip directory is damaged at entry byte {at}; copy the file again")
    flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
    name_size, extra_size, comment_size, header = fields[10], fields[11], fields[12], fields[16]
    at += _ENTRY.size
    raw_name = data[at : at + name_size]
    extra = data[at + name_size : at + name_size + extra_size]
    at += name_size + extra_size + comment_size
    if at > len(data):
        raise BrokenArchive(f"{source.path}: zip directory ends early; the file is truncated or damaged")
    name = raw_name.decode("utf-8", "backslashreplace")
    if method != 0 or flags & 1:
        raise UnsafeArchive(f"{source.path}: member {brief(name)} is compressed or encrypted; torch never writes that")
    if ".." in name.split("/") or name.startswith("/") or "\0" in name:
        raise UnsafeArchive(f"{source.path}: member name {brief(name)} points outside the archive")
    size, packed, header = _widen(source, extra, size, packed, header)
    if size != packed:
        raise UnsafeArchive(f"{source.path}: member {brief(name)} claims {size} bytes but stores {packed}")
    return name, header, size, at


def _widen(source: Source, extra: bytes, *narrow: int) -> tuple[int, ...]:
    """Replaces saturated 32-bit fields by their 64-bit values from the zip64 extra field."""
    if 0xFFFFFFFF not in narrow:
        return narrow
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            wide = [int.from_bytes(extra[i : i + 8], "little") for i in range(at + 4, at + 4 + length - 7, 8)]
            if len(wide) < narrow.count(0xFFFFFFFF):
                break
            return tuple(wide.pop(0) if value == 0xFFFFFFFF else value for value in narrow)
        at += 4 + length
    raise BrokenArchive(f"{source.path}: zip64 sizes are missing; damaged file")


def _members(source: Source, extents: dict[str, tuple[int, int, int]], end: int) -> dict[str, Member]:
    """The members with their ends: they follow each other, and lie in front of the directory at `end`."""
    members: dict[str, Member] = {}
    ordered = sorted(extents.items(), key=lambda item: item[1])
    ends = [*(header for _, (header, _, _) in ordered[1:]), end]
    for (name, (header, size, entry)), following in zip(ordered, ends, strict=False):  # no member, one end
        if header + _LOCAL.size + size > following:
            raise UnsafeArchive(
                f"{source.path}: member {brief(name)} claims {size} bytes at byte {header}; it overlaps what follows at "
                f"byte {following}"
            )
        members[name] = Member(header, size, entry, following)
    return members
