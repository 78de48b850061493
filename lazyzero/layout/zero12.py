"""ZeRO-1 and ZeRO-2, and BF16_Optimizer which writes the same without `zero_stage` (0.3.14 to 0.19.8).

Each param group is one flat vector: the parameters in `param_shapes` order, each followed by its alignment padding
(0.19.8), the whole padded at its end and cut into equal partitions. Rank r's flat is partition r, without the tail
padding except in BF16_Optimizer's files, so the ranks' flats in rank order are the vector.
"""

from __future__ import annotations

import math
from collections import deque

from lazyzero.container.brief import brief
from lazyzero.container.objects import TensorRef
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout
from lazyzero.layout.contents import Check, Contents, assemble, view
from lazyzero.layout.found import Found
from lazyzero.layout.ranks import Optimizer
from lazyzero.layout.states import ModelStates, OptimStates, Shapes, as_int, check_once, read_model, read_shapes
from lazyzero.tensor import Chain, LazyTensor, Slice

FLATS = "single_partition_of_fp32_groups"


def matches(found: Found) -> bool:
    """Whether the optimizer files are of this layout."""
    return bool(found.files.optim) and FLATS in found.optimizer.ranks[0].state


def read(found: Found) -> Contents:
    """The contents of a ZeRO-1/2 checkpoint; metadata only.

    Raises InconsistentCheckpoint when an element of a flat is neither a parameter's nor padding.
    """
    files, optimizer = found.files, found.optimizer
    if not files.model:
        raise MissingFiles(
            f"{files.directory}: no mp_rank_00_model_states.pt; it holds the names, copy it from rank 0's node"
        )
    model = read_model(files.model[min(files.model)])
    shapes = model.param_shapes or read_shapes(optimizer.ranks[0].path, optimizer.ranks[0].root.get("param_shapes"))
    if shapes is None:
        raise UnsupportedLayout(
            f"{model.path}: `param_shapes` is in no file, as before DeepSpeed 0.3.14; the order of parameters is unknown"
        )
    chains = _chains(optimizer)
    groups = shapes if len(shapes) == len(chains) else _regroup(model, shapes, chains)
    trainable: dict[str, LazyTensor] = {}
    for index, (group, chain) in enumerate(zip(groups, chains, strict=True)):
        tensors = _group(optimizer.ranks, index, group, chain)
        check_once(model.path, trainable, tensors)
        trainable.update(tensors)
    frozen = {name: view(name, ref, "frozen") for name, ref in model.frozen.items() if name not in trainable}
    assembly = assemble(
        model, trainable, frozen, partitioned=False, why_missing="its values are in no file of the checkpoint"
    )
    stage = optimizer.stage
    return Contents(
        layout=f"ZeRO-{stage}" if stage else "BF16_Optimizer",
        stage=stage if stage is not None else 1,
        world_size=optimizer.world_size,
        version=model.version or optimizer.ranks[0].version,
        entries=assembly.entries,
        missing=assembly.missing,
        warnings=optimizer.warnings,
        checks=tuple(_checks(model, trainable)),
        archives=(model.archive, *(rank.archive for rank in optimizer.ranks)),
    )


def _chains(optimizer: Optimizer) -> list[Chain]:
    """One chain per param group, over the ranks."""
    flats = [rank.flats(FLATS) for rank in optimizer.ranks]
    if len({len(groups) for groups in flats}) != 1:
        counts = ", ".join(f"rank {rank}: {len(groups)}" for rank, groups in enumerate(flats))
        raise InconsistentCheckpoint(f"{optimizer.ranks[0].path}: param groups differ between ranks ({counts:.200})")
    _check_cuts(optimizer.ranks, flats)
    return [_chain(optimizer.ranks[0].path, [groups[index] for groups in flats]) for index in range(len(flats[0]))]


def _check_cuts(ranks: tuple[OptimStates, ...], flats: list[list[TensorRef]]) -> None:
    """The partitions of a group are of one length; where the tail padding is cut off, one is shorter, the rest empty."""
    whole = [flat.numel for flat in flats[0]]
    before = whole
    for rank, groups in zip(ranks, flats, strict=True):
        lengths = [flat.numel for flat in groups]
        for index, (full, last, length) in enumerate(zip(whole, before, lengths, strict=True)):
            if length != full and (length > full or (last < full and length)):
                raise InconsistentCheckpoint(
                    f"{rank.path}: group {index}: expected {full if last == full else 0} elements or fewer, found {length}; "
                    f"rank 0 has {full}; the files are of different runs"
                )
        before = lengths


