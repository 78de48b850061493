"""Tensor parallelism: AutoTP (metadata from 0.18.9 on), Megatron-style models with `universal_checkpoint_info`, or rules.

Each model-parallel rank wrote a checkpoint of its own, of any ZeRO stage, of the shards it had:

mp_rank_<mp>_model_states.pt   zero_pp_rank_<dp>_mp_rank_<mp>_{optim,model}_states.pt

Sequence parallelism passes for model parallelism in these names (`parallel_state_sp`, 0.17 on), but partitions its ranks
together: each data-parallel rank is there once, whatever model-parallel rank its file is named after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout
from lazyzero.layout import tp_plan
from lazyzero.layout.contents import Contents
from lazyzero.layout.discover import FileSet
from lazyzero.layout.found import Found
from lazyzero.layout.ranks import spans
from lazyzero.layout.states import as_int
from lazyzero.layout.support import Support
from lazyzero.layout.tp_merge import Shards, alike, merge
from lazyzero.layout.tp_metadata import KEY, Metadata
from lazyzero.layout.tp_plan import Plan
from lazyzero.layout.tp_rules import TpRule, decide

MOMENTS = True
SUPPORT = (
    Support(
        "tensor parallel",
        "0.7.4 to 0.19.8",
        "any of the stages below on each rank, joined as `universal_checkpoint_info` says (AutoTP from 0.18.9 on), or "
        "as `--tp-rules` does; optimizer moments",
        "real files of 0.19.8, stages 0 to 3",
    ),
)
_MOST_CUTS = 1_000_000
_TOLD_SEQUENCE = (
    "the model-parallel ranks in the file names are sequence-parallel ones: each data-parallel rank is there once, "
    "so all of them hold partitions of one model"
)


def matches(found: Found) -> bool:
    """Whether there are files of several model-parallel ranks."""
    return len(found.files.model_ranks) > 1


def read(found: Found) -> Contents:
    """The contents of a tensor-parallel checkpoint; reads samples of what the ranks have alike.

    Raises UnsupportedLayout when nothing says how a parameter was split, MissingFiles, and what the layout below raises.
    """
    from lazyzero.layout.registry import recognise  # which asks this module: below one rank lies any other layout

    files = found.files
    if _sequence_parallel(files):
        contents = recognise(replace(found, files=_as_one(files)))
        root = model_root(contents)
        if not _autotp(root) and KEY not in root:
            return replace(contents, warnings=(*contents.warnings, _TOLD_SEQUENCE))
    ranks = files.model_ranks
    first = recognise(replace(found, files=files.of_model_rank(ranks[0])))
    recorded = as_int(model_root(first).get("mp_world_size"))
    world = recorded if recorded is not None and recorded > 0 else len(ranks)
    if len(ranks) < world or ranks[:world] != list(range(world)):
        raise MissingFiles(
            f"{files.directory}: files of some model-parallel ranks are missing: have {spans(ranks)}; need 0-{world - 1}; "
            "copy them from the nodes that wrote them"
        )
    rest = [recognise(replace(found, files=files.of_model_rank(rank))) for rank in ranks[1:world]]
    merged = join(found, [first, *rest])
    if world == len(ranks):
        return merged
    aside = (
        f"set aside the files of model-parallel ranks {spans(ranks[world:])}: the save was of {world}, they are older"
    )
    return replace(merged, warnings=(aside, *merged.warnings))


def join(found: Found, ranks: Sequence[Contents]) -> Contents:
    """Contents of the tensor-parallel ranks of one model as one. Raises UnsupportedLayout naming what is undecided."""
    root = model_root(ranks[0])
    if "folding" in root:
        raise UnsupportedLayout(
            f"{ranks[0].archives[0].path}: experts folded over tensor-parallel ranks (AutoEP with AutoTP), which DeepSpeed "
            "itself cannot join either; train on from it without tensor parallelism and save again"
        )
    decisions = Decisions(found.tp_rules, ranks)
    merged = merge(ranks, decisions.plan)
    if decisions.undecided:
        raise UnsupportedLayout(decisions.refusal())
    return replace(merged, warnings=(*merged.warnings, *decisions.told()))


def model_root(contents: Contents) -> Mapping[str, Any]:
    """The model file's dict; its archive comes first in any contents."""
    root = contents.archives[0].root
    return root if isinstance(root, dict) else {}


def _sequence_parallel(files: FileSet) -> bool:
    """Whether each data-parallel rank is there once, while there are several model-parallel ranks."""
    saved = [ranks for ranks in (*files.optim.values(), files.zero_model) if ranks]
    return bool(saved) and all(len({dp for dp, _ in ranks}) == len(ranks) for ranks in saved)


