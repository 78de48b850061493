"""The tables of what is supported are those of the layouts' registry. `python -m tests.test_docs` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lazyzero.layout.registry import LAYOUTS, support
from lazyzero.layout.support import table

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/formats.md")
_MARKED = re.compile(r"(<!-- layouts -->\n).*?(<!-- end -->)", re.DOTALL)


def with_table(text: str) -> str:
    """The page with the table between its marks."""
    return _MARKED.sub(lambda match: match[1] + table(support()) + match[2], text)


@pytest.mark.parametrize("page", PAGES)
def test_table_is_the_registrys(page: str) -> None:
    """A page says of every layout what the layout says of itself, and nothing more."""
    text = (ROOT / page).read_text()
    assert _MARKED.search(text)
    assert text == with_table(text)


def test_every_layout_says_what_it_supports() -> None:
    """A layout that reads something has at least one row."""
    silent = [layout.__name__ for layout in LAYOUTS if not getattr(layout, "SUPPORT", ())]
    assert silent == []


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(with_table(path.read_text()))
