"""A source file: identified once, opened on demand, read with explicit offsets, never written."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lazyzero.errors import BrokenArchive, CheckpointNotFound, LazyZeroError, ReadError, SourceChanged

_BLOCK = 64 << 10  # bytes of small reads that are dropped together: a call costs as much as a read
_MAX_IOVEC = 512  # the kernel takes 1024; some file systems split larger vectors badly


def _descriptor_budget() -> int:
    """How many files the pool keeps open: half of what is allowed, so that `ulimit -n 256` never notices."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError, ValueError):  # pragma: no cover - platforms without rlimits
        return 32
    return max(4, min(2048, soft // 2)) if soft > 0 else 64


class Lease:
    """An open descriptor and how many use it; as a context it ends one use."""

    __slots__ = ("_end", "_lock", "_start", "fd", "users")

    def __init__(self, fd: int, lock: threading.Lock) -> None:
        self.fd = fd
        self.users = 1
        self._lock = lock
        self._start = self._end = 0  # read, and not forgotten yet

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.users -= 1

    def forget(self, start: int, end: int) -> None:
        """Has the page cache drop what was read, and nothing else; small reads in a row are dropped together."""
        with self._lock:
            old_start, old_end = self._start, self._end
            follows = start == old_end
            if follows:
                start = old_start
            full = end - start >= _BLOCK
            self._start, self._end = (end, end) if full else (start, end)
        if not follows:
            _drop(self.fd, old_start, old_end)
        if full:
            _drop(self.fd, start, end)

    def close(self) -> None:
        """Closes the descriptor, which nobody uses."""
        _drop(self.fd, self._start, self._end)
        os.close(self.fd)


class DescriptorPool:
    """Keeps the most recently read files open, up to a limit; safe to use from several threads."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit or _descriptor_budget()
        self._open: OrderedDict[Source, Lease] = OrderedDict()
        self._lock = threading.Lock()

    def lease(self, source: Source) -> Lease:
        """A read-only descriptor of `source`, valid inside the `with` block."""
        with self._lock:
            lease = self._open.get(source)
            if lease is not None:
                lease.users += 1
                self._open.move_to_end(source)
                return lease
            self._evict(self.limit - 1)
            lease = Lease(source._open_checked(), self._lock)
            self._open[source] = lease
            return lease

    def _evict(self, keep: int) -> None:
        while len(self._open) > keep:
            idle = next((source for source, lease in self._open.items() if lease.users == 0), None)
            if idle is None:
                return
            self._open.pop(idle).close()

    def close(self) -> None:
        """Closes every descriptor not in use."""
        with self._lock:
            self._evict(0)


POOL = DescriptorPool()


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One regular file as it was when first seen: `size` in bytes, `mtime_ns`, `inode`. Equal to itself alone."""

    path: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Source:
        """Looks at `path`. Raises CheckpointNotFound, BrokenArchive (not a regular file) or ReadError."""
        name = os.fspath(path)
        try:
            seen = os.stat(name)
        except FileNotFoundError:
            raise CheckpointNotFound(f"{name}: no such file") from None
        except OSError as error:
            raise ReadError(f"{name}: cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(seen.st_mode):
            raise BrokenArchive(f"{name}: expected a regular file, found {_kind(seen.st_mode)}")
        return cls(name, seen.st_size, seen.st_mtime_ns, seen.st_ino)

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes at `offset`."""
        data = bytearray(count)
        self.read_into([memoryview(data)], offset)
        return bytes(data)

    def read_into(self, views: Sequence[memoryview], offset: int, *, release: bool = False) -> None:
        """Fills the byte views one after the other with what stands from `offset` on; `release` has the page cache
        forget it afterwards.

        Raises SourceChanged when the file ends early, ReadError when the system refuses.
        """
        lease, end = POOL.lease(self), offset
        with lease as fd:
            for first in range(0, len(views), _MAX_IOVEC):
                end = self._fill(fd, list(views[first : first + _MAX_IOVEC]), end)
            if release:
                lease.forget(offset, end)

    def _fill(self, fd: int, views: list[memoryview], offset: int) -> int:
        while views:
            try:
                got = os.preadv(fd, views, offset)
            except OSError as error:
                raise ReadError(f"{self.path}: reading at byte {offset} failed: {error.strerror}") from None
            if got == 0:
                if not sum(len(view) for view in views):
                    break
                raise SourceChanged(
                    f"{self.path}: ends before byte {offset + 1}, was {self.size} bytes when opened; "
                    "it was truncated meanwhile, convert again from an intact copy"
                )
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]
        return offset

    def check(self) -> None:
        """Raises SourceChanged unless the file is still the one first seen."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise SourceChanged(f"{self.path}: vanished while being read: {error.strerror}") from None
        self._compare(now)

    def _compare(self, now: os.stat_result) -> None:
        found = (now.st_size, now.st_mtime_ns, now.st_ino)
        if found != (self.size, self.mtime_ns, self.inode):
            raise SourceChanged(
                f"{self.path}: changed while being read (was {self.size} bytes, now {now.st_size}, or written anew); "
                "stop whatever writes to it and convert again"
            )

    def _open_checked(self) -> int:
        # O_NONBLOCK: a FIFO put in place of the file must not hang us.
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise SourceChanged(f"{self.path}: vanished while being read") from None
        except OSError as error:
            raise ReadError(f"{self.path}: cannot be opened: {error.strerror}") from None
        try:
            self._compare(os.fstat(fd))
        except LazyZeroError:
            os.close(fd)
            raise
        return fd


def advise(fd: int, offset: int, nbytes: int, advice: int) -> None:
    """posix_fadvise; a hint, so a file system that does not know it does no harm."""
    with suppress(OSError):
        os.posix_fadvise(fd, offset, nbytes, advice)


def _drop(fd: int, start: int, end: int) -> None:
    if start < end:
        advise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISCHR, "a character device"),
    )
    return next((name for test, name in kinds if test(mode)), "something else")
