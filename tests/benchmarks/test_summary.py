"""What the README says was measured is what the committed results say."""

from __future__ import annotations

from benchmarks import summary
from benchmarks.cases import CASES


def test_the_readmes_table_is_that_of_the_results() -> None:
    """No figure in the table was typed by hand."""
    page = summary.README.read_text()
    assert "<!-- measured -->" in page
    assert page == summary.with_table(page)


def test_the_results_are_those_of_all_cases() -> None:
    """The committed results come from whole runs of the cases there are, with nothing skipped and no promise broken."""
    cases = summary.load()
    assert {name: set(case["runs"]) for name, case in cases.items()} == {
        case.name: {entrant.label for entrant in case.entrants} for case in CASES
    }
    assert not any(case["skipped"] for case in cases.values())
    assert list(summary.broken(cases)) == []


def test_a_broken_promise_is_noticed() -> None:
    """A verdict that says no is listed."""
    verdict = {"promise": "p", "bound": "b", "found": "f", "kept": False}
    assert list(summary.broken({"case": {"verdicts": [verdict]}})) == ["case: p: f"]
