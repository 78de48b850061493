"""What an export did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Finished:
    """A file under its final name, on disk. `index` counts from 1 to `count`; `nbytes` is the file's size.

    `resumed` says that an earlier run wrote it, `handed` that the consumer of that run has had it already.
    """

    path: Path
    index: int
    count: int
    nbytes: int
    resumed: bool = False
    handed: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """`files` in the order written, the index last; `nbytes` of all of them; `peak_rss` in bytes, of the process.

    `missing` are names that the checkpoint mentions and no file holds; `checked` counts the tensors whose sample was
    compared with the training copy, `verified` says that every element was read back; `resumed` counts files that an earlier run had finished.
    """

    output: str
    layout: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float
    peak_rss: int
    checked: int
    verified: bool
    resumed: int
    tied: dict[str, str]
    missing: dict[str, str]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
