"""ZeRO-1 and ZeRO-2, and BF16_Optimizer which writes the same without `zero_stage` (0.3.14 to 0.19.8).

Each param group is one flat vector: the parameters in `param_shapes` order, each followed by its alignment padding
(0.19.8), the whole padded at its end and cut into equal partitions. Rank r's flat is partition r, without the tail
padding except in BF16_Optimizer's files, so the ranks' flats in rank order are the vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat

from lazyzero.container.brief import brief
from lazyzero.container.objects import TensorRef
from lazyzero.errors import InconsistentCheckpoint, MissingFiles
from lazyzero.layout import moments
from lazyzero.layout.contents import Check, Contents, assemble, view
from lazyzero.layout.found import Found
from lazyzero.layout.order import param_groups
from lazyzero.layout.ranks import Optimizer
from lazyzero.layout.states import ModelStates, OptimStates, Shapes, as_int, check_once, read_model
from lazyzero.layout.support import Support
from lazyzero.tensor import Chain, LazyTensor, Slice

FLATS = "single_partition_of_fp32_groups"
MOMENTS = True

SUPPORT = (
    Support(
        "ZeRO-1, ZeRO-2",
        "0.3.14 to 0.19.8",
        "masters in fp32, fp16 or bf16; frozen weights; ties; alignment paddings; optimizer moments",
        "real files of 17 versions, world 1 to 8",
    ),
    Support(
        "BF16_Optimizer",
        "0.6.2 to 0.19.8",
        "the same, without a recorded stage",
        "real files of 0.19.8",
    ),
)


def matches(found: Found) -> bool:
    """Whether the optimizer files are of this layout."""
    return bool(found.files.optim) and FLATS in found.optimizer.ranks[0].state


def read(found: Found) -> Contents:
    """The contents of a ZeRO-1/2 checkpoint; metadata only.

    Raises InconsistentCheckpoint when an element of a flat is neither a parameter's nor padding.
    """
    model = model_states(found)
    trainable = parameters(found.optimizer, model, found.state)
    return deliver(found, model, trainable, stage=found.optimizer.stage)


def parameters(optimizer: Optimizer, model: ModelStates, state: str | None = None) -> dict[str, LazyTensor]:
    """The optimizer's parameters, or their moments `state`, in the order of the flats. Raises InconsistentCheckpoint."""
    masters = chains(optimizer, [rank.flats(FLATS) for rank in optimizer.ranks])
    groups = param_groups(model, optimizer.ranks, masters)
    stored = masters
    if state is not None:
        stored = chains(optimizer, [moments.zero12_flats(rank, state) for rank in optimizer.ranks])
    if len(stored) != len(groups):
        raise InconsistentCheckpoint(
            f"{optimizer.ranks[0].path}: expected `{state}` of {len(groups)} groups, found {len(stored)}"
        )
    trainable: dict[str, LazyTensor] = {}
    for index, (group, chain) in enumerate(zip(groups, stored, strict=True)):
        tensors = read_group(optimizer.ranks, index, group, chain)
        check_once(model.path, trainable, tensors)
        trainable.update(tensors)
    return trainable


def model_states(found: Found) -> ModelStates:
    """The model file. Raises MissingFiles."""
    if not found.files.model:
        raise MissingFiles(
            f"{found.files.directory}: no mp_rank_{min(found.files.model_ranks, default=0):02d}_model_states.pt; it holds the names, "
            "copy it from rank 0's node"
        )
    return read_model(found.files.model[min(found.files.model)])


def deliver(found: Found, model: ModelStates, trainable: dict[str, LazyTensor], *, stage: int | None) -> Contents:
    """The contents, once the optimizer's parameters have been found; `stage` is None for BF16_Optimizer."""
    optimizer = found.optimizer
    frozen = {name: view(name, ref, "frozen") for name, ref in model.frozen.items() if name not in trainable}
    assembly = assemble(
        model, trainable, frozen, partitioned=False, why_missing="its values are in no file of the checkpoint"
    )
    return Contents(
        layout=f"ZeRO-{stage}" if stage else "BF16_Optimizer",
        stage=stage if stage is not None else 1,
        world_size=optimizer.world_size,
        version=model.version or optimizer.ranks[0].version,
        entries=assembly.entries,
        missing=assembly.missing,
        warnings=optimizer.warnings,
        checks=tuple(module_checks(model, trainable)),
        archives=(model.archive, *(rank.archive for rank in optimizer.ranks)),
    )


