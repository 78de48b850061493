"""What a layout supports, in the layout's own words; the tables of the README and docs/formats.md are made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Support:
    """One kind of checkpoint: the DeepSpeed versions that write it, what is read of it, how that was verified."""

    kind: str
    versions: str
    read: str
    verified: str


def table(rows: Iterable[Support]) -> str:
    """The rows as a Markdown table."""
    lines = ["| checkpoint | DeepSpeed | what is read | verified on |", "|---|---|---|---|"]
    lines += [f"| {row.kind} | {row.versions} | {row.read} | {row.verified} |" for row in rows]
    return "\n".join(lines) + "\n"
