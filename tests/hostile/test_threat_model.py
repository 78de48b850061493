"""What docs/threat-model.md points at is there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.hostile.rows import ROWS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()


def test_files_and_tests_exist() -> None:
    """Every file and every test that is named exists."""
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    paths = re.findall(r"`((?:tests|container)/[\w./]+)(?:::(\w+))?`", PAGE)
    assert len(paths) > 10
    for path, test in paths:
        assert (ROOT / path).exists() or (ROOT / "lazyzero" / path).exists(), path
        assert test in sources
    for test in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {test}(" in sources, test


def test_rows_exist() -> None:
    """Every row that is pointed at by its number is there, and rows are numbered through."""
    assert [int(row.split()[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    for first, last in re.findall(r"(\d\d) to (\d\d)", PAGE):
        assert 0 < int(first) < int(last) <= len(ROWS)
