"""The fuzzer itself, briefly: it finds what is there to be found, and finds nothing in the library."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz import engine
from tests.fuzz.engine import fuzz, replay
from tests.fuzz.findings import FINDINGS
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_only_our_errors_come_out(target: str) -> None:
    """Several hundred mutated inputs of each surface: LazyZeroError or an answer, soon and in little memory."""
    report = fuzz(target, 60, seed=7, most=500)
    assert report.runs == 500
    assert not report.findings, report.findings[0][1]
    assert report.outcomes["read"] > 10


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_seed_gives_the_same_inputs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run can be repeated."""
    inputs: list[bytes] = []
    monkeypatch.setitem(TARGETS, target, lambda data, root: inputs.append(data))
    for _ in range(2):
        fuzz(target, 60, seed=3, most=len(seeds(target)) + 20)
    half = len(inputs) // 2
    assert inputs[:half] == inputs[half:]
    fuzz(target, 60, seed=4, most=half)
    assert inputs[:half] != inputs[-half:]


def test_the_engine_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another exception, an endless loop and a large allocation are findings."""

    def wrong(data: bytes, root: Path) -> None:
        raise KeyError(data)

    def endless(data: bytes, root: Path) -> None:
        while True:
            pass

    def large(data: bytes, root: Path) -> None:
        bytearray(300 << 20)

    monkeypatch.setattr(engine, "SECONDS", 0.2)
    for function, what in ((wrong, "KeyError"), (endless, "Hang"), (large, "MemoryError")):
        monkeypatch.setitem(TARGETS, "archive", function)
        start = time.process_time()
        ((_, told),) = replay("archive", [b"x"]).findings
        assert told.startswith(what)
        assert time.process_time() - start < 2


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.what)
def test_findings_stay_fixed(finding: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input that once did something unforeseen ends as it should."""
    monkeypatch.setattr(engine, "SECONDS", 20.0)  # a tracer that measures coverage takes its share
    report = replay(finding.target, [finding.data])  # type: ignore[attr-defined]
    assert not report.findings, report.findings[0][1]
