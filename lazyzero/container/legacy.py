"""The container torch wrote before 1.6, and DeepSpeed still writes with `checkpoint_serialization: false`.

pickle: magic number | pickle: protocol 1001 | pickle: system info | pickle: the object | pickle: storage keys
then for each key in that order: an int64 count of elements, and the raw elements
"""

from __future__ import annotations

from typing import Any

from lazyzero.container.brief import brief
from lazyzero.container.objects import Storage
from lazyzero.container.source import Source
from lazyzero.container.storages import LegacyStorages
from lazyzero.container.tape import Tape
from lazyzero.container.unpickle import Unpickler
from lazyzero.errors import BrokenArchive, UnsafeArchive

_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = _MAGIC.to_bytes(10, "little")


def matches(head: bytes) -> bool:
    """Whether a file that begins with `head` is of this container."""
    return head[:1] == b"\x80" and _MAGIC_BYTES in head[:24]


def read(source: Source) -> tuple[Any, tuple[tuple[int, int], ...]]:
    """The object, and the (offset, length) in bytes of the pickles; every storage gets its place in the file."""
    storages = LegacyStorages(source)
    tape = Tape(source, 0, source.size)
    pickles = Unpickler(tape, storages)
    magic, protocol, system = (pickles.load() for _ in range(3))
    if magic != _MAGIC or protocol != 1001:
        raise BrokenArchive(f"{source.path}: expected torch's legacy format, protocol 1001, found {brief(protocol)}")
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise BrokenArchive(f"{source.path}: byte order is big-endian; only little-endian archives are read")
    root = pickles.load()
    keys = pickles.load()
    end = tape.position
    _place(source, storages.seen, keys, end)
    return root, ((0, end),)


def _place(source: Source, storages: dict[str, Storage], keys: Any, at: int) -> None:
    known = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not known or sorted(keys) != sorted(storages):
        raise BrokenArchive(f"{source.path}: the list of storages is not that of the object; damaged file")
    for key in keys:
        storage = storages[key]
        if at + 8 > source.size:
            raise BrokenArchive(f"{source.path}: ends before storage {brief(key)}; the file is truncated")
        count = int.from_bytes(source.read(at, 8), "little", signed=True)
        if count * storage.dtype.itemsize != storage.nbytes:
            raise UnsafeArchive(
                f"{source.path}: storage {brief(key)} claims {storage.nbytes} bytes and {count} elements"
            )
        storage.place(at + 8)
        at += 8 + storage.nbytes
        if at > source.size:
            raise BrokenArchive(
                f"{source.path}: expected at least {at} bytes, found {source.size}; the file is truncated"
            )
