"""What the persistent ids of a pickle stand for: storages, in either container."""

from __future__ import annotations

from typing import Any

from lazyzero.container.brief import brief
from lazyzero.container.builders import StorageClass
from lazyzero.container.objects import Global, Opaque, Storage
from lazyzero.container.source import Source
from lazyzero.container.zipdir import Member
from lazyzero.errors import BrokenArchive, UnsafeArchive


class ZipStorages:
    """Persistent ids of a zip archive: ("storage", class, key, location, number of elements)."""

    def __init__(self, source: Source, members: dict[str, Member], prefix: str) -> None:
        self._source = source
        self._members = members
        self._prefix = prefix
        self._seen: dict[str, Storage] = {}

    def __call__(self, identity: Any) -> Storage | Opaque:
        kind, key, numel = storage_identity(self._source, identity)
        if kind is None:
            return Opaque("torch storage of a type not read here")
        nbytes = numel * kind.dtype.itemsize
        if key in self._seen:
            return same_storage(self._seen[key], kind, nbytes)
        member = self._members.get(self._prefix + key)
        if member is None:
            raise BrokenArchive(f"{self._source.path}: storage {brief(key)} is not in the archive; damaged file")
        if member.size < nbytes:
            raise UnsafeArchive(
                f"{self._source.path}: storage {brief(key)} claims {nbytes} bytes, the archive holds {member.size}"
            )
        storage = Storage(self._source, key, kind.dtype, nbytes, member)
        self._seen[key] = storage
        return storage


class LegacyStorages:
    """Persistent ids of a legacy archive: the same, and None or a view of another storage at their end."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.seen: dict[str, Storage] = {}

    def __call__(self, identity: Any) -> Storage:
        path = self._source.path
        kind, key, numel = storage_identity(self._source, identity)
        if len(identity) > 5 and identity[5] is not None:
            raise UnsafeArchive(f"{path}: storage views of torch before 0.4 are not read; save it again with 1.0")
        if kind is None:
            raise UnsafeArchive(f"{path}: holds quantized tensors, which the legacy container cannot skip")
        nbytes = numel * kind.dtype.itemsize
        if key in self.seen:
            return same_storage(self.seen[key], kind, nbytes)
        storage = Storage(self._source, key, kind.dtype, nbytes)
        self.seen[key] = storage
        return storage


def same_storage(storage: Storage, kind: StorageClass, nbytes: int) -> Storage:
    """A storage that is referred to again. Raises UnsafeArchive when it is said to be another one."""
    if storage.dtype != kind.dtype or storage.nbytes != nbytes:
        raise UnsafeArchive(
            f"{storage.source.path}: storage {brief(storage.key)} is {storage.nbytes} bytes of {storage.dtype} in one place "
            f"and {nbytes} bytes of {kind.dtype} in another; damaged file"
        )
    return storage


def storage_identity(source: Source, identity: Any) -> tuple[StorageClass | None, str, int]:
    """The class (None for quantized ones), key and number of elements out of a persistent id, whatever it claims."""
    if isinstance(identity, tuple) and len(identity) >= 5 and identity[0] in ("storage", b"storage"):
        kind, key, numel = identity[1], identity[2], identity[4]
        known = isinstance(kind, StorageClass)
        foreign = isinstance(kind, Global) and kind.name.endswith("Storage")
        if (known or foreign) and isinstance(key, str) and type(numel) is int and 0 <= numel < 1 << 62:
            return kind if isinstance(kind, StorageClass) else None, key, numel
    raise UnsafeArchive(f"{source.path}: a persistent id is not one of torch's storages")
