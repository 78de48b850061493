"""The bytes of a pickle, read through a small buffer, so that a large one never stands in memory whole."""

from __future__ import annotations

import re

from lazyzero.container.source import Source
from lazyzero.errors import BrokenArchive, UnsafeArchive

_CHUNK = 128 << 10
_LONGEST_LINE = 64 << 10
_LONGEST = 1 << 30  # bytes of a file's pickles, most of them in strings that are skipped


class Tape:
    """Bytes [offset, offset + length) of a source, taken one after the other; never more than 1 GiB of them."""

    def __init__(self, source: Source, offset: int, length: int) -> None:
        self.source = source
        self._next = offset  # file position of the first byte not buffered yet
        self._end = offset + min(length, _LONGEST)
        self._cut = length > _LONGEST
        self._buffer = b""
        self._at = 0

    @property
    def position(self) -> int:
        """File offset, in bytes, of the next byte to be taken."""
        return self._next - len(self._buffer) + self._at

    def byte(self) -> int:
        """The next byte."""
        at = self._at
        if at >= len(self._buffer):
            self._fill(1)
            at = 0
        self._at = at + 1
        return self._buffer[at]

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        at = self._at
        if at + count > len(self._buffer):
            self._fill(count)
            at = 0
        self._at = at + count
        return self._buffer[at : at + count]

    def skip(self, count: int) -> None:
        """Passes over `count` bytes without reading those not buffered."""
        have = len(self._buffer) - self._at
        if count <= have:
            self._at += count
            return
        if count - have > self._end - self._next:
            raise self._ended()
        self._buffer, self._at = b"", 0
        self._next += count - have

    def line(self) -> bytes:
        """The bytes up to the next newline, which is passed over."""
        while True:
            end = self._buffer.find(b"\n", self._at)
            if end >= 0:
                line = self._buffer[self._at : end]
                self._at = end + 1
                return line
            have = len(self._buffer) - self._at
            if have > _LONGEST_LINE:
                raise BrokenArchive(f"{self.source.path}: a text line of the pickle has no end; damaged file")
            self._fill(have + 1)

    def pass_over(self, pattern: re.Pattern[bytes], longest: int) -> int:
        """Passes over what `pattern` matches from here, at most `longest` bytes. Returns their number."""
        if len(self._buffer) - self._at < longest:
            self._fill(min(longest, self._end - self.position))
        found = pattern.match(self._buffer, self._at, self._at + longest)
        if found is None:
            return 0
        self._at = found.end()
        return len(found[0])

    def _fill(self, count: int) -> None:
        rest = self._buffer[self._at :]
        missing = count - len(rest)
        if missing > self._end - self._next:
            raise self._ended()
        size = min(max(missing, _CHUNK), self._end - self._next)
        self._buffer = rest + self.source.read(self._next, size)
        self._next += size
        self._at = 0

    def _ended(self) -> BrokenArchive:
        if self._cut:
            return UnsafeArchive(
                f"{self.source.path}: a pickle of more than {_LONGEST} bytes, which no checkpoint needs"
            )
        return BrokenArchive(f"{self.source.path}: the pickle ends early; the file is truncated or damaged")
