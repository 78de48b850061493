"""ZeRO-3 (0.3.0 to 0.19.8), hpZ and MiCS, whose shard group is smaller than the data-parallel world.

Each parameter is cut on its own: with p = ceil(numel / world), rank r holds elements [r * p, (r + 1) * p), padded at the
end. On a rank the parameters follow each other in `param_shapes` order through the list of sub-groups. Frozen
parameters are cut alike but saved one by one in every rank's model file.
"""

from __future__ import annotations

import math
import os

from lazyzero.container.archive import Archive
from lazyzero.container.brief import brief
from lazyzero.container.objects import TensorRef
from lazyzero.errors import InconsistentCheckpoint, LazyZeroError, MissingFiles, UnsupportedLayout
from lazyzero.layout.contents import Contents, assemble
from lazyzero.layout.found import Found
from lazyzero.layout.ranks import Optimizer, spans
from lazyzero.layout.states import ModelStates, OptimStates, Shapes, as_int, check_once, read_model, read_shapes
from lazyzero.tensor import Absent, Chain, LazyTensor, Striped

FLATS = "fp32_flat_groups"


def matches(found: Found) -> bool:
    """Whether the optimizer files are of this layout."""
    return bool(found.files.optim) and FLATS in found.optimizer.ranks[0].state


def read(found: Found) -> Contents:
    """The contents of a ZeRO-3 checkpoint; metadata only.

    Raises InconsistentCheckpoint when a rank's flats are not exactly its parameters.
    """
    files, optimizer = found.files, found.optimizer
    paths = {dp: path for (dp, mp), path in files.zero_model.items() if mp == 0}
    if not paths:
        raise MissingFiles(
            f"{files.directory}: no zero_pp_rank_0_mp_rank_00_model_states.pt; it holds the names, copy it from rank 0's node"
        )
    model = read_model(paths[min(paths)])
    groups = model.param_shapes or read_shapes(optimizer.ranks[0].path, optimizer.ranks[0].root.get("param_shapes"))
    _refuse_early(model, groups)
    shapes: Shapes = {}
    for group in groups or ():
        check_once(model.path, shapes, group)
        shapes.update(group)
    trainable = _trainable(optimizer, shapes)
    frozen, archives = _frozen(model, paths, optimizer.world_size)
    frozen = {name: tensor for name, tensor in frozen.items() if name not in trainable}
    assembly = assemble(
        model, trainable, frozen, partitioned=True,
        why_missing="ZeRO-3 saved a placeholder for it, its values are in no file of the checkpoint",
    )  # fmt: skip
    return Contents(
        layout="ZeRO-3",
        stage=3,
        world_size=optimizer.world_size,
        version=model.version or optimizer.ranks[0].version,
        entries=assembly.entries,
        missing=assembly.missing,
        warnings=optimizer.warnings,
        archives=(model.archive, *archives, *(rank.archive for rank in optimizer.ranks)),
    )


def _refuse_early(model: ModelStates, groups: list[Shapes] | None) -> None:
    """Before 0.4 the recorded order is the module's, not that of the flats, and nothing is left to check it by."""
    if groups is None:
        raise UnsupportedLayout(f"{model.path}: `param_shapes` is in no file; the order of the parameters is unknown")
    if model.version is None or model.version.startswith(("0.3.", "0.4.0", "0.4.1", "0.4.2", "0.4.3")):
        raise UnsupportedLayout(
            f"{model.path}: ZeRO-3 files of DeepSpeed before 0.4.4 (here {model.version or 'older than 0.4'}) do not record "
            "the order of their parameters; load them with that version and save a state dict"
        )


