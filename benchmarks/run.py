"""Runs cases: makes the checkpoint, measures the tools in turn, checks what they wrote, judges, cleans up."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from benchmarks.bounds import GB, Verdict, judge
from benchmarks.cases import SOURCES, Case, Entrant, scratch_needed
from benchmarks.check import WrongOutput, check_notes, check_output
from benchmarks.generate import generate
from benchmarks.limits import (
    MemoryGroup,
    bytes_on_disk,
    drop_caches,
    files_below,
    memory_group,
    warm,
    why_no_cold_cache,
    why_no_groups,
)
from benchmarks.measure import Run, in_turn, measure
from benchmarks.tools import REPOSITORY, Tools

Say = Callable[[str], None]


@dataclass(slots=True)
class Outcome:
    """A case as it went. `skipped` says of labels, or of the whole case (""), why they were not run."""

    case: Case
    runs: dict[str, list[Run]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0  # elements
    scratch: int = 0  # bytes on disk at the highest point that was looked at

    @property
    def verdicts(self) -> list[Verdict]:
        """On every promise, and on the values."""
        values = f"{self.compared:,} elements compared" if not self.wrong else "; ".join(self.wrong)
        kept = None if not (self.compared or self.wrong) else not self.wrong
        found = [judge(bound, self.runs, self._reasons()) for bound in self.case.bounds]
        return [*found, Verdict("values", "every output is right", values if kept is not None else "no output", kept)]

    def _reasons(self) -> dict[str, str]:
        everything = self.skipped.get("")
        return {entrant.label: everything for entrant in self.case.entrants} if everything else self.skipped


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and with what: `scratch` is a directory of its own that is emptied again."""

    scratch: Path
    tools: Tools
    repeats: int | None
    say: Say
    whole: set[tuple[str, str, bool]] = field(default_factory=set)  # what has been compared from end to end

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """Yields each case as it is done. A checkpoint is made once for cases that follow each other."""
        for source, group in groupby(cases, key=lambda case: case.source):
            yield from self._over(source, list(group))

    def _over(self, source: str, cases: list[Case]) -> Iterator[Outcome]:
        spec = SOURCES[source]
        needed, free = scratch_needed(spec), shutil.disk_usage(self.scratch).free
        if free < needed:
            reason = f"needs {needed / GB:.0f} GB of disk, {free / GB:.0f} GB are free"
            yield from (Outcome(case, skipped={"": reason}) for case in cases)
            return
        root = self.scratch / "checkpoint"
        try:
            self.say(f"{source}: {spec.model.name}, ZeRO-{spec.stage}, {spec.world} ranks")
            generate(root, spec)
            for case in cases:
                yield self._case(case, root)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _case(self, case: Case, root: Path) -> Outcome:
        outcome = Outcome(case, skipped=self._skipped(case))
        if "" in outcome.skipped:
            self.say(f"  {case.name}: skipped: {outcome.skipped['']}")
            return outcome
        self.say(f"  {case.name}")
        entrants = [entrant for entrant in case.entrants if entrant.label not in outcome.skipped]
        turns = [_Turn(self, case, entrant, root, outcome) for entrant in entrants]
        found = in_turn(turns, self.repeats or case.repeats)
        outcome.runs = {entrant.label: runs for entrant, runs in zip(entrants, found, strict=True)}
        for verdict in outcome.verdicts:
            self.say(f"    {_MARKS[verdict.kept]} {verdict.promise}: {verdict.found}")
        return outcome

    def _skipped(self, case: Case) -> dict[str, str]:
        skipped = {}
        if case.cache == "cold" and (reason := why_no_cold_cache()):
            skipped[""] = reason
        for entrant in case.entrants:
            reason = self.tools.why_not(entrant.tool, entrant.options)
            if entrant.limit is not None:
                reason = reason or why_no_groups()
            if reason:
                skipped[entrant.label] = reason
        return skipped


_MARKS = {True: "kept  ", False: "BROKEN", None: "-     "}


@dataclass(slots=True)
class _Turn:
    """One entrant's turn: prepare, measure, check, clean up.

    Of what we make of a checkpoint, one output of each dtype and format is compared whole, the others in places.
    """

    bench: Bench
    case: Case
    entrant: Entrant
    root: Path
    outcome: Outcome

    def __call__(self) -> Run:
        output, notes = self.bench.scratch / "output", self.bench.scratch / "notes"
        try:
            command = self.bench.tools.command(self.entrant.tool, self.entrant.options, self.root, output, notes)
            self._prepare()
            with self._group() as group:
                environment = {"PYTHONPATH": str(REPOSITORY)}
                run = measure(self.entrant.label, command, group=group, environment=environment)
            self.outcome.scratch = max(self.outcome.scratch, bytes_on_disk(self.bench.scratch))
            self._tell(run)
            self._check(run, output, notes)
        finally:
            shutil.rmtree(output, ignore_errors=True)
            notes.unlink(missing_ok=True)
        return run

    def _prepare(self) -> None:
        if self.case.cache == "cold":
            drop_caches()
        else:
            os.sync()
            warm(files_below(self.root))

    def _group(self) -> contextlib.AbstractContextManager[MemoryGroup | None]:
        return contextlib.nullcontext() if self.entrant.limit is None else memory_group(self.entrant.limit)

    def _tell(self, run: Run) -> None:
        self.bench.say(
            f"    {run.label:16} {run.seconds:6.2f} s and {run.sync_seconds:.2f} s of sync, {run.peak_rss >> 20} MiB"
            + (f", ended with {run.exit}:\n{run.output}" if run.exit else "")
        )

    def _check(self, run: Run, output: Path, notes: Path) -> None:
        if run.exit or self.entrant.dtype is None:
            return
        spec = SOURCES[self.case.source]
        one = (self.case.source, self.entrant.dtype, "bin" in self.entrant.options)
        full = not spec.sparse and self.entrant.tool == "lazyzero convert" and one not in self.bench.whole
        self.bench.whole.add(one)
        try:
            if self.entrant.streamed:
                self.outcome.compared += check_notes(notes, spec, self.entrant.dtype)
            else:
                self.outcome.compared += check_output(output, spec, self.entrant.dtype, full=full)
        except WrongOutput as error:
            self.outcome.wrong.append(f"{run.label}: {error}")
