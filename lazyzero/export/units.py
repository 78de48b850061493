"""Byte counts as users write and read them."""

from __future__ import annotations

import re

from lazyzero.errors import InvalidRequest

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_size(text: str | int) -> int:
    """`5GB` (decimal) or `5GiB` (binary) in bytes; a bare number is bytes. Raises InvalidRequest."""
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", str(text))
        if not match or match[2].upper() not in _UNITS:
            raise InvalidRequest(f"size {text!r} is not a number with a unit such as 500MB, 5GB or 2GiB")
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    if value <= 0:
        raise InvalidRequest(f"size {text!r} must be above 0")
    return value


def show_size(count: float) -> str:
    """A byte count in decimal units, three digits or so."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def show_time(seconds: float) -> str:
    """A duration as "0.8 s", "3m12s" or "2h05m"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60 if seconds >= 3600 else seconds // 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if seconds >= 3600 else f"{minutes}m{int(seconds % 60):02d}s"
