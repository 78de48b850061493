"""Where output bytes go: a file that appears whole under its final name, or a pipe.

A file is written under a temporary name beside its final one, its space allocated first, each range pushed to disk and
dropped from the page cache soon after it is written, so that a job of any size neither evicts everyone's cache nor
piles up dirty pages. Sealed, it is on disk; published, it has its final name, and the directory is on disk too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from lazyzero.errors import LazyZeroError, NotEnoughSpace, WriteError
from lazyzero.export import kernel

TEMPORARY = ".lazyzero.tmp"
_LAG = 16 << 20  # bytes written before the pages of earlier ones are dropped


class Sink(Protocol):
    """Takes the bytes of one output file."""

    sequential: bool

    def write(self, offset: int, data: memoryview) -> None:
        """Writes `data` at `offset`; a sequential sink is given offsets in order, without gaps."""


class Draft(Sink, Protocol):
    """A Sink into a file that nobody sees under its final name `path` until it is published."""

    path: Path
    size: int  # bytes

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes of what stands at `offset`."""

    def seal(self) -> None:
        """Makes what was written durable."""

    def publish(self) -> None:
        """Gives the sealed file its final name, durably."""

    def abandon(self) -> None:
        """Removes the file, whatever state it is in; a published one stays."""


def temporary(path: Path) -> Path:
    """The name a file has until it is whole."""
    return path.with_name(path.name + TEMPORARY)


class FileSink:
    """The Draft of a file; safe to write to from several threads at disjoint ranges. Raises WriteError."""

    sequential = False

    def __init__(self, path: Path, size: int | None) -> None:
        """Creates the temporary file of `size` bytes; None takes the one already there."""
        self.path = path
        self._temporary = temporary(path)
        self._lock = threading.Lock()
        self._users = 0  # threads that have the descriptor in use
        self._abandoned = False
        self._written: dict[int, int] = {}  # start -> end of ranges beyond the low-water mark
        self._low = 0  # everything below has been written
        self._dropped = 0
        with write_errors(self.path, "created"):
            made = 0 if size is None else os.O_CREAT | os.O_EXCL
            self._fd = os.open(self._temporary, os.O_RDWR | made | os.O_CLOEXEC, 0o666)
        try:
            with write_errors(self.path, "allocated"):
                self.size = os.fstat(self._fd).st_size if size is None else size
                kernel.allocate(self._fd, self.size)
        except BaseException:
            self.abandon()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data`, starts its way to disk, and drops what was written a while ago from the page cache."""
        end = offset + len(data)
        with write_errors(self.path, "written"), self._descriptor() as fd:
            _write_all(fd, data, offset)
            kernel.start_writeback(fd, offset, len(data))
            with self._lock:
                self._written[offset] = end
                while self._low in self._written:
                    self._low = self._written.pop(self._low)
                first, last = self._dropped, max(self._dropped, self._low - _LAG)
                self._dropped = last
            _drop(fd, first, last)

    def write_in_place(self, offset: int, data: memoryview) -> None:
        """Corrects a few bytes outside the stream."""
        with write_errors(self.path, "written"), self._descriptor() as fd:
            _write_all(fd, data, offset)

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes of what stands at `offset`."""
        found = b""
        with write_errors(self.path, "read back"), self._descriptor() as fd:
            while len(found) < count:
                more = os.pread(fd, count - len(found), offset + len(found))
                if not more:
                    raise OSError(errno.EIO, "it ends early")
                found += more
        return found

    def seal(self) -> None:
        """Flushes the file."""
        with write_errors(self.path, "flushed"):
            os.fsync(self._fd)
            _drop(self._fd, self._dropped, self._low)
            if (found := os.fstat(self._fd).st_size) != self.size:
                raise OSError(errno.EIO, f"it has {found} bytes on disk, {self.size} were written")

    def publish(self) -> None:
        """Renames to the final name, flushes the directory."""
        with write_errors(self.path, "renamed"):
            # Where locks do not work another run may have put a file of its own here, and that one is not whole.
            if not os.path.samestat(self._temporary.stat(), os.fstat(self._fd)):
                raise OSError(errno.ESTALE, "another process replaced the unfinished file")
            os.replace(self._temporary, self.path)
        fd, self._fd = self._fd, -1
        with write_errors(self.path, "closed"):
            os.close(fd)
        with write_errors(self.path, "made durable in its directory"):
            sync_directory(self.path.parent)

    def abandon(self) -> None:
        """Removes the temporary file. A thread still writing to it gets an error at its next call, not a foreign file."""
        with self._lock:
            self._abandoned = True
        self._close_unused()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """The descriptor, which stays open while it is used here."""
        with self._lock:
            if self._abandoned or self._fd < 0:
                raise OSError(errno.EBADF, "it was given up meanwhile")
            self._users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._users -= 1
            self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            if not self._abandoned or self._users or self._fd < 0:
                return
            fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):  # nobody needs what was written
            os.close(fd)


class PipeSink:
    """A Sink into an open descriptor that cannot seek, and that is not ours to close.

    The last of its `size` bytes is held back until `complete`: without it no reader takes the rest for a whole file.
    """

    sequential = True

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._last = b""

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data` in order."""
        if offset + len(data) == self._size and data:
            self._last, data = bytes(data[-1:]), data[:-1]
        self._put(data)

    def complete(self) -> None:
        """Writes the last byte."""
        self._put(memoryview(self._last))

    def _put(self, data: memoryview) -> None:
        with write_errors(Path("standard output"), "written"):
            while data:
                data = data[_some(os.write(self._fd, data)) :]


class Nowhere:
    """A Sink that keeps nothing."""

    sequential = False

    def write(self, offset: int, data: memoryview) -> None:
        """Nothing to do."""


def write_small(path: Path, data: bytes) -> None:
    """Writes a small file whole and durable. Raises WriteError."""
    sink = FileSink(path, len(data))
    try:
        sink.write(0, memoryview(data))
        sink.seal()
        sink.publish()
    except BaseException:
        sink.abandon()
        raise


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = _some(os.pwrite(fd, data, offset))
        data, offset = data[done:], offset + done


def _some(count: int) -> int:
    """A call's count of bytes written; none at all, again and again, would be an endless loop."""
    if count <= 0:
        raise OSError(errno.EIO, "nothing more was accepted")
    return count


def _drop(fd: int, start: int, end: int) -> None:
    if start < end:
        kernel.wait_writeback(fd, start, end - start)
        with contextlib.suppress(OSError):  # a hint: a file system may not know it
            os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


def sync_directory(directory: Path) -> None:
    """Makes what was renamed, made or removed in `directory` durable, where its file system can. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in kernel.UNSUPPORTED:
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def write_errors(path: Path, done: str) -> Iterator[None]:
    """Makes a WriteError of any OSError inside: `path` could not be `done`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, LazyZeroError):
            raise
        raise write_error(path, done, error) from None


def write_error(path: Path, done: str, error: OSError) -> WriteError:
    """The WriteError for an OSError; a full disk or quota has its own class."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "; free some space and run the same command again" if full else ""
    made = (NotEnoughSpace if full else WriteError)(f"{path}: could not be {done}: {error.strerror or error}{advice}")
    made.errno = error.errno
    return made
