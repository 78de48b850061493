"""AutoTP's affine maps (DeepSpeed 0.19.7 on): every parameter's blocks, where they lie in it and in which rank's shard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from lazyzero.container.brief import brief
from lazyzero.errors import InconsistentCheckpoint, UnsupportedLayout
from lazyzero.layout import tp_plan
from lazyzero.layout.states import is_shape
from lazyzero.layout.tp_plan import Cut, Plan, Shape, Shapes


def plan_of_map(where: str, shapes: Shapes, entry: Mapping[str, Any]) -> Plan:
    """As an affine map records it (DeepSpeed 0.19.7 on): boxes of the whole tensor and where they stand in each shard.

    The boxes DeepSpeed makes are whole in all dimensions but one. Of what several ranks hold, the first copy is taken.
    """
    try:
        whole = _shape(entry["logical_shape"])
        boxes = [box for rank, held in entry["ranks"].items() for box in _boxes(whole, rank, held, shapes)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise UnsupportedLayout(
            f"{where}: its affine map is none of the kind DeepSpeed 0.19.8 writes ({str(error)[:120] or type(error).__name__}); "
            "state the dimension with --tp-rules"
        ) from None
    dims = {dim for box in boxes for dim in range(len(whole)) if not box.shape[dim] == box.shard[dim] == whole[dim]}
    if len(dims) > 1:
        raise UnsupportedLayout(f"{where}: its affine map cuts dimensions {sorted(dims)}, at most one can be joined")
    if not whole or not boxes:
        return tp_plan.replicated(where, shapes) if 0 not in whole else Plan(whole, 0, (Cut(0, 0, 0),))
    dim = dims.pop() if dims else 0
    spans = sorted((box.start[dim], box.shape[dim], box.rank, box.inside[dim]) for box in boxes)
    cuts, at = [], 0
    for start, size, rank, inside in spans:
        if start > at:
            break
        if start + size > at:
            cuts.append(Cut(rank, inside + at - start, start + size - at))
            at = start + size
    if at != whole[dim]:
        raise InconsistentCheckpoint(f"{where}: no rank holds indices {at} and on of {whole[dim]} in dimension {dim}")
    held = {box.rank: box.shard[dim] for box in boxes}
    plan = tp_plan.located(where, shapes, whole, dim, [held.get(rank, 0) for rank in range(len(shapes))])
    size = plan.blocks * whole[dim]
    return replace(plan, shape=(*plan.shape[: plan.dim], size, *plan.shape[plan.dim + 1 :]), cuts=tuple(cuts))


@dataclass(frozen=True, slots=True)
class _Box:
    """A block of the whole that begins at index `start` there and at `inside` in a rank's `shard`."""

    shape: Shape
    start: Shape
    inside: Shape
    shard: Shape
    rank: int


def _boxes(whole: Shape, rank: Any, held: Mapping[str, Any], shapes: Shapes) -> list[_Box]:
    shard = _shape(held["shard_shape"])
    if type(rank) is not int or not 0 <= rank < len(shapes):
        raise ValueError(f"rank {brief(rank, 20)} of {len(shapes)}")
    real = shapes[rank]
    if math.prod(shard) != (0 if real is None else math.prod(real)):
        raise ValueError(f"rank {rank} has {real}, recorded is {shard}")
    boxes: list[_Box] = []
    for piece in held["pieces"]:
        shape = _shape(piece["shape"])
        if piece.get("scale", 1.0) != 1.0:
            raise ValueError(f"scaled by {brief(piece['scale'], 20)}")
        if 0 not in shape:
            corners = _corner(whole, shape, piece["source"]), _corner(shard, shape, piece["dest"])
            boxes.append(_Box(shape, *corners, shard, rank))
    if sum(math.prod(box.shape) for box in boxes) != math.prod(shard):
        raise ValueError(f"its boxes are not the shard {shard} of rank {rank}")
    return boxes


def _corner(array: Shape, box: Shape, place: Any) -> Shape:
    """The first index of a box in a row-major array, out of its offset and strides."""
    offset, strides = place
    if type(offset) is not int:
        raise ValueError(f"offset {brief(offset, 40)}")
    rows = [*accumulate(reversed(array[1:]), lambda a, b: a * b, initial=1)][::-1] if array else []
    if len(box) != len(array) or any(
        size > 1 and got != want for size, got, want in zip(box, strides, rows, strict=True)
    ):
        raise ValueError(f"strides {brief(strides, 40)} in {array}")
    corner = []
    for row in rows:
        index, offset = divmod(offset, row)
        corner.append(index)
    if any(not 0 <= index <= extent - size for index, size, extent in zip(corner, box, array, strict=True)):
        raise ValueError(f"box {box} at {corner} in {array}")
    return tuple(corner)


def _shape(value: Any) -> Shape:
    if not is_shape(value):
        raise ValueError(f"shape {brief(value, 40)}")
    return tuple(value)
