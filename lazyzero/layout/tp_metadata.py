"""`universal_checkpoint_info`: which parameters tensor parallelism split, and how (DeepSpeed 0.7.4 to 0.19.8).

Megatron-DeepSpeed puts it into the client state, AutoTP (0.18.9 on) DeepSpeed itself. It has lists of patterns by kind,
matched from the beginning of the name; what none of them matches is split along dimension 0. From 0.19.7 on AutoTP adds
a map of every parameter, which goes before the lists; before 0.19.4 it does not list the parameters it left whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import thread_time
from typing import Any, Generic, TypeVar

from lazyzero.container.brief import brief
from lazyzero.container.objects import Opaque
from lazyzero.errors import InconsistentCheckpoint, UnsupportedLayout
from lazyzero.layout import tp_plan
from lazyzero.layout.states import as_int
from lazyzero.layout.tp_affine import plan_of_map
from lazyzero.layout.tp_plan import Plan, Shapes

KEY = "universal_checkpoint_info"
_LONGEST = 2048
_MOST_QUANTIFIERS = 4
_MOST_OPTIONS = 8
_MOST_EFFORT = 50_000_000  # characters that one search may look at, should the pattern do its worst
_LONGEST_SEARCH = 2.0  # seconds of work for all names

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A pattern, and how many places of it repeat or have a choice: what a search may cost at worst."""

    compiled: re.Pattern[str]
    quantifiers: int
    options: int


class Patterns(Generic[T]):
    """Values by pattern; AutoTP's patterns are each one escaped name, which need not be searched one by one."""

    def __init__(self, path: str, pairs: Iterable[tuple[Any, T]]) -> None:
        self._names: dict[str, T] = {}
        self._others: list[tuple[_Pattern, T]] = []
        self._path = path
        self._spent = 0.0
        for pattern, value in pairs:
            name = _literal(pattern)
            if name is not None:
                self._names.setdefault(name, value)
            else:
                self._others.append((_compiled(path, pattern), value))

    def find(self, name: str) -> T | None:
        """The value of the pattern that matches at the beginning of `name`."""
        if name in self._names:
            return self._names[name]
        start = thread_time()
        try:
            return next((value for pattern, value in self._others if self._matches(pattern, name)), None)
        finally:
            self._spent += thread_time() - start

    def _matches(self, pattern: _Pattern, name: str) -> bool:
        if (len(name) + 1) ** pattern.quantifiers << pattern.options > _MOST_EFFORT or self._spent > _LONGEST_SEARCH:
            raise UnsupportedLayout(
                f"{self._path}: searching for {brief(pattern.compiled.pattern, 120)} in `{KEY}` could take too long; "
                "state the dimensions with --tp-rules"
            )
        return pattern.compiled.match(name) is not None


@dataclass(frozen=True, slots=True)
class SubParameters:
    """The recorded shape of a parameter that is several ones, and where its sizes stand in it."""

    view: tuple[Any, ...]
    dim: int
    widths: Any


