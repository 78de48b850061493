"""AutoEP under ZeRO-3 (0.19.3 to 0.19.8): sub-groups of experts are partitioned over fewer ranks than the others.

`ds_zero_partition_groups` in each rank's optimizer file records for every sub-group how many partitions there are and which
of them the rank holds; `ds_autoep_layers` in its model file, whose experts they are. On a rank the parameters follow each
other through the sub-groups as in `zero3`, each cut into the partitions of its own sub-group. There are no experts' files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lazyzero.container.brief import brief
from lazyzero.container.objects import TensorRef
from lazyzero.errors import InconsistentCheckpoint, MissingFiles
from lazyzero.layout import moments, zero3
from lazyzero.layout.autoep import Layer, fuse, layers_of, with_router_names
from lazyzero.layout.concat import Slab, joined
from lazyzero.layout.contents import Contents, assemble
from lazyzero.layout.experts import without_aliases
from lazyzero.layout.found import Found
from lazyzero.layout.ranks import spans
from lazyzero.layout.states import ModelStates, OptimStates, as_int, read_model
from lazyzero.tensor import Chain, LazyTensor, Slice, Striped

KEY = "ds_zero_partition_groups"


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's partition of a parameter: partition `index` of `count`, at `offset` of the rank's chain."""

    shape: tuple[int, ...]
    index: int
    count: int
    chain: Chain
    offset: int


_Parts = dict[str, dict[int, list[_Part]]]  # name -> expert-parallel rank (0 for what is no expert's) -> partitions


def matches(found: Found) -> bool:
    """Whether the ranks' files record partitions of their own for each sub-group."""
    files = found.files
    return (
        bool(files.zero_model and files.optim) and len(files.model_ranks) == 1 and KEY in found.optimizer.ranks[0].state
    )


def read(found: Found) -> Contents:
    """The contents of such a checkpoint; every rank's model file is read, for the names and places of its experts.

    Raises MissingFiles, or InconsistentCheckpoint when a rank's flats are not exactly its partitions.
    """
    optimizer = found.optimizer
    paths = zero3.model_paths(found.files)
    lacking = [rank for rank in range(optimizer.world_size) if rank not in paths]
    if lacking:
        raise MissingFiles(
            f"{found.files.directory}: each rank's model file says which experts it has; none of ranks {spans(lacking)} "
            f"(zero_pp_rank_{lacking[0]}_mp_rank_00_model_states.pt); copy them from the nodes that wrote them"
        )
    models = [read_model(paths[rank]) for rank in range(optimizer.world_size)]
    layers = layers_of(models[0])
    parts: _Parts = {}
    for model, rank in zip(models, optimizer.ranks, strict=True):
        flats = rank.flats(zero3.FLATS) if found.state is None else moments.zero3_flats(rank, found.state)
        for name, expert_rank, part in _parts(model, rank, flats):
            parts.setdefault(name, {}).setdefault(expert_rank, []).append(part)
    of_name = {name: layer for layer in layers for name in layer.names}
    trainable = {name: _whole(models[0].path, name, held, of_name.get(name)) for name, held in parts.items()}
    model = with_router_names(models[0], layers)
    frozen, archives = zero3.frozen_weights(model, paths, optimizer.world_size)
    frozen = {name: tensor for name, tensor in frozen.items() if name not in trainable}
    assembly = assemble(
        without_aliases(model),
        trainable,
        frozen,
        partitioned=True,
        why_missing="ZeRO-3 saved a placeholder for it, its values are in no file",
    )
    return Contents(
        layout="mixture of experts, ZeRO-3",
        stage=3,
        world_size=optimizer.world_size,
        version=model.version,
        entries=assembly.entries,
        missing=assembly.missing,
        warnings=optimizer.warnings,
        archives=(*(m.archive for m in models), *archives, *(rank.archive for rank in optimizer.ranks)),
    )


