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
from lazyzero.container.objects import Storage, TensorRef
from lazyzero.dtypes import DType
from lazyzero.errors import InconsistentCheckpoint, LazyZeroError, MissingFiles, UnsupportedLayout
from lazyzero.layout import moments
from lazyzero.layout.base_model import supply
from lazyzero.layout.contents import Contents, assemble
from lazyzero.layout.discover import FileSet
from lazyzero.layout.found import Found
from lazyzero.layout.ranks import Optimizer, spans
from lazyzero.layout.states import ModelStates, OptimStates, Shapes, as_int, check_once, older, read_model, read_shapes
from lazyzero.layout.support import Support
from lazyzero.tensor import Absent, Chain, Fragments, LazyTensor, Striped

_WHY_MISSING = (
    "ZeRO-3 saved a placeholder for it, its values are in no file of the checkpoint "
    "(DeepSpeed before 0.9.1 saved no frozen weights); the model it was trained from supplies them with --base-model"
)
FLATS = "fp32_flat_groups"
MOMENTS = True

SUPPORT = (
    Support(
        "ZeRO-3, hpZ, MiCS",
        "0.4.3 to 0.19.8",
        "masters; frozen weights (DeepSpeed 0.9.1 on, earlier with `--base-model`); ties; optimizer moments",
        "real files of 16 versions, world 1 to 12",
    ),
)


def matches(found: Found) -> bool:
    """Whether the optimizer files are of this layout."""
    return bool(found.files.optim) and FLATS in found.optimizer.ranks[0].state


def read(found: Found) -> Contents:
    """The contents of a ZeRO-3 checkpoint; metadata only.

    Raises InconsistentCheckpoint when a rank's flats are not exactly its parameters.
    """
    model, groups = sub_groups(found)
    ranks = found.optimizer.ranks
    state = found.state
    return deliver(
        found,
        model,
        groups,
        [rank.flats(FLATS) if state is None else moments.zero3_flats(rank, state) for rank in ranks],
    )


def sub_groups(found: Found) -> tuple[ModelStates, list[Shapes]]:
    """One rank's model file, and the parameters of each sub-group (up to 0.5.3 of all of them together) in order.

    Raises MissingFiles, or UnsupportedLayout where the order is not recorded.
    """
    files, first = found.files, found.optimizer.ranks[0]
    paths = model_paths(files)
    if not paths:
        raise MissingFiles(
            f"{files.directory}: no zero_pp_rank_0_mp_rank_{files.model_ranks[0]:02d}_model_states.pt; it holds the names, "
            "copy it from rank 0's node"
        )
    model = read_model(paths[min(paths)])
    return model, _recorded(model, model.param_shapes or read_shapes(first.path, first.root.get("param_shapes")))


def model_paths(files: FileSet) -> dict[int, str]:
    """The ranks' model files, of one model-parallel rank."""
    first = files.model_ranks[0]
    return {dp: path for (dp, mp), path in files.zero_model.items() if mp == first}


def deliver(
    found: Found, model: ModelStates, groups: list[Shapes], flats: list[list[TensorRef]], more: tuple[Archive, ...] = ()
) -> Contents:
    """The contents, given every rank's flats and the files they are in besides the optimizer's."""
    optimizer = found.optimizer
    shapes: Shapes = {}
    for group in groups:
        check_once(model.path, shapes, group)
        shapes.update(group)
    trainable = _trainable(optimizer, shapes, flats)
    excluded = found.exclude_frozen or found.state is not None  # then the other ranks' model files need not be read
    frozen, archives = ({}, ()) if excluded else frozen_weights(model, model_paths(found.files), optimizer.world_size)
    frozen = {name: tensor for name, tensor in frozen.items() if name not in trainable}
    here = [name for name, tensor in frozen.items() if not isinstance(tensor.data, Absent)]
    base = supply(found, model, shapes, [*trainable, *here])
    assembly = assemble(
        model, trainable, frozen | base.tensors, partitioned=True,
        why_missing=_WHY_MISSING,
    )  # fmt: skip
    return Contents(
        layout="ZeRO-3",
        stage=3,
        world_size=optimizer.world_size,
        version=model.version or optimizer.ranks[0].version,
        entries=assembly.entries,
        missing=assembly.missing,
        warnings=(*optimizer.warnings, *base.warnings),
        archives=(model.archive, *archives, *(rank.archive for rank in optimizer.ranks), *more, *base.archives),
    )


