"""How the shards of tensor-parallel ranks make one tensor: plans over shapes alone, without files or values.

Every way DeepSpeed splits a parameter is slabs along one dimension: indices [start, start + size) of a rank's shard, one
after the other. Each function raises InconsistentCheckpoint, its message beginning with `where`, when shards do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lazyzero.container.brief import brief
from lazyzero.errors import InconsistentCheckpoint, UnsupportedLayout

_MOST_SUB_PARAMETERS = 1 << 12
_MOST_DIMENSIONS = 64

Shape = tuple[int, ...]
Shapes = Sequence[Shape | None]  # by rank; None where a rank has no such parameter


@dataclass(frozen=True, slots=True)
class Cut:
    """Indices [start, start + size) along the dimension of a rank's shard."""

    rank: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The full `shape`, and what it is made of along `dim`; `averaged` takes the mean of whole copies instead.

    Where a dimension is several blocks that are split each by itself, `blocks` counts them, and the cuts are of each block.
    """

    shape: Shape
    dim: int
    cuts: tuple[Cut, ...]
    averaged: bool = False
    blocks: int = 1


def replicated(where: str, shapes: Shapes) -> Plan:
    """Every rank has all of it; the first rank's copy is taken."""
    first = next((rank for rank, shape in enumerate(shapes) if shape is not None), 0)
    shape = shapes[first]
    if shape is None or any(other not in (None, shape) for other in shapes):
        raise InconsistentCheckpoint(f"{where}: expected the same shape on all ranks, found {_listed(shapes)}")
    return Plan(shape, 0, (Cut(first, 0, shape[0] if shape else 1),))


def averaged(where: str, shapes: Shapes) -> Plan:
    """Every rank has a copy of its own, and the mean is meant."""
    plan = replicated(where, shapes)
    if any(shape is None for shape in shapes):
        raise InconsistentCheckpoint(f"{where}: expected a copy on each rank to average, found {_listed(shapes)}")
    size = plan.cuts[0].size
    return Plan(plan.shape, 0, tuple(Cut(rank, 0, size) for rank in range(len(shapes))), averaged=True)


