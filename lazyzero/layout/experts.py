"""Where experts are: files of single experts, and which ranks hold the partitions of which experts' masters.

layer_<l>_expert_<e>_mp_rank_<mp>_model_states.pt   one expert in 16 bit, under its global number (0.5: without `layer_<l>_`)
expp_rank_<r>_mp_rank_<mp>_optim_states.pt          stage 0: the optimizer of expert-parallel rank r

A param group of experts is partitioned over the ranks that have the same experts, `partition_count` of them; there are
ep_size = ranks / partition_count such sets. Expert-parallel rank r's are r, r + ep_size, r + 2 * ep_size, ... or, with
`use_data_before_expert_parallelism`, the r-th run of `partition_count` ranks.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lazyzero.container.archive import Archive, open_archive
from lazyzero.container.brief import brief
from lazyzero.container.objects import TensorRef
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout
from lazyzero.layout.discover import EXPERT, FileSet
from lazyzero.layout.ranks import Optimizer, spans
from lazyzero.layout.states import ModelStates, OptimStates, Shapes, as_int, named
from lazyzero.layout.zero12 import FLATS
from lazyzero.tensor import LazyTensor

_NAME = re.compile(r"((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(|\..*)")


_MOST_EXPERTS = 1 << 16  # of a layer
_MOST_FILES = 1 << 20  # of experts that are named as missing


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """The experts' 16-bit weights under their global names, and the files they are in; `lacking` describes absent files."""

    weights: dict[str, TensorRef]
    archives: tuple[Archive, ...]
    lacking: tuple[str, ...]


def read_expert_files(files: FileSet, model: ModelStates) -> ExpertFiles:
    """Reads the metadata of every expert's file. Raises InconsistentCheckpoint for one parameter in two files."""
    weights: dict[str, TensorRef] = {}
    archives = []
    present: set[tuple[int | None, int]] = set()
    for path in sorted(files.experts, key=_numbers):
        layer, expert, _ = _numbers(path)
        present.add((layer if layer >= 0 else None, expert))
        archive = open_archive(path)
        archives.append(archive)
        for name, ref in named(path, archive.root, "the file").items():
            if isinstance(ref, TensorRef):
                if name in weights:
                    raise InconsistentCheckpoint(f"{path}: {name!r} is in another expert's file too")
                weights[name] = ref
    return ExpertFiles(weights, tuple(archives), tuple(_lacking(model, present)))


def _numbers(path: str) -> tuple[int, int, int]:
    match = EXPERT.fullmatch(os.path.basename(path))
    assert match is not None
    return int(match[1] or -1), int(match[2]), int(match[3])


def _lacking(model: ModelStates, present: set[tuple[int | None, int]]) -> list[str]:
    """The files there should be: `num_experts` counts each MoE layer's experts (an int in 0.5)."""
    recorded = model.root.get("num_experts")
    counts = (
        [min(max(as_int(n) or 0, 0), _MOST_EXPERTS) for n in recorded]
        if isinstance(recorded, list)
        else as_int(recorded) or 0
    )
    layered = any(layer is not None for layer, _ in present) or not present
    if isinstance(counts, list) and sum(counts) > _MOST_FILES:
        raise InconsistentCheckpoint(
            f"{model.path}: `num_experts` counts {sum(counts)} experts, more than any model; the file is damaged"
        )
    if isinstance(counts, list) and layered:
        wanted = [(layer, expert) for layer, count in enumerate(counts) for expert in range(count)]
        return [f"layer_{layer}_expert_{expert}" for layer, expert in wanted if (layer, expert) not in present]
    most = max(counts, default=0) if isinstance(counts, list) else counts
    return [
        f"expert_{expert}"
        for expert in range(min(most, _MOST_EXPERTS))
        if not layered and (None, expert) not in present
    ]


