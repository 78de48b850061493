"""The container torch wrote before 1.6, and DeepSpeed still writes with `checkpoint_serialization: false`.

pickle: magic number | pickle: protocol 1001 | pickle: system info | pickle: the object | pickle: storage keys
then for each key in that order: an int64 count of elements, and the raw elements
"""

from __future__ import annotations

from typing import Any

from lazyzero.container.objects import Storage
from lazyzero.container.source import Source
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
    storages: dict[str, Storage] = {}

    def load(identity: Any) -> Storage:
        from lazyzero.container.archive import storage_identity

        kind, key, numel = storage_identity(source, identity)
        if len(identity) > 5 and identity[5] is not None:
            raise UnsafeArchive(
                f"{source.path}: storage views of torch before 0.4 are not read; save it again with 1.0"
            )
        if kind is None:
            raise UnsafeArchive(f"{source.path}: holds quantized tensors, which the legacy container cannot skip")
        return storages.setdefault(key, Storage(source, key, kind.dtype, numel * kind.dtype.itemsize))

    tape = Tape(source, 0, source.size)
    magic, protocol, system = (Unpickler(tape, load).load() for _ in range(3))
    if magic != _MAGIC or protocol != 1001:
        raise BrokenArchive(f"{source.path}: expected torch's legacy format, protocol 1001, found {protocol!r:.40}")
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise BrokenArchive(f"{source.path}: byte order is big-endian; only little-endian archives are read")
    root = Unpickler(tape, load).load()
    keys = Unpickler(tape, load).load()
    end = tape.position
    _place(source, storages, keys, end)
    return root, ((0, end),)


def _place(source: Source, storages: dict[str, Storage], keys: Any, at: int) -> None:
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise BrokenArchive(f"{source.path}: the list of storages is not that of the object; damaged file")
    for key in keys:
        storage = storages[key]
        if at + 8 > source.size:
            raise BrokenArchive(f"{source.path}: ends before storage {key!r}; the file is truncated")
        count = int.from_bytes(source.read(at, 8), "little", signed=True)
        if count * storage.dtype.itemsize != storage.nbytes:
            raise UnsafeArchive(f"{source.path}: storage {key!r} claims {storage.nbytes} bytes and {count} elements")
        storage.place(at + 8)
        at += 8 + storage.nbytes
        if at > source.size:
            raise BrokenArchive(
                f"{source.path}: expected at least {at} bytes, found {source.size}; the file is truncated"
            )