def split(where: str, shapes: Shapes, dim: int, *, gaps: bool = False) -> Plan:
    """Shards one after the other along `dim`, of any widths; with `gaps` a rank may have none."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) and not gaps:
        raise InconsistentCheckpoint(f"{where}: expected a shard on each rank, found {_listed(shapes)}")
    if not known or any(len(shape) <= dim for shape in known):
        raise InconsistentCheckpoint(f"{where}: has no dimension {dim} to join shards along: {_listed(shapes)}")
    if len({(shape[:dim], shape[dim + 1 :]) for shape in known}) != 1:
        raise InconsistentCheckpoint(
            f"{where}: expected shards that differ in dimension {dim} only, found {_listed(shapes)}"
        )
    cuts = tuple(Cut(rank, 0, shape[dim]) for rank, shape in enumerate(shapes) if shape is not None)
    return Plan(_widened(known[0], dim, sum(cut.size for cut in cuts)), dim, cuts)


def trimmed(plan: Plan, rows: int) -> Plan:
    """Without the padding of a vocabulary: rows [0, rows) of the result are kept."""
    return replace(plan, shape=(min(rows, plan.shape[0]), *plan.shape[1:])) if plan.shape else plan


def halves(where: str, shapes: Shapes) -> Plan:
    """Two sub-parameters along dimension 0, each rank's shard being its half of the one and its half of the other."""
    plan = split(where, shapes, 0)
    extents = {cut.rank: cut.size for cut in plan.cuts}
    first = [-(-extents.get(rank, 0) // 2) for rank in range(len(shapes))]
    second = [extents.get(rank, 0) - first[rank] for rank in range(len(shapes))]
    return _interleaved(plan, [first, second])


def sub_parameters(where: str, shapes: Shapes, view: Sequence[Any], dim: int, widths: Any = None) -> Plan:
    """Several sub-parameters along a dimension, each split over the ranks by itself.

    `view` is the recorded shape of the whole with its partitioned dimension at `dim`: there it has the sub-parameters'
    sizes, or (before universal checkpoint version 0.4) their number. `widths` are each sub-parameter's sizes by rank;
    without them all are split evenly.
    """
    if not 0 <= dim < len(view) <= _MOST_DIMENSIONS:
        raise InconsistentCheckpoint(f"{where}: sub-parameters lie along dimension {dim} of {brief(list(view))}")
    if widths is not None:
        table = _table(where, widths, len(shapes))
    elif isinstance(view[dim], (list, tuple)):
        table = _even(where, view[dim], sum(n for n in view[dim] if type(n) is int), len(shapes))
    else:
        if any(shape is None or len(shape) != len(view) for shape in shapes):
            raise UnsupportedLayout(
                f"{where}: the sizes of its sub-parameters are not recorded, and its shards {_listed(shapes)} are viewed as "
                f"{brief(list(view))}; state the dimension with --tp-rules"
            )
        table = _even(where, view[dim], split(where, shapes, dim).shape[dim], len(shapes))
    return _interleaved(
        located(where, shapes, view, dim, [sum(row[rank] for row in table) for rank in range(len(shapes))]), table
    )


def located(where: str, shapes: Shapes, view: Sequence[Any], dim: int, widths: Sequence[int]) -> Plan:
    """Shards one after the other along dimension `dim` of a view of the whole, where each rank has so many indices of it.

    The shards may have another number of dimensions: the view's is then a block of one of theirs. Other numbers in
    `view` than 1 and above are passed over.
    """
    known = {rank: shape for rank, shape in enumerate(shapes) if shape is not None}
    places = []
    for at in range(max((len(shape) for shape in known.values()), default=0)):
        blocks = {shape[at] // widths[rank] for rank, shape in known.items() if at < len(shape) and widths[rank]}
        exact = all(
            at < len(shape) and shape[at] == max(blocks, default=0) * widths[rank] for rank, shape in known.items()
        )
        if len(blocks) == 1 and exact and _fits(view, dim, next(iter(known.values())), at, max(blocks)):
            places.append((at, max(blocks)))
    places = [place for place in places if place == (dim, 1)] or places
    if not places or any(widths[rank] for rank in range(len(shapes)) if rank not in known):
        raise InconsistentCheckpoint(
            f"{where}: recorded widths by rank {list(widths)} of dimension {dim} of {brief(list(view))} do not add up to the shards "
            f"{_listed(shapes)}"
        )
    at, count = places[0]
    plan = split(where, shapes, at, gaps=True)
    cuts = tuple(Cut(rank, 0, width) for rank, width in enumerate(widths) if rank in known)
    return replace(plan, shape=_widened(plan.shape, at, count * sum(widths)), cuts=cuts, blocks=count)


def _fits(view: Sequence[Any], dim: int, shard: Shape, at: int, blocks: int) -> bool:
    """Whether what the view says of the elements before and after its dimension is so in the shard."""
    sides = ((view[:dim], math.prod(shard[:at]) * blocks), (view[dim + 1 :], math.prod(shard[at + 1 :])))
    return all(
        math.prod(side) == numel for side, numel in sides if all(type(size) is int and size > 0 for size in side)
    )


def _table(where: str, widths: Any, ranks: int) -> list[list[int]]:
    rows: Sequence[Any] = widths if isinstance(widths, (list, tuple)) and widths else (None,)
    if not all(
        isinstance(row, (list, tuple)) and all(type(n) is int and n >= 0 for n in row) and len(row) == ranks
        for row in rows
    ):
        raise InconsistentCheckpoint(f"{where}: expected widths by sub-parameter and rank, found {brief(widths)}")
    return [list(row) for row in rows]


def _even(where: str, spec: Any, total: int, ranks: int) -> list[list[int]]:
    """Equal shares of each sub-parameter: `spec` has the sizes, or one number, which is their count or the whole size."""
    sizes = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise InconsistentCheckpoint(f"{where}: expected sizes of sub-parameters or their number, found {brief(spec)}")
    if not isinstance(spec, (list, tuple)) and spec != total:
        sizes = [total // spec] * spec if total % spec == 0 and spec <= _MOST_SUB_PARAMETERS else []
    if sum(sizes) != total:
        raise InconsistentCheckpoint(f"{where}: sub-parameters {brief(spec)} do not add up to the {total} of all ranks")
    if any(size % ranks for size in sizes):
        raise UnsupportedLayout(
            f"{where}: sub-parameters of {sizes} cannot be split evenly over {ranks} ranks, and their widths by rank are "
            "not recorded (DeepSpeed does from 0.19.6 on)"
        )
    return [[size // ranks] * ranks for size in sizes]


def _interleaved(plan: Plan, table: Sequence[Sequence[int]]) -> Plan:
    """The plan with sub-parameter after sub-parameter, each over the ranks; `table` has the widths."""
    starts = [0] * len(table[0])
    cuts = []
    for row in table:
        for rank, size in enumerate(row):
            cuts.append(Cut(rank, starts[rank], size))
            starts[rank] += size
    return replace(plan, cuts=tuple(cut for cut in cuts if cut.size) or tuple(cuts[:1]))


def _widened(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _listed(shapes: Shapes) -> str:
    return ", ".join("none" if shape is None else str(list(shape)) for shape in shapes)[:200]
