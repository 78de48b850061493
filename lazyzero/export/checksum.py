"""SHA-256 of output files, taken as their bytes go by: no second read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final, Protocol

NAME: Final = "SHA256SUMS"
_BLOCK = 1 << 20


class SeekableSink(Protocol):
    """A Sink whose bytes can be read back, and which ends up as a file."""

    path: Path
    sequential: bool

    def write(self, offset: int, data: memoryview) -> None:
        """As in Sink."""

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes of what stands at `offset`."""

    def finish(self) -> None:
        """As in Sink."""

    def abandon(self) -> None:
        """As in Sink."""


class HashingSink:
    """Passes everything on and hashes it. The writes must come in file order, hence `sequential`.

    What lies between them, the frame of a .bin file, is read back: a few hundred bytes for each tensor.
    """

    sequential = True

    def __init__(self, sink: SeekableSink) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        self._next = 0
        self.digest = ""

    def write(self, offset: int, data: memoryview) -> None:
        """Hashes and writes `data`."""
        while self._next < offset:
            self._update(self._sink.read(self._next, min(_BLOCK, offset - self._next)))
        self._update(data)
        self._sink.write(offset, data)

    def _update(self, data: Any) -> None:
        self._hash.update(data)
        self._next += len(data)

    def finish(self) -> None:
        """Publishes the file; `digest` is then its hash in hexadecimal."""
        self._sink.finish()
        with self._sink.path.open("rb") as file:
            file.seek(self._next)
            while block := file.read(_BLOCK):
                self._update(block)
        self.digest = self._hash.hexdigest()

    def abandon(self) -> None:
        """Removes the unfinished file."""
        self._sink.abandon()


def file_digest(path: Path) -> str:
    """The hash of a file that was written without one."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sums_text(digests: dict[str, str]) -> bytes:
    """The file that `sha256sum -c` reads."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()
