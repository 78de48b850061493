"""What stands in a directory, to be compared with what stood there before."""

from __future__ import annotations

import hashlib
from pathlib import Path

State = dict[str, tuple[str, int, int]]


def state(root: Path) -> State:
    """Every file below `root`: its hash, modification time and mode; directories by mode alone."""
    found: State = {}
    for path in sorted(root.rglob("*")):
        seen = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(root))] = (digest, seen.st_mtime_ns if path.is_file() else 0, seen.st_mode)
    return found


def contents(root: Path) -> dict[str, bytes]:
    """The bytes of every file directly in `root`, less the journal, which knows when its sources were written."""
    return {p.name: p.read_bytes() for p in root.iterdir() if p.is_file() and p.name != ".lazyzero.json"}