def _trainable(optimizer: Optimizer, shapes: Shapes) -> dict[str, LazyTensor]:
    world = optimizer.world_size
    chains = tuple(_chain(rank) for rank in optimizer.ranks)
    tensors: dict[str, LazyTensor] = {}
    at = 0
    for name, shape in shapes.items():
        part = -(-math.prod(shape) // world)
        tensors[name] = LazyTensor(name, shape, Striped(chains, at, max(part, 1)), "trainable")
        at += part
    for rank, chain in zip(optimizer.ranks, chains, strict=True):
        if chain.total != at:
            raise InconsistentCheckpoint(
                f"{rank.path}: expected {at} elements in its flat groups ({len(shapes)} parameters over {world} ranks), "
                f"found {chain.total}; files of different runs, or some ranks are missing"
            )
        if chain.dtype != chains[0].dtype:
            raise InconsistentCheckpoint(f"{rank.path}: flats are {chain.dtype}, rank 0's are {chains[0].dtype}")
    return tensors


def _chain(rank: OptimStates) -> Chain:
    flats = rank.flats(FLATS)
    dtypes = {flat.dtype for flat in flats if flat.numel} or {flat.dtype for flat in flats[:1]}
    if len(dtypes) != 1:
        found = ", ".join(sorted(map(str, dtypes))) or "no group at all"
        raise InconsistentCheckpoint(f"{rank.path}: expected sub-groups of one dtype, found {found}")
    return Chain(flats, dtypes.pop())


def _frozen(model: ModelStates, paths: dict[int, str], world: int) -> tuple[dict[str, LazyTensor], list[Archive]]:
    """The frozen parameters, each a piece in every rank's model file; those files are only read when there are any."""
    shapes = {name: shape for name, shape in model.frozen_shapes.items() if name in model.frozen}
    if not shapes:
        return {}, []
    missing = [rank for rank in range(world) if rank not in paths]
    if missing and any(math.prod(shape) for shape in shapes.values()):
        absent = _absent(model, paths, missing, world)
        dtypes = {name: model.frozen[name].dtype for name in shapes}
        return {n: LazyTensor(n, shape, Absent(dtypes[n], absent), "frozen") for n, shape in shapes.items()}, []
    fragments = [model.frozen]
    archives: list[Archive] = []
    for rank in sorted(set(range(world)) & set(paths)):
        if paths[rank] != model.path:
            other = read_model(paths[rank])
            _agree(model, other)
            fragments.append({name: ref for name, ref in other.frozen.items() if name in shapes})
            archives.append(other.archive)
    return {name: _fragments(model, name, shape, fragments, world) for name, shape in shapes.items()}, archives


def _agree(model: ModelStates, other: ModelStates) -> None:
    """Frozen fragments of two saves must not be mixed."""
    for what, expected, found in (
        ("ds_version", model.version, other.version),
        ("global_steps", as_int(model.root.get("global_steps")), as_int(other.root.get("global_steps"))),
    ):
        if found != expected:
            raise InconsistentCheckpoint(
                f"{other.path}: has {what} {found}, {os.path.basename(model.path)} has {expected}; "
                "the files are of different runs"
            )


def _fragments(
    model: ModelStates, name: str, shape: tuple[int, ...], ranks: list[dict[str, TensorRef]], world: int
) -> LazyTensor:
    part = -(-math.prod(shape) // world)
    chains = []
    for rank, fragments in enumerate(ranks):
        piece = fragments.get(name)
        if piece is None or piece.numel != part or not piece.contiguous or piece.dtype != model.frozen[name].dtype:
            found = "nothing" if piece is None else f"{piece.numel} of {piece.dtype}"
            raise InconsistentCheckpoint(
                f"{model.path}: frozen {brief(name)}: expected {part} elements from each of {world} ranks, rank {rank} has {found}"
            )
        chains.append(Chain([piece], piece.dtype))
    return LazyTensor(name, shape, Striped(tuple(chains), 0, max(part, 1)), "frozen")


def _absent(model: ModelStates, paths: dict[int, str], missing: list[int], world: int) -> LazyZeroError:
    name = f"zero_pp_rank_{missing[0]}_mp_rank_00_model_states.pt"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return MissingFiles(
        f"{os.path.dirname(model.path)}: frozen parameters need every rank's model file: have {spans(sorted(paths))}; "
        f"need 0-{world - 1}; not found: {name}{more}; copy them here, or leave the frozen ones out with --exclude-frozen"
    )