def chains(optimizer: Optimizer, flats: list[list[TensorRef]]) -> list[Chain]:
    """One chain per param group over the ranks, out of each rank's flats. Raises InconsistentCheckpoint."""
    if len({len(groups) for groups in flats}) != 1:
        counts = ", ".join(f"rank {rank}: {len(groups)}" for rank, groups in enumerate(flats))
        raise InconsistentCheckpoint(f"{optimizer.ranks[0].path}: param groups differ between ranks ({counts:.200})")
    _check_cuts(optimizer.ranks, flats)
    return [one_chain(optimizer.ranks[0].path, [groups[index] for groups in flats]) for index in range(len(flats[0]))]


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


def one_chain(path: str, views: list[TensorRef]) -> Chain:
    """One group's flats as one vector. Raises InconsistentCheckpoint when their dtypes differ."""
    dtypes = {flat.dtype for flat in views if flat.numel} or {views[0].dtype}
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise InconsistentCheckpoint(f"{path}: the ranks' flats of one group have different dtypes: {found}")
    return Chain(views, dtypes.pop())


def read_group(ranks: tuple[OptimStates, ...], index: int, shapes: Shapes, chain: Chain) -> dict[str, LazyTensor]:
    """The parameters of group `index`, whose partitions the ranks hold one after the other; every element accounted for."""
    tensors, needed = in_order(shapes, chain, _alignment(ranks[0], index, len(shapes)))
    _account(ranks, index, needed=needed, found=chain.total)
    return tensors


def in_order(shapes: Shapes, chain: Chain, paddings: Iterable[int] = repeat(0)) -> tuple[dict[str, LazyTensor], int]:
    """The parameters one after the other, each followed by its padding in elements, and where the last padding ends."""
    tensors: dict[str, LazyTensor] = {}
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=False):
        tensors[name] = LazyTensor(name, shape, Slice(chain, at), "trainable")
        at += math.prod(shape) + padding
    return tensors, at


def _alignment(rank: OptimStates, group: int, count: int) -> list[int]:
    """Padding after each parameter, in elements (`parameter_alignment`, 0.19.8); zeros where not recorded."""
    recorded = rank.state.get("param_alignment_paddings")
    if not isinstance(recorded, list) or group >= len(recorded):
        return [0] * count
    listed = recorded[group] if isinstance(recorded[group], list) else []
    paddings = [as_int(padding) for padding in listed] if len(listed) == count else []
    if len(listed) != count or any(padding is None or padding < 0 for padding in paddings):
        raise InconsistentCheckpoint(
            f"{rank.path}: group {group} records {len(listed)} alignment paddings for {count} parameters"
        )
    return [padding or 0 for padding in paddings]


def _account(ranks: tuple[OptimStates, ...], group: int, *, needed: int, found: int) -> None:
    """Every element is a parameter's or tail padding that is recorded, or follows from the version's alignment."""
    recorded = _recorded_padding(ranks, group)
    if recorded is not None:
        tails = _tails(needed, len(ranks), recorded, recorded)
    else:
        tails = _unrecorded_tails(needed, len(ranks))
    if found - needed in tails | {0}:
        return
    told = "none" if not recorded else brief(recorded)
    raise InconsistentCheckpoint(
        f"{ranks[0].path}: group {group}: expected {needed} elements of parameters and {told} of padding, "
        f"found {found} over {len(ranks)} ranks; files of different runs, or names in an order that is not recorded"
    )


def _tails(needed: int, world: int, padding: int, cut: int) -> set[int]:
    """What can stand behind the last parameter: the padding, whole or less what saving takes off the last partition.

    It is cut as `partition[:size - cut]`: padding that reaches into other partitions stays, and a negative end counts
    from behind.
    """
    part = (needed + padding) // world
    kept = len(range(part)[: part - cut])
    return {padding, padding - (part - kept)}


def _unrecorded_tails(needed: int, world: int) -> set[int]:
    """The tails a version before 0.7.0 can have left.

    It padded to a multiple of the world (to 0.5.1), of 2 (0.5.2) or of twice the world (0.5.7 on), and cut off when saving
    what a multiple of the world would have needed.
    """
    cut = -needed % world
    padded = {-needed % alignment for alignment in (2, world, 2 * world)}
    return {tail for padding in padded for tail in _tails(needed, world, padding, cut)}


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


def module_checks(model: ModelStates, trainable: dict[str, LazyTensor]) -> list[Check]:
    """Each parameter with its copy in `module`. Raises InconsistentCheckpoint where their shapes differ."""
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