class Metadata:
    """What one model file's `universal_checkpoint_info` says. Raises InconsistentCheckpoint when it cannot be read."""

    def __init__(self, path: str, info: Mapping[str, Any]) -> None:
        self.path = path
        self._info = info
        self.complete = "affine_map" in info  # otherwise AutoTP may have left whole parameters unlisted
        self._replicated = self._listed("tp_replicated_parameter_patterns")
        self._averaged = self._listed("parameter_to_average_patterns")
        self._rows = self._listed("parameter_with_row_parallelism_patterns")
        self._halves = self._listed("parameter_with_2_sub_params_cat_dim_0")
        self._vocabulary = self._listed("vocabulary_parameter_patterns")
        self._sub = Patterns(path, self._sub_parameters())
        self._maps = Patterns(path, self._affine_maps())
        self._unsupported = Patterns(path, self._dict("autotp_unsupported_parameter_patterns").items())

    def plan(self, name: str, shapes: Shapes) -> Plan | None:
        """How the shards of `name` are put together, None where no pattern is its own.

        Raises InconsistentCheckpoint, or UnsupportedLayout for what DeepSpeed marked as impossible to join.
        """
        where = f"{self.path}: {name!r}"
        reason = self._unsupported.find(name)
        if reason is not None:
            raise UnsupportedLayout(
                f"{where} cannot be joined, DeepSpeed recorded: {brief(reason, 200)}; state the dimension with --tp-rules if you know it"
            )
        plan = self._by_kind(where, name, shapes)
        if self._vocabulary.find(name):
            rows = as_int(self._info.get("original_vocab_size"))
            if rows is None or rows < 0:
                raise InconsistentCheckpoint(
                    f"{where} is a vocabulary, but `original_vocab_size`, which tells its rows from padding, is not recorded"
                )
            plan = tp_plan.trimmed(plan or tp_plan.split(where, shapes, 0), rows)
        return plan

    def _by_kind(self, where: str, name: str, shapes: Shapes) -> Plan | None:
        """In the order in which DeepSpeed's own conversion to universal checkpoints decides."""
        entry = self._maps.find(name)
        if entry is not None:
            return plan_of_map(where, shapes, entry)
        if self._replicated.find(name):
            return tp_plan.replicated(where, shapes)
        if self._averaged.find(name):
            return tp_plan.averaged(where, shapes)
        if self._halves.find(name):
            return tp_plan.halves(where, shapes)
        sub = self._sub.find(name)
        if sub is not None:
            return tp_plan.sub_parameters(where, shapes, sub.view, sub.dim, sub.widths)
        return tp_plan.split(where, shapes, 1) if self._rows.find(name) else None

    def _sub_parameters(self) -> Iterable[tuple[Any, SubParameters]]:
        recorded = self._dict("sub_param_shard_widths")
        for entry in self._list("parameter_with_sub_params"):
            fields = entry.state if isinstance(entry, Opaque) else entry
            if not isinstance(fields, dict):
                raise InconsistentCheckpoint(f"{self.path}: `parameter_with_sub_params` has {brief(entry)}")
            view, dim, patterns = fields.get("shape"), as_int(fields.get("partition_dim")), fields.get("patterns")
            if not isinstance(view, (list, tuple)) or dim is None or not isinstance(patterns, (list, tuple)):
                raise InconsistentCheckpoint(f"{self.path}: `parameter_with_sub_params` has {brief(fields, 120)}")
            for pattern in patterns:
                widths = recorded.get(pattern) if isinstance(pattern, str) else None
                yield pattern, SubParameters(tuple(view), dim, widths)

    def _affine_maps(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        recorded = self._dict("affine_map")
        if recorded and recorded.get("version") != 1:
            raise UnsupportedLayout(
                f"{self.path}: its affine map has version {brief(recorded.get('version'), 20)}, of a DeepSpeed after 0.19.8; "
                "a newer lazyzero may read it"
            )
        params = recorded.get("params", {})
        return params.items() if isinstance(params, dict) else ()

    def _listed(self, key: str) -> Patterns[bool]:
        return Patterns(self.path, ((pattern, True) for pattern in self._list(key)))

    def _list(self, key: str) -> list[Any]:
        return list(self._typed(key, (list, tuple), ()))

    def _dict(self, key: str) -> dict[Any, Any]:
        return dict(self._typed(key, (dict,), {}))

    def _typed(self, key: str, types: tuple[type, ...], default: Any) -> Any:
        value = self._info.get(key)
        if value is None:
            return default
        if not isinstance(value, types):
            raise InconsistentCheckpoint(f"{self.path}: expected `{KEY}[{key!r}]` to be patterns, found {brief(value)}")
        return value


def _literal(pattern: Any) -> str | None:
    """The one name that `^name$` with everything special escaped stands for."""
    if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    return name if re.escape(name) == pattern[1:-1] else None


def _compiled(path: str, pattern: Any) -> _Pattern:
    """A pattern out of a file nobody vouches for: refused where matching could take forever."""
    if isinstance(pattern, str) and len(pattern) <= _LONGEST and not re.search(r"\)\s*[*+{]", pattern):
        quantifiers, options = len(re.findall(r"[*+{]", pattern)), len(re.findall(r"[|?]", pattern))
        if quantifiers <= _MOST_QUANTIFIERS and options <= _MOST_OPTIONS:
            try:
                return _Pattern(re.compile(pattern), quantifiers, options)
            except (re.error, RecursionError, OverflowError):
                pass
    raise UnsupportedLayout(
        f"{path}: `{KEY}` has {brief(pattern, 120)} where a simple pattern of names was expected; state the dimensions with --tp-rules"
    )
