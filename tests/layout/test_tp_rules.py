"""The user's rules: what is read from their file, and what is said of a line that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazyzero import LazyZeroError
from lazyzero.errors import InvalidRequest
from lazyzero.layout.tp_rules import TpRule, decide, make_rules, read_rules


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.txt"
    path.write_text(text)
    return path


def test_lines_are_rules(tmp_path: Path) -> None:
    """Comments and blank lines are passed over, a comment may follow a rule, order is kept."""
    text = "# Megatron\n\n  embed.*weight$   0\nattention\\.dense\\.weight$\t1   # rows\nnorm replicated\n"
    rules = read_rules(_file(tmp_path, text))
    assert rules == (TpRule("embed.*weight$", 0), TpRule(r"attention\.dense\.weight$", 1), TpRule("norm", None))


def test_the_first_pattern_found_decides() -> None:
    """A pattern is searched for anywhere in the name."""
    rules = make_rules([(r"\.bias$", "replicated"), ("dense", 1)])
    assert decide(rules, "layers.0.dense.bias") == TpRule(r"\.bias$", None)
    assert decide(rules, "layers.0.dense.weight") == TpRule("dense", 1)
    assert decide(rules, "head") is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("embed", "`pattern dimension` or `pattern replicated`"),
        ("embed 0 1", "`pattern dimension`"),
        ("embed -1", "found '-1'"),
        ("embed 8", "found '8'"),
        ("embed columns", "found 'columns'"),
        ("embed( 0", "no regular expression"),
        ("", "has no rule"),
    ],
)
def test_a_line_that_is_no_rule_is_named(tmp_path: Path, line: str, said: str) -> None:
    """The error names the file and the line, and what was expected."""
    with pytest.raises(InvalidRequest, match=r"rules\.txt") as caught:
        read_rules(_file(tmp_path, f"# first\n{line}\n"))
    assert said in str(caught.value)
    assert not line or "line 2" in str(caught.value)


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    """Neither a missing file, a directory, bytes nor megabytes are read as rules."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "big").write_bytes(b"a 0\n" * (1 << 19))
    for name in ("absent", ".", "bytes", "big"):
        with pytest.raises(LazyZeroError, match="rules"):
            read_rules(tmp_path / name)