class Scheme(Protocol):
    """How the experts of several expert-parallel ranks, alike in their local names, make those of the model."""

    stored: dict[str, LazyTensor]
    """The copies that training kept, under the model's names; what has no master comes from here, in its role."""

    def owns(self, names: Iterable[str]) -> bool:
        """Whether any of the names is an expert's."""

    def local(self, shapes: Shapes, rank: int) -> Shapes:
        """A param group as expert-parallel rank `rank` has it, given rank 0's."""

    def whole(self, by_rank: Sequence[Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
        """The masters of all expert-parallel ranks under the model's names. Raises InconsistentCheckpoint."""

    def by_value(self, optimizers: Sequence[Any], dense: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Stage 0: the masters in the expert-parallel ranks' wrappers, named by their values."""


@dataclass(frozen=True, slots=True)
class ExpertName:
    """A parameter of one expert of deepspeed.moe: `<prefix><number><rest>`."""

    prefix: str
    number: int
    rest: str

    def numbered(self, number: int) -> str:
        """The same parameter's name in another expert."""
        return f"{self.prefix}{number}{self.rest}"


def expert_name(name: str) -> ExpertName | None:
    """The parts of an expert's parameter's name, None for any other name."""
    match = _NAME.fullmatch(name)
    return ExpertName(match[1], int(match[2]), match[3]) if match else None


def partition_counts(optimizer: Optimizer, groups: int) -> list[int]:
    """The number of partitions of each param group. Raises InconsistentCheckpoint."""
    first, world = optimizer.ranks[0], optimizer.world_size
    recorded = first.state.get("partition_count")
    counts = [as_int(count) for count in recorded] if isinstance(recorded, list) else [as_int(recorded)] * groups
    if len(counts) != groups or any(count is None or count < 1 or world % count for count in counts):
        raise InconsistentCheckpoint(
            f"{first.path}: expected a partition_count for each of {groups} groups that divides {world} ranks, found {brief(recorded)}"
        )
    return [count or 1 for count in counts]


def expert_sets(world: int, count: int, config: Any) -> list[range]:
    """For each expert-parallel rank, the data-parallel ranks with its experts' `count` partitions, in their order."""
    if isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism") is True:
        return [range(first, first + count) for first in range(0, world, count)]
    return [range(first, world, world // count) for first in range(world // count)]


def in_one_order(ranks: Sequence[OptimStates]) -> tuple[OptimStates, ...]:
    """The ranks with their param groups in rank 0's order: with several ep_sizes each process may sort them its own way.

    Raises InconsistentCheckpoint when the groups are not the same ones.
    """
    keys = [_group_keys(rank) for rank in ranks]
    for rank, found in zip(ranks, keys, strict=True):
        if sorted(found) != sorted(keys[0]):
            raise InconsistentCheckpoint(
                f"{rank.path}: has the param groups {brief(found, 120)}, {os.path.basename(ranks[0].path)} has {brief(keys[0], 120)}"
            )
    places = [{key: index for index, key in enumerate(found)} for found in keys]
    return tuple(_reordered(rank, [place[key] for key in keys[0]]) for rank, place in zip(ranks, places, strict=True))


def _group_keys(rank: OptimStates) -> list[tuple[str, str, int]]:
    """A param group's name where the optimizer kept it, its number of partitions, and which of that kind it is."""
    flats, counts, saved = (rank.state.get(key) for key in (FLATS, "partition_count", "base_optimizer_state"))
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    keys: list[tuple[str, str, int]] = []
    seen: Counter[tuple[str, str]] = Counter()
    for index in range(len(flats) if isinstance(flats, list) else 0):
        group = groups[index] if isinstance(groups, list) and index < len(groups) else None
        name = brief(group.get("name", "")) if isinstance(group, dict) else ""
        count = brief(counts[index] if isinstance(counts, list) and index < len(counts) else counts)
        keys.append((name, count, seen[name, count]))
        seen[name, count] += 1
    return keys


def _reordered(rank: OptimStates, order: Sequence[int]) -> OptimStates:
    if list(order) == sorted(order):
        return rank
    state = {
        key: [value[index] for index in order] if isinstance(value, list) and len(value) == len(order) else value
        for key, value in rank.state.items()
    }
    saved = state.get("base_optimizer_state")
    if isinstance(saved, dict) and isinstance(saved.get("state"), dict):
        state["base_optimizer_state"] = {"state": {new: saved["state"].get(old) for new, old in enumerate(order)}}
    return replace(rank, state=state)


def without_aliases(model: ModelStates) -> ModelStates:
    """What is saved next to experts was cloned tensor by tensor: storages tell nothing of ties, only `shared_params` does."""
    return replace(model, module={name: ref for name, ref in model.module.items() if name not in model.shared})


def require_one_model_rank(files: FileSet) -> None:
    """Raises UnsupportedLayout for experts under tensor or pipeline parallelism."""
    if files.layers:
        raise UnsupportedLayout(f"{files.directory}: experts in a pipeline, whose stages' experts are not told apart")
    if len(files.model_ranks) > 1:
        raise UnsupportedLayout(
            f"{files.directory}: experts under tensor parallelism (model-parallel ranks {spans(files.model_ranks)}), which "
            "DeepSpeed does not record how to join; train on from it without tensor parallelism and save again"
        )


def require_all(files: FileSet, experts: ExpertFiles) -> None:
    """Raises MissingFiles where experts' files are the only source of weights and some are not there."""
    if experts.lacking:
        more = f" and {len(experts.lacking) - 4} more" if len(experts.lacking) > 4 else ""
        raise MissingFiles(
            f"{files.directory}: experts' files are missing: {', '.join(experts.lacking[:4])}{more} (_mp_rank_00_model_states.pt); "
            "copy them from the nodes that wrote them"
        )


def told(experts: ExpertFiles) -> list[str]:
    """What missing files of experts mean where there are masters."""
    if not experts.lacking:
        return []
    return [
        f"{len(experts.lacking)} experts' files are missing ({experts.lacking[0]} first): their weights come from the optimizer's files "
        "and cannot be compared with the copy that training kept; buffers and frozen weights in them are lost"
    ]
