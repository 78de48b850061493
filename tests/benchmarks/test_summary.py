"""What the README says was measured is what the committed results say."""

from __future__ import annotations

from benchmarks import summary
from benchmarks.cases import CASES


def test_the_readmes_table_is_that_of_the_results() -> None:
    """No figure in the table was typed by hand."""
    page = summary.README.read_text()
    assert "<!-- measured -->" in page
    assert page == summary.with_table(page)


def test_the_results_are_those_of_cases_there_are() -> None:
    """The committed results come from whole runs of cases as they are now, with nothing skipped and every output right."""
    cases = summary.load()
    labels = {case.name: {entrant.label for entrant in case.entrants} for case in CASES}
    assert {name: set(case["runs"]) for name, case in cases.items()} == {name: labels[name] for name in cases}
    assert not any(case["skipped"] for case in cases.values())
    verdicts = [verdict for case in cases.values() for verdict in case["verdicts"]]
    assert all(verdict["kept"] is not False for verdict in verdicts if verdict["promise"] == "values")
