"""ZeRO-1 of DeepSpeed 0.2 to 0.3.16: `local_sub_partitions_of_fp32_groups`, a list of intervals for each param group.

A group's flat vector is cut into intervals for communication, and every interval into one sub-partition for each rank:
element order is interval by interval, the ranks in turn in each. Saving cuts the tail padding off (`elastic_checkpoint`, the
default), or leaves it and records neither `zero_stage` nor `partition_count`. The order of the parameters is in no file;
the 16-bit copies in `module` tell it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lazyzero.container.brief import brief
from lazyzero.container.objects import TensorRef
from lazyzero.errors import InconsistentCheckpoint, InvalidRequest
from lazyzero.layout import moments
from lazyzero.layout.contents import Contents
from lazyzero.layout.found import Found
from lazyzero.layout.order import recover
from lazyzero.layout.states import OptimStates, Shapes
from lazyzero.layout.support import Support
from lazyzero.layout.zero12 import deliver, in_order, model_states
from lazyzero.tensor import Chain, LazyTensor

SUB_PARTITIONS = "local_sub_partitions_of_fp32_groups"
MOMENTS = True

Intervals = list[TensorRef]  # one rank's sub-partitions of one group

SUPPORT = (
    Support(
        "ZeRO-1 in sub-partitions",
        "0.2.0 to 0.3.16",
        "masters, their order recovered through `module`",
        "real files of 0.3.16",
    ),
)


def matches(found: Found) -> bool:
    """Whether the optimizer files are of this layout."""
    return bool(found.files.optim) and SUB_PARTITIONS in found.optimizer.ranks[0].state


def read(found: Found) -> Contents:
    """The contents of such a checkpoint; samples of the 16-bit weights are read to find the order.

    Raises UnsupportedLayout where `module` does not decide it, InconsistentCheckpoint where elements are left over.
    """
    ranks = found.optimizer.ranks
    model = model_states(found)
    masters = _by_group(ranks, [_sub_partitions(rank) for rank in ranks])
    chains = [_chain(ranks, group) for group in masters]
    groups = recover(model, ranks, chains)
    for index, (shapes, chain, group) in enumerate(zip(groups, chains, masters, strict=True)):
        _account(ranks, index, shapes, chain, group)
    if found.state is not None:
        state = found.state
        chains = [
            _chain(ranks, group) for group in _by_group(ranks, [_moments(rank, masters, state) for rank in ranks])
        ]
    trainable: dict[str, LazyTensor] = {}
    for shapes, chain in zip(groups, chains, strict=True):
        trainable.update(in_order(shapes, chain)[0])
    return deliver(found, model, trainable, stage=1)


def _sub_partitions(rank: OptimStates) -> list[Intervals]:
    groups = rank.state.get(SUB_PARTITIONS)
    if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
        raise InconsistentCheckpoint(
            f"{rank.path}: expected lists of tensors in `{SUB_PARTITIONS}`, found {brief(groups)}"
        )
    for group in groups:
        for part in group:
            if not isinstance(part, TensorRef) or len(part.shape) != 1 or not part.contiguous:
                raise InconsistentCheckpoint(
                    f"{rank.path}: `{SUB_PARTITIONS}` holds {brief(part)}, expected 1-D tensors"
                )
    return groups


def _moments(rank: OptimStates, masters: list[list[Intervals]], state: str) -> list[Intervals]:
    """One rank's moments, nested like the masters; torch's own `state_dict` numbers them through."""
    saved = rank.state.get("base_optimizer_state", rank.state.get("optimizer_state_dict"))
    if isinstance(saved, list):
        return [[moments.flat(rank, part, state) for part in group] for group in saved]
    numbered: Any = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(numbered, Mapping):
        raise InvalidRequest(f"{rank.path}: it holds no optimizer state, so no `{state}`")
    parts = iter([moments.flat(rank, part, state) for part in numbered.values()])
    return [[part for _, part in zip(group[0], parts, strict=False)] for group in masters]


def _by_group(ranks: tuple[OptimStates, ...], by_rank: list[list[Intervals]]) -> list[list[Intervals]]:
    """The ranks' sub-partitions, group by group."""
    shapes = {tuple(len(group) for group in groups) for groups in by_rank}
    if len(shapes) != 1:
        raise InconsistentCheckpoint(
            f"{ranks[0].path}: groups or their intervals differ between ranks: {brief(sorted(shapes), 200)}"
        )
    return [list(group) for group in zip(*by_rank, strict=True)]


def _chain(ranks: tuple[OptimStates, ...], group: list[Intervals]) -> Chain:
    """The group's vector: interval by interval, the ranks in turn."""
    parts = [part for interval in zip(*group, strict=True) for part in interval]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise InconsistentCheckpoint(f"{ranks[0].path}: expected sub-partitions of one dtype, found {found}")
    return Chain(parts, dtypes.pop())


def _account(ranks: tuple[OptimStates, ...], index: int, shapes: Shapes, chain: Chain, group: list[Intervals]) -> None:
    """Nothing may be left over, or what fills up equal sub-partitions that could not have been fewer or smaller."""
    needed = in_order(shapes, chain)[1]
    sizes = {part.numel for rank in group for part in rank}
    if chain.total == needed:
        return
    if len(sizes) == 1 and chain.total > needed:
        size, world, intervals = sizes.pop(), len(group), len(group[0])
        share = -(-needed // world)
        if intervals == -(-share // size) and (intervals > 1 or size == share):
            return
    raise InconsistentCheckpoint(
        f"{ranks[0].path}: group {index}: expected {needed} elements of parameters, found {chain.total} over "
        f"{len(group)} ranks and {len(group[0])} intervals; files of different runs, or some ranks are missing"
    )
