"""Opens a `.pt` file of either container and gives the object in it, its tensors as references to byte ranges."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from lazyzero.container import legacy
from lazyzero.container.source import Source
from lazyzero.container.storages import ZipStorages
from lazyzero.container.tape import Tape
from lazyzero.container.unpickle import Unpickler
from lazyzero.container.zipdir import data_offset, read_directory
from lazyzero.errors import BrokenArchive, UnsupportedLayout

_LOOKALIKES = (
    (b"\x1f\x8b", "a gzip file: unpack it first"),
    (b"version https://git-lfs", "a Git LFS pointer: run `git lfs pull`"),
    (b"<", "an HTML or XML page: the download failed, fetch it again"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"BZh", "a bzip2 file: unpack it first"),
    (b"\xfd7zXZ", "an xz file: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file: unpack it first"),
)


@dataclass(frozen=True, slots=True)
class Archive:
    """A parsed `.pt` file: `root` is the pickled object, `pickles` the byte ranges (offset, length) it came from."""

    source: Source
    root: Any
    pickles: tuple[tuple[int, int], ...]

    @property
    def path(self) -> str:
        return self.source.path

    def bare(self) -> Archive:
        """Where it came from, without the object: thousands of ranks' objects would fill the memory."""
        return replace(self, root=None)


def open_archive(path: str | os.PathLike[str]) -> Archive:
    """Parses the file at `path`: zip (torch 1.6 on) or legacy. Reads the pickle, no tensor data.

    Raises CheckpointNotFound, ReadError, BrokenArchive, UnsafeArchive, or UnsupportedLayout; each names the file.
    """
    source = Source.open(path)
    if source.size == 0:
        raise BrokenArchive(f"{source.path}: expected a torch archive, found an empty file; copy it again")
    head = source.read(0, min(source.size, 512))
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _open_zip(source)
    if legacy.matches(head):
        root, pickles = legacy.read(source)
        return Archive(source, root, pickles)
    if _is_datastates(source, head):
        raise UnsupportedLayout(
            f"{source.path}: written by the DataStates checkpoint engine, whose files are not read here; load the checkpoint "
            "with that engine and save it with DeepSpeed's default one"
        )
    raise BrokenArchive(f"{source.path}: expected a torch archive, found {_describe(head)}")


def _is_datastates(source: Source, head: bytes) -> bool:
    """Like safetensors a length and a JSON header, which ends in an entry for the pickled rest (DeepSpeed 0.17.2 on)."""
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or not 32 <= length <= source.size - 8:
        return False
    count = min(length, 256)
    return b'"datastates_metadata"' in source.read(8 + length - count, count)


def _describe(head: bytes) -> str:
    for start, what in _LOOKALIKES:
        if head.lstrip().startswith(start):
            return what
    if head[257:262] == b"ustar":
        return "a tar file: unpack it first"
    if head[8:10] in (b'{"', b"{ "):
        return "a safetensors file, which needs no conversion"
    if not head.strip(b"\0"):
        return "zeros only: the file was never written, or its copy failed"
    return f"bytes that begin {head[:8]!r}"


def _open_zip(source: Source) -> Archive:
    members = read_directory(source)
    roots = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise BrokenArchive(f"{source.path}: expected one data.pkl in the archive, found {len(roots)}; not torch's")
    root = roots[0]
    order = members.get(root + "byteorder")
    if order is not None:
        found = source.read(data_offset(source, order), min(order.size, 16))
        if found.strip() != b"little":
            raise BrokenArchive(f"{source.path}: byte order is {found!r}; only little-endian archives are read")
    pickle = members[root + "data.pkl"]
    start = data_offset(source, pickle)
    loader = ZipStorages(source, members, root + "data/")
    value = Unpickler(Tape(source, start, pickle.size), loader).load()
    return Archive(source, value, ((start, pickle.size),))
