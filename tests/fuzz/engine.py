"""Runs targets on inputs: our own mutation fuzzer, and the limits that hold for every run of any fuzzer."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutate import mutated
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import run, scratch

SECONDS = 2.0  # of work for one input
MEMORY = 256 << 20  # bytes more than the process had before
_KEPT = 400  # inputs that led somewhere new and are mutated further


class Hang(Exception):
    """Raised inside a target that has worked too long."""


@dataclass
class Report:
    """What a run came to: how many inputs, what they ended in, and those that ended in anything unforeseen."""

    target: str
    runs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[bytes, str]] = field(default_factory=list)

    def __str__(self) -> str:
        ended = ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common())
        return f"{self.target}: {self.runs} inputs ({ended}), {len(self.findings)} findings"


@contextmanager
def limits() -> Iterator[None]:
    """Within it memory is short and time runs out: MemoryError or Hang come out of whatever asks for too much."""
    with Path("/proc/self/statm").open() as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, hang)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def hang(signum: int, frame: object) -> None:
    raise Hang(f"more than {SECONDS} seconds")


def attempt(target: str, data: bytes, root: Path) -> tuple[str, str | None]:
    """One input under `limits()`: what it ended in, and a description where that is a finding."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        return run(target, data, root), None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return type(error).__name__, f"{type(error).__name__}: {error} {_place(error)}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _place(error: BaseException) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"({code.co_filename.rsplit('/', 2)[-1]}:{trace.tb_lineno} {code.co_name})"
        trace = trace.tb_next
    return place


def fuzz(target: str, seconds: float, seed: int, *, most: int | None = None) -> Report:
    """Mutates the target's seeds for a while. The same seed and number of runs give the same inputs."""
    rng, report, root = random.Random(f"{target} {seed}"), Report(target), scratch()
    first = seeds(target)
    pool: list[bytes] = list(first)
    places: set[str] = set()
    end = time.monotonic() + seconds
    try:
        with limits():
            while time.monotonic() < end and (most is None or report.runs < most):
                data = first[report.runs] if report.runs < len(first) else mutated(rng.choice(pool), pool, rng)
                outcome, finding = attempt(target, data, root)
                report.runs += 1
                report.outcomes[outcome] += 1
                if finding is not None and finding not in places:
                    places.add(finding)
                    report.findings.append((data, finding))
                elif outcome == "read" and finding is None and rng.random() < 0.05:
                    _keep(pool, data, len(first), rng)
    finally:
        root.rmdir()
    return report


def _keep(pool: list[bytes], data: bytes, first: int, rng: random.Random) -> None:
    """Inputs that were read whole are where the next mutations go deepest."""
    if len(pool) < first + _KEPT:
        pool.append(data)
    else:
        pool[first + rng.randrange(_KEPT)] = data


def replay(target: str, inputs: Sequence[bytes]) -> Report:
    """The same inputs again, in order."""
    report, root = Report(target), scratch()
    try:
        with limits():
            for data in inputs:
                outcome, finding = attempt(target, data, root)
                report.runs += 1
                report.outcomes[outcome] += 1
                if finding is not None:
                    report.findings.append((data, finding))
    finally:
        root.rmdir()
    return report
