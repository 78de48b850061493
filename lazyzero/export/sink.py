"""Where output bytes go: a file that appears whole under its final name, or a pipe.

A file is written under a temporary name beside its final one, its space allocated first, each range pushed to disk and
dropped from the page cache soon after it is written, so that a job of any size neither evicts everyone's cache nor
piles up dirty pages. It is flushed and renamed at the end, and the directory flushed after it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from lazyzero.errors import NotEnoughSpace, WriteError
from lazyzero.export import kernel

TEMPORARY = ".lazyzero.tmp"
_LAG = 16 << 20  # bytes written before the pages of earlier ones are dropped


class Sink(Protocol):
    """Takes the bytes of one output file."""

    sequential: bool

    def write(self, offset: int, data: memoryview) -> None:
        """Writes `data` at `offset`; a sequential sink is given offsets in order, without gaps."""

    def finish(self) -> None:
        """Makes the file appear under its final name, durable."""

    def abandon(self) -> None:
        """Takes back what was written."""


def temporary(path: Path) -> Path:
    """The name a file has until it is whole."""
    return path.with_name(path.name + TEMPORARY)


class FileSink:
    """A Sink into `path`; safe to write to from several threads at disjoint ranges. Raises WriteError."""

    sequential = False

    def __init__(self, path: Path, size: int | None) -> None:
        """Creates the temporary file of `size` bytes; None takes the one already there."""
        self.path = path
        self._temporary = temporary(path)
        self._lock = threading.Lock()
        self._written: dict[int, int] = {}  # start -> end of ranges beyond the low-water mark
        self._low = 0  # everything below has been written
        self._dropped = 0
        with self._errors("created"):
            made = 0 if size is None else os.O_CREAT | os.O_EXCL
            self._fd = os.open(self._temporary, os.O_RDWR | made | os.O_CLOEXEC, 0o666)
        try:
            self._allocate(os.fstat(self._fd).st_size if size is None else size)
        except BaseException:
            self.abandon()
            raise

    def _allocate(self, size: int) -> None:
        with self._errors("allocated"):
            kernel.allocate(self._fd, size)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data`, whatever number of calls that takes."""
        start, end = offset, offset + len(data)
        with self._errors("written"):
            while data:
                done = os.pwrite(self._fd, data, offset)
                if done == 0:
                    raise OSError(errno.EIO, "wrote nothing")
                data, offset = data[done:], offset + done
        self._push(start, end)

    def _push(self, start: int, end: int) -> None:
        """Starts write-back of what was just written; waits for and drops what was written a while ago."""
        with self._errors("written"):
            kernel.start_writeback(self._fd, start, end - start)
            with self._lock:
                self._written[start] = end
                while self._low in self._written:
                    self._low = self._written.pop(self._low)
                first, last = self._dropped, max(self._dropped, self._low - _LAG)
                self._dropped = last
            self._drop(first, last)

    def _drop(self, start: int, end: int) -> None:
        if start < end:
            kernel.wait_writeback(self._fd, start, end - start)
            with contextlib.suppress(OSError):  # a hint: a file system may not know it
                os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes of what stands at `offset`."""
        with self._errors("read back"):
            return os.pread(self._fd, count, offset)

    def write_in_place(self, offset: int, data: memoryview) -> None:
        """Corrects a few bytes outside the stream."""
        with self._errors("written"):
            if os.pwrite(self._fd, data, offset) != len(data):
                raise OSError(errno.EIO, "wrote too little")

    def finish(self) -> None:
        """Flushes, renames to the final name, flushes the directory."""
        with self._errors("flushed"):
            os.fsync(self._fd)
            self._drop(self._dropped, self._low)
        self._close()
        with self._errors("renamed"):
            os.replace(self._temporary, self.path)
        sync_directory(self.path.parent)

    def abandon(self) -> None:
        """Removes the temporary file."""
        self._close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with self._errors("closed"):  # network file systems report late errors here
                os.close(fd)

    @contextlib.contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self.path, done, error) from None


class PipeSink:
    """A Sink into an open descriptor that cannot seek. `finish` leaves it open, it is not ours."""

    sequential = True

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data` in order."""
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise write_error(Path("standard output"), "written", error) from None

    def finish(self) -> None:
        """Nothing to do."""

    def abandon(self) -> None:
        """Nothing to take back."""


def write_small(path: Path, data: bytes) -> None:
    """Writes a small file whole and durable. Raises WriteError."""
    sink = FileSink(path, len(data))
    try:
        sink.write(0, memoryview(data))
        sink.finish()
    except BaseException:
        sink.abandon()
        raise


def sync_directory(directory: Path) -> None:
    """Makes renames in `directory` durable, where its file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_error(path: Path, done: str, error: OSError) -> WriteError:
    """The WriteError for an OSError; a full disk or quota has its own class."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "; free some space and run the same command again" if full else ""
    made = (NotEnoughSpace if full else WriteError)(f"{path}: could not be {done}: {error.strerror}{advice}")
    made.errno = error.errno
    return made
