"""The promises, as rules over what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.measure import Run

MIB: Final = 1 << 20
GB: Final = 1_000_000_000

Relation = Literal["alone", "times", "over"]
Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a run, the unit it is shown in, and how the numbers of several runs become one."""

    of: Callable[[Run], float]
    unit: float
    name: str
    join: Callable[[Sequence[float]], float] = statistics.median

    def over(self, runs: Sequence[Run]) -> float:
        """The one number."""
        return self.join([self.of(run) for run in runs])

    def show(self, value: float) -> str:
        """With its unit."""
        return f"{value / self.unit:.3g} {self.name}" if self.unit == 1 else f"{value / self.unit:.4g} {self.name}"


MEASURES: Final[dict[str, Measure]] = {
    "durable time": Measure(lambda run: run.durable, 1, "s"),
    "time": Measure(lambda run: run.seconds, 1, "s"),
    "best time": Measure(lambda run: run.durable, 1, "s", min),
    "first byte": Measure(lambda run: run.seconds if run.first_write is None else run.first_write, 1, "s", max),
    "peak RSS": Measure(lambda run: run.peak_rss, MIB, "MiB", max),
    "bytes read": Measure(lambda run: run.read_calls_bytes, GB, "GB", max),
    "bytes off the disk": Measure(lambda run: run.read_disk_bytes, GB, "GB", max),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """`measure` of `label` is at most `limit`: alone (seconds, bytes), as so many times that of `other`, or so much over it."""

    promise: str
    label: str
    measure: str
    limit: float
    relation: Relation = "alone"
    other: str = ""

    @property
    def labels(self) -> list[str]:
        """Those it needs runs of."""
        return [self.label] if self.relation == "alone" else [self.label, self.other]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bound and what was found. `kept` is None where it could not be measured, which `found` explains."""

    promise: str
    bound: str
    found: str
    kept: bool | None


def judge(bound: Bound, runs: Runs, skipped: Mapping[str, str]) -> Verdict:
    """The verdict on one bound; `skipped` says why a label has no runs."""
    told = _told(bound)
    for label in bound.labels:
        if label in skipped or not runs.get(label):
            return Verdict(bound.promise, told, f"not measured: {label}: {skipped.get(label, 'not run')}", None)
        failed = [run for run in runs[label] if run.exit]
        if failed:
            return Verdict(bound.promise, told, f"{label} ended with {failed[0].exit}", False)
    measure = MEASURES[bound.measure]
    mine = measure.over(runs[bound.label])
    if bound.relation == "alone":
        return Verdict(bound.promise, told, f"{bound.label}: {measure.show(mine)}", mine <= bound.limit)
    other = measure.over(runs[bound.other])
    beside = f"{measure.show(mine)} ({bound.label}) and {measure.show(other)} ({bound.other})"
    if bound.relation == "over":
        return Verdict(bound.promise, told, f"{measure.show(mine - other)}: {beside}", mine - other <= bound.limit)
    ratio = mine / other
    shown = f"{ratio:.2f} x" if ratio >= 0.1 else f"1/{1 / ratio:.0f}"
    return Verdict(bound.promise, told, f"{shown}: {beside}", ratio <= bound.limit)


def _told(bound: Bound) -> str:
    measure = MEASURES[bound.measure]
    if bound.relation == "times":
        times = f"{bound.limit:.3g} x" if bound.limit >= 0.3 else f"1/{1 / bound.limit:.0f}"
        return f"{bound.measure} at most {times} that of {bound.other}"
    over = f" over that of {bound.other}" if bound.relation == "over" else ""
    return f"{bound.measure} at most {measure.show(bound.limit)}{over}"