def _as_one(files: FileSet) -> FileSet:
    return replace(
        files,
        optim={prefix: {(dp, 0): path for (dp, _), path in ranks.items()} for prefix, ranks in files.optim.items()},
        zero_model={(dp, 0): path for (dp, _), path in files.zero_model.items()},
        model={0: files.model[min(files.model)]} if files.model else {},
    )


class Decisions:
    """How each parameter is put together: the user's rules go before the metadata, then what AutoTP did not record."""

    def __init__(self, rules: Sequence[TpRule], ranks: Sequence[Contents]) -> None:
        self._rules = rules
        self._path = ranks[0].archives[0].path
        root = model_root(ranks[0])
        info = root.get(KEY)
        self._metadata = Metadata(self._path, info) if isinstance(info, dict) else None
        self._autotp = self._metadata is not None and not self._metadata.complete and _autotp(root)
        self._ranks = len(ranks)
        self._cuts = 0
        self.undecided: list[str] = []
        self._guessed: list[str] = []
        self._split: set[str] = set()  # prefixes of weights split along dimension 0, whose biases are too

    def plan(self, name: str, shards: Shards) -> Plan | None:
        """The plan for one parameter's shards, None where nothing says how. Raises InconsistentCheckpoint or UnsupportedLayout."""
        plan = self._plan(name, shards)
        self._cuts += 0 if plan is None else len(plan.cuts)
        if self._cuts > _MOST_CUTS:
            raise InconsistentCheckpoint(
                f"{self._path}: its parameters are cut into more than {_MOST_CUTS} slabs; damaged file"
            )
        return plan

    def _plan(self, name: str, shards: Shards) -> Plan | None:
        where = f"{self._path}: {name!r}"
        shapes = [None if shard is None else shard.shape for shard in shards]
        if _is_buffer(name, shards) and len(set(shapes)) == 1:  # patterns are about parameters
            return tp_plan.replicated(where, shapes)
        rule = decide(self._rules, name)
        if rule is not None:
            return _by_rule(where, rule, shapes)
        if self._metadata is not None and (plan := self._metadata.plan(name, shapes)) is not None:
            return plan
        if self._metadata is None:
            self.undecided.append(name)
            return None
        return self._unlisted(where, name, shapes, shards)

    def _unlisted(self, where: str, name: str, shapes: tp_plan.Shapes, shards: Shards) -> Plan:
        """Dimension 0, unless AutoTP left the parameter whole without recording it: then all ranks have it alike."""
        prefix = name.rpartition(".")[0]
        if self._autotp and prefix not in self._split and alike(shards):
            self._guessed.append(name)
            return tp_plan.replicated(where, shapes)
        if name.endswith(".weight"):
            self._split.add(prefix)
        return tp_plan.split(where, shapes, 0)

    def refusal(self) -> str:
        """What is missing, and the way out."""
        more = f" and {len(self.undecided) - 4} more" if len(self.undecided) > 4 else ""
        shown = ", ".join(map(repr, self.undecided[:4])) + more
        lacking = (
            "no rule matches"
            if self._rules
            else f"there is no `{KEY}`, which DeepSpeed's AutoTP records from 0.18.9 on, to say"
        )
        return (
            f"{self._path}: a tensor-parallel checkpoint of {self._ranks} ranks, and {lacking} how these parameters were split: "
            f"{shown}; state it with --tp-rules FILE, a line `pattern dimension` or `pattern replicated` for each kind"
        )

    def told(self) -> list[str]:
        """What was inferred."""
        if not self._guessed:
            return []
        return [
            f"this DeepSpeed version did not record which parameters AutoTP left whole; {len(self._guessed)} that all ranks have "
            f"alike ({self._guessed[0]!r} first) were taken so; --tp-rules overrides it"
        ]


def _is_buffer(name: str, shards: Shards) -> bool:
    return name.endswith("_extra_state") or any(shard is not None and shard.role == "buffer" for shard in shards)


def _autotp(root: Mapping[str, Any]) -> bool:
    config = root.get("ds_config")
    section = config.get("tensor_parallel") if isinstance(config, dict) else None
    size = as_int(section.get("autotp_size")) if isinstance(section, dict) else None
    return size is not None and size > 1


def _by_rule(where: str, rule: TpRule, shapes: tp_plan.Shapes) -> Plan:
    if rule.dimension is None:
        return tp_plan.replicated(where, shapes)
    try:
        return tp_plan.split(where, shapes, rule.dimension)
    except InconsistentCheckpoint as error:
        raise InconsistentCheckpoint(f"{error} (rule `{rule.pattern} {rule.dimension}`)") from None