def _parts(model: ModelStates, rank: OptimStates, flats: list[TensorRef]) -> Iterator[tuple[str, int, _Part]]:
    """Every parameter's partition on one rank. Raises InconsistentCheckpoint where a sub-group does not end with its flat."""
    groups, recorded = model.param_shapes or [], rank.state.get(KEY)
    if not isinstance(recorded, list) or not len(groups) == len(recorded) == len(flats):
        found = len(recorded) if isinstance(recorded, list) else 0
        raise InconsistentCheckpoint(
            f"{rank.path}: expected as many sub-groups in `{KEY}` and the flats as `param_shapes` has, {len(groups)}, "
            f"found {found} and {len(flats)}"
        )
    experts = {name: layer.rank or 0 for layer in layers_of(model) for name in layer.names}
    chain = zero3.one_chain(rank, flats)
    end = 0
    for number, (shapes, group, flat) in enumerate(zip(groups, recorded, flats, strict=True)):
        index, count = (
            (as_int(group.get(key)) for key in ("partition_rank", "partition_count"))
            if isinstance(group, dict)
            else (0, 0)
        )
        if index is None or not count or not 0 <= index < count:
            raise InconsistentCheckpoint(
                f"{rank.path}: sub-group {number}: expected partition numbers, found {brief(group, 120)}"
            )
        at, end = end, end + flat.numel
        for name, shape in shapes.items():
            yield name, experts.get(name, 0), _Part(shape, index, count, chain, at)
            at += -(-math.prod(shape) // count)
        if at != end:
            raise InconsistentCheckpoint(
                f"{rank.path}: sub-group {number}: expected {at - end + flat.numel} elements, found {flat.numel}"
            )


def _whole(path: str, name: str, held: dict[int, list[_Part]], layer: Layer | None) -> LazyTensor:
    if layer is None:
        return _gathered(path, name, held[0])
    ranks = range(len(layer.held))
    empty = [rank for rank in ranks if rank not in held and layer.held[rank]]
    if empty:
        raise InconsistentCheckpoint(
            f"{path}: {name!r}: no rank has the partitions of expert-parallel ranks {spans(empty)}"
        )
    tensors = {rank: _gathered(path, name, parts) for rank, parts in held.items()}
    some = next(iter(tensors.values()))
    none = LazyTensor(name, (0, *some.shape[1:]), some.data, some.role)
    return fuse(layer, name, [tensors.get(rank, none) for rank in ranks])


def _gathered(path: str, name: str, parts: Sequence[_Part]) -> LazyTensor:
    """One expert-parallel rank's tensor, out of its partitions. Raises InconsistentCheckpoint unless each is there once."""
    ordered = sorted(parts, key=lambda part: part.index)
    first = ordered[0]
    if (
        len(ordered) != first.count
        or [part.index for part in ordered] != list(range(first.count))
        or any(part.shape != first.shape for part in ordered)
    ):
        raise InconsistentCheckpoint(
            f"{path}: {name!r}: expected each of {first.count} partitions of {list(first.shape)} once, found "
            f"{brief([part.index for part in ordered], 120)} of {brief([part.shape for part in ordered], 120)}"
        )
    if any(part.chain.dtype != first.chain.dtype for part in ordered):
        raise InconsistentCheckpoint(f"{path}: {name!r}: its partitions have different dtypes")
    numel = math.prod(first.shape)
    size = max(1, -(-numel // first.count))
    if all(part.offset == first.offset for part in ordered):
        data = Striped(tuple(part.chain for part in ordered), first.offset, size)
        return LazyTensor(name, first.shape, data, "trainable")
    slabs = [
        Slab(Slice(part.chain, part.offset), size, 0, max(0, min(size, numel - part.index * size))) for part in ordered
    ]
    flat = joined(name, slabs, (numel,), 0, "trainable")
    return LazyTensor(name, first.shape, flat.data, "trainable")