def _chain(path: str, views: list[TensorRef]) -> Chain:
    dtypes = {flat.dtype for flat in views if flat.numel} or {views[0].dtype}
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise InconsistentCheckpoint(f"{path}: the ranks' flats of one group have different dtypes: {found}")
    return Chain(views, dtypes.pop())


def _group(ranks: tuple[OptimStates, ...], index: int, shapes: Shapes, chain: Chain) -> dict[str, LazyTensor]:
    paddings = _alignment(ranks[0], index, len(shapes))
    tensors: dict[str, LazyTensor] = {}
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        tensors[name] = LazyTensor(name, shape, Slice(chain, at), "trainable")
        at += math.prod(shape) + padding
    _account(ranks, index, needed=at, found=chain.total)
    return tensors


def _alignment(rank: OptimStates, group: int, count: int) -> list[int]:
    """Padding after each parameter, in elements (`parameter_alignment`, 0.19.8); zeros where not recorded."""
    recorded = rank.state.get("param_alignment_paddings")
    if not isinstance(recorded, list) or group >= len(recorded):
        return [0] * count
    paddings = [as_int(padding) for padding in recorded[group]] if isinstance(recorded[group], list) else []
    if len(paddings) != count or any(padding is None or padding < 0 for padding in paddings):
        raise InconsistentCheckpoint(
            f"{rank.path}: group {group} records {len(paddings)} alignment paddings for {count} parameters"
        )
    return [padding or 0 for padding in paddings]


def _account(ranks: tuple[OptimStates, ...], group: int, *, needed: int, found: int) -> None:
    """Every element is a parameter's or tail padding that is recorded, or follows from the version's alignment."""
    tail = found - needed
    if tail == 0:
        return
    recorded = _recorded_padding(ranks, group)
    if recorded is not None and tail == recorded:
        return
    if recorded is None and tail in _unrecorded_tails(needed, len(ranks)):
        return
    told = "none" if not recorded else brief(recorded)
    raise InconsistentCheckpoint(
        f"{ranks[0].path}: group {group}: expected {needed} elements of parameters and {told} of padding, "
        f"found {found} over {len(ranks)} ranks; files of different runs, or names in an order that is not recorded"
    )


def _unrecorded_tails(needed: int, world: int) -> set[int]:
    """The tails a version before 0.7.0 can have left.

    It padded to a multiple of the world (to 0.5.1), of 2 (0.5.2) or of twice the world (0.5.7 on), and cut off when saving
    what a multiple of the world would have needed.
    """
    cut = -needed % world
    padded = {-needed % alignment for alignment in (2, world, 2 * world)}
    return padded | {padding - cut for padding in padded if padding > cut}


def _recorded_padding(ranks: tuple[OptimStates, ...], group: int) -> int | None:
    total = 0
    for rank in ranks:
        recorded = rank.state.get("group_paddings")
        if not isinstance(recorded, list) or group >= len(recorded):
            return None
        padding = as_int(recorded[group])
        if padding is None:
            return None
        total += padding
    return total


def _regroup(model: ModelStates, shapes: list[Shapes], chains: list[Chain]) -> list[Shapes]:
    """Cuts one dict that spans several groups (0.3.14 to 0.5.3) where the flats end."""
    if len(shapes) != 1:
        raise InconsistentCheckpoint(f"{model.path}: names {len(shapes)} param groups, the flats are {len(chains)}")
    rest = deque(shapes[0].items())
    groups: list[Shapes] = []
    for chain in chains:
        group: Shapes = {}
        left = chain.total
        while rest and math.prod(rest[0][1]) <= left:
            name, shape = rest.popleft()
            group[name] = shape
            left -= math.prod(shape)
        groups.append(group)
    if rest:
        raise InconsistentCheckpoint(
            f"{model.path}: expected the {len(shapes[0])} parameters of `param_shapes` to fill {len(chains)} flat groups, "
            f"{len(rest)} are left over ({brief(rest[0][0])} first); this version recorded them in another order"
        )
    return groups


def _checks(model: ModelStates, trainable: dict[str, LazyTensor]) -> list[Check]:
    checks = []
    for name, tensor in trainable.items():
        ref = model.module.get(name)
        if ref is not None and ref.shape == tensor.shape:
            checks.append(Check(tensor, view(name, ref, "module")))
        elif ref is not None:
            raise InconsistentCheckpoint(
                f"{model.path}: {brief(name)} has shape {list(tensor.shape)} in `param_shapes` and {list(ref.shape)} in `module`"
            )
    return checks
