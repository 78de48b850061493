"""SHA-256 of output files, taken as their bytes go by: no second read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from lazyzero.export.sink import Draft

NAME: Final = "SHA256SUMS"
_BLOCK = 1 << 20


class HashingSink:
    """Passes everything on and hashes it. The writes must come in file order, hence `sequential`.

    What lies between them, the frame of a .bin file, is read back: a few hundred bytes for each tensor.
    """

    sequential = True

    def __init__(self, draft: Draft) -> None:
        self.path = draft.path
        self.size = draft.size
        self._draft = draft
        self._hash = hashlib.sha256()
        self._next = 0
        self.digest = ""

    def write(self, offset: int, data: memoryview) -> None:
        """Hashes and writes `data`."""
        self._catch_up(offset)
        self._update(data)
        self._draft.write(offset, data)

    def read(self, offset: int, count: int) -> bytes:
        """As in Draft."""
        return self._draft.read(offset, count)

    def seal(self) -> None:
        """Seals the file; `digest` is then its hash in hexadecimal."""
        self._catch_up(self.size)
        self.digest = self._hash.hexdigest()
        self._draft.seal()

    def publish(self) -> None:
        """As in Draft."""
        self._draft.publish()

    def abandon(self) -> None:
        """As in Draft."""
        self._draft.abandon()

    def _catch_up(self, offset: int) -> None:
        """Hashes what stands in the file between the last write and `offset`."""
        while self._next < offset:
            self._update(self._draft.read(self._next, min(_BLOCK, offset - self._next)))

    def _update(self, data: Any) -> None:
        self._hash.update(data)
        self._next += len(data)


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
