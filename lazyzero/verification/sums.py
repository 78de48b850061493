"""SHA256SUMS beside an output: names every weight file, and no hash is out of date."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lazyzero.errors import ReadError
from lazyzero.export import checksum

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def listed(directory: Path) -> dict[str, str] | None:
    """file name -> hash, None where there is no such file; a line that `sha256sum -c` would not take has its hash empty."""
    try:
        lines = (directory / checksum.NAME).read_bytes().decode("utf-8", "surrogateescape").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ReadError(f"{directory / checksum.NAME}: cannot be read: {error.strerror}") from None
    found = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        found[match[2] if match else line] = match[1] if match else ""
    return found


def misnamed(sums: dict[str, str], names: Iterable[str]) -> Iterator[str]:
    """A line for each name that the list should not have, or lacks."""
    present = set(names)
    for name in sorted(sums.keys() - present):
        yield f"{checksum.NAME}: has a line for {name!r:.100}, which is not a weight file here"
    for name in sorted(present - sums.keys()):
        yield f"{checksum.NAME}: lacks {name}"


def outdated(path: Path, digest: str) -> Iterator[str]:
    """A line when the file at `path` has another hash. Reads it whole."""
    try:
        found = checksum.file_digest(path)
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from None
    if found != digest:
        yield f"{checksum.NAME}: has {digest[:12]}... for {path.name}, whose SHA-256 is {found[:12]}..."