def _recorded(model: ModelStates, groups: list[Shapes] | None) -> list[Shapes]:
    """Before 0.4.3 the recorded order is the module's, not that of the flats, and nothing is left to check it by."""
    if groups is None:
        raise UnsupportedLayout(f"{model.path}: `param_shapes` is in no file; the order of the parameters is unknown")
    if older(model.version, (0, 4, 3)):
        raise UnsupportedLayout(
            f"{model.path}: ZeRO-3 files of DeepSpeed before 0.4.3 (here {model.version or 'older than 0.4'}) do not record "
            "the order of their parameters; load them with that version and save a state dict"
        )
    return groups


def _trainable(optimizer: Optimizer, shapes: Shapes, flats: list[list[TensorRef]]) -> dict[str, LazyTensor]:
    world = optimizer.world_size
    chains = tuple(one_chain(rank, refs) for rank, refs in zip(optimizer.ranks, flats, strict=True))
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


def one_chain(rank: OptimStates, flats: list[TensorRef]) -> Chain:
    """A rank's sub-groups as one vector. Raises InconsistentCheckpoint when their dtypes differ."""
    dtypes = {flat.dtype for flat in flats if flat.numel} or {flat.dtype for flat in flats[:1]}
    if len(dtypes) != 1:
        found = ", ".join(sorted(map(str, dtypes))) or "no group at all"
        raise InconsistentCheckpoint(f"{rank.path}: expected sub-groups of one dtype, found {found}")
    return Chain(flats, dtypes.pop())


def frozen_weights(
    model: ModelStates, paths: dict[int, str], world: int
) -> tuple[dict[str, LazyTensor], list[Archive]]:
    """The frozen parameters, each a piece in every rank's model file; those files are only read when there are any."""
    shapes = {name: shape for name, shape in model.frozen_shapes.items() if name in model.frozen}
    if not shapes:
        return {}, []
    missing = [rank for rank in range(world) if rank not in paths]
    if missing and any(math.prod(shape) for shape in shapes.values()):
        absent = _absent(model, paths, missing, world)
        dtypes = {name: model.frozen[name].dtype for name in shapes}
        return {n: LazyTensor(n, shape, Absent(dtypes[n], absent), "frozen") for n, shape in shapes.items()}, []
    gathered = {name: _Gathered(shape, world, model.frozen[name].dtype) for name, shape in shapes.items()}
    archives: list[Archive] = []
    for rank in sorted(set(range(world)) & set(paths)):
        # One file at a time: what 64 ranks' files say together would fill the memory.
        states = model if paths[rank] == model.path else read_model(paths[rank])
        _agree(model, states)
        for name, fragments in gathered.items():
            fragments.add(states.path, rank, name, states.frozen.get(name))
        if states is not model:
            archives.append(states.archive.bare())
    return {name: fragments.tensor(name) for name, fragments in gathered.items()}, archives


class _Gathered:
    """The fragments of one frozen parameter, rank by rank."""

    __slots__ = ("_dtype", "_offsets", "_part", "_shape", "_storages", "_world")

    def __init__(self, shape: tuple[int, ...], world: int, dtype: DType) -> None:
        self._shape, self._world, self._dtype = shape, world, dtype
        self._part = -(-math.prod(shape) // world)
        self._storages: list[Storage] = []
        self._offsets: list[int] = []

    def add(self, path: str, rank: int, name: str, piece: TensorRef | None) -> None:
        """Takes rank `rank`'s fragment. Raises InconsistentCheckpoint unless it has its share of the elements."""
        if piece is None or piece.numel != self._part or not piece.contiguous or piece.dtype != self._dtype:
            found = "nothing" if piece is None else f"{piece.numel} of {piece.dtype}"
            raise InconsistentCheckpoint(
                f"{path}: frozen {brief(name)}: expected {self._part} elements of {self._dtype} "
                f"from each of {self._world} ranks, rank {rank} has {found}"
            )
        self._storages.append(piece.storage)
        self._offsets.append(piece.offset)

    def tensor(self, name: str) -> LazyTensor:
        """The whole parameter."""
        data = Fragments(tuple(self._storages), tuple(self._offsets), max(self._part, 1), self._dtype)
        return LazyTensor(name, self._shape, data, "frozen")


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


def _absent(model: ModelStates, paths: dict[int, str], missing: list[int], world: int) -> LazyZeroError:
    name = f"zero_pp_rank_{missing[0]}_mp_rank_00_model_states.pt"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return MissingFiles(
        f"{os.path.dirname(model.path)}: frozen parameters need every rank's model file: have {spans(sorted(paths))}; "
        f"need 0-{world - 1}; not found: {name}{more}; copy them here, or leave the frozen ones out with --exclude-frozen"
    )
