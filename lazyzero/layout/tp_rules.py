"""What a user says of tensor parallelism where the checkpoint does not: a pattern and how its parameters were split.

    # pattern                          dimension the ranks' shards are joined along, or `replicated`
    embed.*weight$                     0
    attention\\.dense\\.weight$          1
    norm                               replicated

A pattern is a regular expression, found anywhere in the name. The first that is found decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyzero.errors import InvalidRequest

REPLICATED = "replicated"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TpRule:
    """Parameters whose name has `pattern` in it are joined along `dimension`, or are the same on all ranks (None)."""

    pattern: str
    dimension: int | None


def read_rules(path: str | os.PathLike[str]) -> tuple[TpRule, ...]:
    """The rules in a text file, one on a line; blank lines and `#` comments are passed over.

    Raises InvalidRequest naming the line that is none.
    """
    file = Path(path)
    try:
        size = file.stat().st_size
        raw = file.read_bytes() if file.is_file() and size <= _MOST_BYTES else None
    except OSError as error:
        raise InvalidRequest(f"{file}: the rules cannot be read: {error.strerror}") from None
    if raw is None:
        raise InvalidRequest(f"{file}: expected a text file of rules below {_MOST_BYTES} bytes, found {size}")
    try:
        lines = raw.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file}: expected a text file of rules, found bytes that are no UTF-8") from None
    rules = [_parse(f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if _content(line)]
    if not rules:
        raise InvalidRequest(f"{file}: has no rule; each is a line `pattern dimension` or `pattern {REPLICATED}`")
    return tuple(rules)


def make_rules(pairs: Iterable[tuple[str, int | str]]) -> tuple[TpRule, ...]:
    """Rules from (pattern, dimension or "replicated"). Raises InvalidRequest."""
    return tuple(_rule(f"rule {pattern!r}", pattern, str(how)) for pattern, how in pairs)


def decide(rules: Sequence[TpRule], name: str) -> TpRule | None:
    """The first rule whose pattern is found in `name`."""
    return next((rule for rule in rules if re.search(rule.pattern, name)), None)


def _content(line: str) -> str:
    text = line.strip()
    return "" if text.startswith("#") else text


def _parse(where: str, line: str) -> TpRule:
    words = re.sub(r"\s#.*$", "", line).split()
    if len(words) != 2:
        raise InvalidRequest(
            f"{where}: expected `pattern dimension` or `pattern {REPLICATED}`, found {line.strip()!r:.80}"
        )
    return _rule(where, words[0], words[1])


def _rule(where: str, pattern: str, how: str) -> TpRule:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"{where}: {pattern!r:.80} is no regular expression: {error}") from None
    if how == REPLICATED:
        return TpRule(pattern, None)
    if len(how) != 1 or how not in "01234567":
        raise InvalidRequest(f"{where}: expected a dimension (0 to 7) or `{REPLICATED}`, found {how!r:.40}")
    return TpRule(pattern, int(how))
