"""Measures whole processes: time, memory over time, bytes read and written; alone, in turn, in a memory cgroup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.limits import MemoryGroup

_SPAWN: Final = Path(__file__).with_name("spawn.py")
_FIRST_WRITE: Final = 1 << 20  # bytes; progress lines and journals are less
_MOST_SAMPLES: Final = 400
_KEPT_OUTPUT: Final = 4000  # characters


@dataclass(frozen=True, slots=True)
class Sample:
    """The process tree at `seconds` after the start; all else in bytes. `cache` is the page cache of the machine."""

    seconds: float
    rss: int
    anonymous: int
    file: int
    cache: int
    dirty: int
    charged: int  # to the cgroup, 0 without one


@dataclass(frozen=True, slots=True)
class Run:
    """What one process cost. `peak_rss` is the highest VmHWM in its tree, as the kernel kept it; bytes and seconds.

    `seconds` is the process, `sync_seconds` the `sync` that follows; `tree_rss` is the highest sum over the tree that was seen.
    """

    label: str
    command: list[str]
    exit: int
    seconds: float
    sync_seconds: float
    peak_rss: int
    tree_rss: int
    user_seconds: float
    system_seconds: float
    read_calls_bytes: int
    read_disk_bytes: int
    written_bytes: int
    first_write: float | None
    group: dict[str, int] | None
    samples: list[Sample] = field(repr=False)
    output: str = field(repr=False)

    @property
    def durable(self) -> float:
        """Seconds until everything is on disk."""
        return self.seconds + self.sync_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure(
    label: str,
    command: Sequence[str],
    *,
    group: MemoryGroup | None = None,
    environment: Mapping[str, str] | None = None,
    sync: bool = True,
    interval: float = 0.02,
) -> Run:
    """Runs `command` to its end, then `sync`. A failure is not raised: see `exit` and `output`."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result"
        head = [
            sys.executable,
            "-I",
            "-S",
            str(_SPAWN),
            str(result),
            str(group.procs) if group else "-",
            "sync" if sync else "-",
        ]
        with (Path(scratch) / "output").open("w+b") as output:
            began = time.monotonic()
            process = subprocess.Popen(
                [*head, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
            watch = _Watch(process.pid, began, group)
            try:
                while process.poll() is None:
                    watch.look()
                    time.sleep(interval)
            except BaseException:
                _end(process)
                raise
            output.seek(0)
            text = output.read().decode(errors="replace")[-_KEPT_OUTPUT:]
        facts = json.loads(result.read_text()) if result.exists() else {}
    if not facts:
        raise RuntimeError(f"{label}: the command could not be watched: {text}")
    return Run(
        label,
        list(command),
        facts["exit"],
        facts["seconds"],
        facts["sync_seconds"],
        facts["peak_rss"],
        max((sample.rss for sample in watch.samples), default=0),
        facts["user_seconds"],
        facts["system_seconds"],
        facts["rchar"],
        facts["read_bytes"],
        max(facts["write_bytes"], facts["wchar"]),
        watch.first_write,
        group.facts() if group else None,
        _thinned(watch.samples),
        text,
    )


def in_turn(runs: Sequence[Callable[[], Run]], repeats: int) -> list[list[Run]]:
    """Each of `runs` `repeats` times, A B A B, so that what changes on the machine meets all alike."""
    found: list[list[Run]] = [[] for _ in runs]
    for _ in range(repeats):
        for place, run in enumerate(runs):
            found[place].append(run())
    return found


class _Watch:
    """Looks at the children of the process that spawns."""

    def __init__(self, spawner: int, began: float, group: MemoryGroup | None) -> None:
        self._spawner = spawner
        self._began = began
        self._group = group
        self.samples: list[Sample] = []
        self.first_write: float | None = None

    def look(self) -> None:
        """Takes one sample."""
        now = time.monotonic() - self._began
        pids = _descendants(self._spawner)
        rows = [row for row in map(_status, pids) if row]
        if not rows:
            return
        if self.first_write is None and any(_written(pid) >= _FIRST_WRITE for pid in pids):
            self.first_write = now
        machine = _fields(Path("/proc/meminfo"))
        self.samples.append(
            Sample(
                round(now, 4),
                sum(row.get("VmRSS", 0) for row in rows),
                sum(row.get("RssAnon", 0) for row in rows),
                sum(row.get("RssFile", 0) for row in rows),
                machine.get("Cached", 0),
                machine.get("Dirty", 0) + machine.get("Writeback", 0),
                self._group.charged() if self._group else 0,
            )
        )


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [found for child in children for found in (child, *_descendants(child))]


def _status(pid: int) -> dict[str, int]:
    return _fields(Path(f"/proc/{pid}/status"))


def _fields(path: Path) -> dict[str, int]:
    """The lines of a proc file that are a number of kB, in bytes; empty when the process is gone."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines if line.endswith(" kB"))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


def _written(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    counters = dict(line.split(": ") for line in lines)
    return max(int(counters["wchar"]), int(counters["write_bytes"]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what was started here, and only that."""
    for pid in [*_descendants(process.pid), process.pid]:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    process.wait()


def _thinned(samples: list[Sample]) -> list[Sample]:
    """At most so many samples; of neighbours the one with the highest memory is kept."""
    step = -(-len(samples) // _MOST_SAMPLES)
    if step <= 1:
        return samples
    return [max(samples[at : at + step], key=lambda sample: sample.rss) for at in range(0, len(samples), step)]
