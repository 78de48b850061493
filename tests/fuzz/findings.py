"""Inputs that once got through: what each did, on which surface."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """An input of a target, and what it did."""

    what: str
    target: str
    data: bytes


FINDINGS: tuple[Finding, ...] = ()
