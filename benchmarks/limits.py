"""What the machine lets a benchmark do: memory cgroups (v1 or v2), the page cache, free space."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_V1: Final = Path("/sys/fs/cgroup/memory")
_V2: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_DROP: Final = Path("/proc/sys/vm/drop_caches")
_PIECE: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory cgroup with a limit in bytes, page cache included."""

    path: Path
    version: int
    limit: int

    @property
    def procs(self) -> Path:
        """Where a process writes itself in."""
        return self.path / "cgroup.procs"

    def charged(self) -> int:
        """Bytes charged now."""
        return _number(self.path / ("memory.usage_in_bytes" if self.version == 1 else "memory.current"))

    def facts(self) -> dict[str, int]:
        """The highest charge in bytes (0 where the kernel does not keep it), and how often the limit was met."""
        if self.version == 1:
            return {
                "limit": self.limit,
                "peak": _number(self.path / "memory.max_usage_in_bytes"),
                "limit_met": _number(self.path / "memory.failcnt"),
            }
        events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        return {"limit": self.limit, "peak": _number(self.path / "memory.peak"), "limit_met": int(events["max"])}


def why_no_groups() -> str | None:
    """Why no memory cgroup can be made here; None if one can."""
    return None if _root() else "no memory cgroup can be made here (needs root, and the memory controller)"


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """A new cgroup that may hold `limit` bytes and cannot swap; removed at the end. Raises OSError where none can be made."""
    root = _root()
    if root is None:
        raise OSError(why_no_groups())
    path, version = root[0] / f"lazyzero-benchmark-{os.getpid()}", root[1]
    path.mkdir(exist_ok=True)
    try:
        (path / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(limit))
        for swap, value in (("memory.memsw.limit_in_bytes", limit), ("memory.swap.max", 0)):
            with contextlib.suppress(OSError):
                (path / swap).write_text(str(value))
        yield MemoryGroup(path, version, limit)
    finally:
        _remove(path)


def _root() -> tuple[Path, int] | None:
    if (_V1 / "memory.limit_in_bytes").exists() and os.access(_V1, os.W_OK):
        return _V1, 1
    for root in _V2:
        control = root / "cgroup.subtree_control"
        if control.exists() and os.access(root, os.W_OK):
            with contextlib.suppress(OSError):
                control.write_text("+memory")
                return root, 2
    return None


def _remove(path: Path) -> None:
    for _ in range(50):  # a killed process leaves a moment after it is reaped
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.02)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def why_no_cold_cache() -> str | None:
    """Why the page cache cannot be emptied; None if it can."""
    return None if os.access(_DROP, os.W_OK) else "the page cache cannot be dropped (needs root)"


def drop_caches() -> None:
    """Empties the page cache of everything clean, after writing back what is not."""
    os.sync()
    _DROP.write_text("3")


def warm(paths: Iterable[Path]) -> None:
    """Reads the data of files into the page cache; their holes are left out."""
    buffer = bytearray(_PIECE)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            for start, stop in data_ranges(file.fileno()):
                file.seek(start)
                at = start
                while at < stop and (count := file.readinto(memoryview(buffer)[: min(_PIECE, stop - at)])):
                    at += count


def data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """The byte ranges of a file that are not holes."""
    at, end = 0, os.fstat(descriptor).st_size
    while at < end:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole to the end
            return
        at = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, at


def files_below(path: Path) -> list[Path]:
    """All regular files, in order."""
    return sorted(found for found in path.rglob("*") if found.is_file())


def bytes_on_disk(path: Path) -> int:
    """What the files below `path` take, holes left out."""
    return sum(file.stat().st_blocks * 512 for file in files_below(path))
