"""Describes a value from a file in an error message: short, on one line, at a cost that the value does not decide.

`repr` will not do. A few kilobytes of pickle describe a value whose text is longer than any memory, nested deeper than
Python prints, or an integer that Python refuses to print.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

_ITEMS = 6
_LEVELS = 2


def brief(value: Any, limit: int = 80) -> str:
    """`value` as it would be written in Python, cut to `limit` characters."""
    text = _text(value, limit, _LEVELS)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _text(value: Any, limit: int, levels: int) -> str:
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= limit else repr(value[:limit])[:-1] + "..."
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict):
        pairs = [
            f"{_text(k, limit, levels - 1)}: {_text(v, limit, levels - 1)}"
            for k, v in islice(value.items(), _ITEMS if levels else 0)
        ]
        return "{" + _joined(pairs, len(value)) + "}"
    if isinstance(value, (list, tuple)):
        items = [_text(item, limit, levels - 1) for item in value[: _ITEMS if levels else 0]]
        return ("[{}]" if isinstance(value, list) else "({})").format(_joined(items, len(value)))
    return repr(value)


def _joined(items: list[str], count: int) -> str:
    return ", ".join([*items, "..."] if count > len(items) else items)
