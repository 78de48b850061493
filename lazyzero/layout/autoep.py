"""AutoEP (DeepSpeed 0.19.2 to 0.19.8): the experts of a layer are one parameter `<experts>.w1` of all of them, [experts, ...].

`ds_autoep_layers` says which: each expert-parallel rank holds the experts of its own, in the order that
`expert_placement` records (0.19.3 on; before, and where it is absent, an equal run of them by rank).

Stages 0 to 2 save them as deepspeed.moe's (see `experts`), with a file of 16-bit weights for each expert, keyed
`<experts>.w1.<number>`; stage 3 as `autoep_zero3` describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lazyzero.container.brief import brief
from lazyzero.errors import InconsistentCheckpoint, UnsupportedLayout
from lazyzero.layout import zero0
from lazyzero.layout.concat import Slab, joined
from lazyzero.layout.contents import view
from lazyzero.layout.experts import ExpertFiles
from lazyzero.layout.states import ModelStates, Shapes, as_int, check_name
from lazyzero.tensor import LazyTensor

KEY = "ds_autoep_layers"
_MOST_EXPERTS = 1 << 16  # of a layer
_MOST_IN_ALL = 1 << 20
_MOST_COMPARED = 20_000_000  # layers times names
WEIGHTS = ("w1", "w2", "w3")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's experts, as the model file at `path` says: `held` has the global numbers of the experts on each expert-parallel rank, in their order."""

    path: str
    module: str
    prefix: str
    count: int
    held: tuple[tuple[int, ...], ...]
    rank: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """Its fused parameters."""
        return tuple(f"{self.prefix}.{weight}" for weight in WEIGHTS)

    def places(self) -> list[tuple[int, int]]:
        """(expert-parallel rank, index there) of each expert in order; the first rank's copy where several have one."""
        first: dict[int, tuple[int, int]] = {}
        for rank, experts in enumerate(self.held):
            for index, expert in enumerate(experts):
                first.setdefault(expert, (rank, index))
        return [first[expert] for expert in range(self.count)]


def layers_of(model: ModelStates) -> list[Layer]:
    """The layers that AutoEP replaced, none for other checkpoints. Raises InconsistentCheckpoint or UnsupportedLayout."""
    recorded = model.root.get(KEY) or model.root.get("autoep_layers")
    if not recorded:
        return []
    if "folding" in model.root:
        raise UnsupportedLayout(
            f"{model.path}: experts folded over tensor-parallel ranks (AutoEP with AutoTP), which DeepSpeed itself cannot join "
            "either; train on from it without tensor parallelism and save again"
        )
    if not isinstance(recorded, list):
        raise InconsistentCheckpoint(f"{model.path}: expected a list of layers in `{KEY}`, found {brief(recorded)}")
    counts = [as_int(entry.get("num_experts")) or 0 for entry in recorded if isinstance(entry, dict)]
    if (
        sum(count for count in counts if 0 < count <= _MOST_EXPERTS) > _MOST_IN_ALL
        or len(recorded) * len(model.module) > _MOST_COMPARED
    ):
        raise InconsistentCheckpoint(
            f"{model.path}: `{KEY}` has {len(recorded)} layers of {sum(counts)} experts, more than any model; the file is damaged"
        )
    return [_layer(model.path, entry) for entry in recorded]


def _layer(path: str, entry: Any) -> Layer:
    fields = entry if isinstance(entry, dict) else {}
    prefix, count, size = (
        fields.get("expert_key_prefix"),
        as_int(fields.get("num_experts")),
        as_int(fields.get("ep_size")),
    )
    if count is None or size is None or not 0 < size <= count <= _MOST_EXPERTS:
        raise InconsistentCheckpoint(
            f"{path}: `{KEY}` has a layer without numbers of experts and ranks: {brief(entry, 120)}"
        )
    check_name(path, prefix)
    placement = fields.get("expert_placement")
    if placement is None:
        if count % size:
            raise InconsistentCheckpoint(f"{path}: {prefix}: {count} experts cannot be spread evenly over {size} ranks")
        each = count // size
        held = tuple(tuple(range(first, first + each)) for first in range(0, count, each))
    else:
        held = _placed(path, str(prefix), placement, count, size)
    module = fields.get("module_path")
    return Layer(
        path, module if isinstance(module, str) else "", str(prefix), count, held, as_int(fields.get("ep_rank"))
    )


def _placed(path: str, prefix: str, placement: Any, count: int, size: int) -> tuple[tuple[int, ...], ...]:
    version = placement.get("version") if isinstance(placement, dict) else None
    if version != 1:
        raise UnsupportedLayout(
            f"{path}: {prefix}: its expert placement has version {brief(version, 20)}, of a DeepSpeed after 0.19.8; a newer lazyzero may read it"
        )
    entries = placement.get("ranks")
    held: dict[int, tuple[int, ...]] = {}
    for entry in entries if isinstance(entries, list) else ():
        rank, experts = (as_int(entry.get("rank")), entry.get("experts")) if isinstance(entry, dict) else (None, None)
        if rank is not None and isinstance(experts, list) and all(type(expert) is int for expert in experts):
            held[rank] = tuple(experts)
    every = {expert for experts in held.values() for expert in experts}
    if set(held) != set(range(size)) or every != set(range(count)):
        raise InconsistentCheckpoint(
            f"{path}: {prefix}: its placement does not give each of {count} experts a place on {size} ranks: {brief(placement, 120)}"
        )
    return tuple(held[rank] for rank in range(size))


def with_router_names(model: ModelStates, layers: Sequence[Layer]) -> ModelStates:
    """Adds the ties that no file lists: AutoEP's router is a child of its layer twice, once under the name of the old one."""
    if not layers:
        return model
    known = (
        {name for group in model.param_shapes or () for name in group}
        | set(model.frozen_shapes)
        | set(model.buffers or ())
    )
    shared = dict(model.shared)
    for layer in layers:
        prefix = f"{layer.module}." if layer.module else ""
        owners = [name for name in model.module if name.startswith(f"{prefix}router.")]
        for name in model.module:
            if name.startswith(prefix) and name not in known and name not in owners:
                owner = f"{prefix}router.{name.removeprefix(prefix).partition('.')[2]}"
                if owner in owners and model.module[owner].shape == model.module[name].shape:
                    shared.setdefault(name, owner)
    return replace(model, shared=shared)


class Fused:
    """AutoEP's experts: every rank's in one tensor, joined along dimension 0 in the order of their global numbers."""

    def __init__(self, layers: Sequence[Layer], files: ExpertFiles) -> None:
        self._layers = {name: layer for layer in layers for name in layer.names}
        self._files = files
        self._path = layers[0].path
        self.stored = {}
        for name, layer in self._layers.items():
            tensor = self._stored(name, range(layer.count))
            if tensor is not None:
                self.stored[name] = tensor

    def _stored(self, name: str, experts: Sequence[int]) -> LazyTensor | None:
        """The 16-bit weights of some experts as one tensor, None where a file of theirs is missing."""
        refs = [self._files.weights.get(f"{name}.{expert}") for expert in experts]
        views = [view(name, ref, "module") for ref in refs if ref is not None]
        if len(views) < len(refs) or not views:
            return None
        if any(tensor.shape != views[0].shape or tensor.dtype != views[0].dtype for tensor in views):
            raise InconsistentCheckpoint(
                f"{self._layers[name].path}: {name!r}: the experts' files have it in different shapes or dtypes"
            )
        return joined(name, [Slab(t.data, 1, 0, 1) for t in views], (len(views), *views[0].shape), 0, "module")

    def owns(self, names: Iterable[str]) -> bool:
        """Whether any of the names is an expert's."""
        return any(name in self._layers for name in names)

    def local(self, shapes: Shapes, rank: int) -> Shapes:
        """The other ranks may have more or fewer experts. Raises InconsistentCheckpoint for a rank too many."""
        for name in shapes:
            if name in self._layers and rank >= len(self._layers[name].held):
                raise InconsistentCheckpoint(
                    f"{self._path}: {brief(name)} is of {len(self._layers[name].held)} expert-parallel ranks, there is rank {rank}"
                )
        return {
            name: (len(self._layers[name].held[rank]), *shape[1:]) if name in self._layers else shape
            for name, shape in shapes.items()
        }

    def whole(self, by_rank: Sequence[Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
        """Every layer's experts as one tensor. Raises InconsistentCheckpoint for a name that is no layer's."""
        strange = [name for tensors in by_rank for name in tensors if name not in self._layers]
        if strange:
            raise InconsistentCheckpoint(
                f"{self._path}: {brief(strange[0])} is in a param group of experts and is none's; the file is damaged"
            )
        return {name: fuse(self._layers[name], name, [tensors[name] for tensors in by_rank]) for name in by_rank[0]}

    def by_value(self, optimizers: Sequence[Any], dense: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The first optimizer is the model file's, the others the expert-parallel ranks'."""
        found = zero0.masters_of(optimizers[0], dense)
        by_rank = []
        for rank, optimizer in enumerate(optimizers[1:]):
            local = {
                n: self._stored(n, layer.held[rank]) for n, layer in self._layers.items() if rank < len(layer.held)
            }
            experts = {
                name: tensor for name, tensor in local.items() if tensor is not None and tensor.dtype.itemsize == 2
            }
            by_rank.append(zero0.masters_of(optimizer, dense | experts))
        for name, layer in self._layers.items():
            shards = [tensors[name] for tensors in by_rank[: len(layer.held)] if name in tensors]
            if len(shards) == len(layer.held):
                found[name] = fuse(layer, name, shards)
        return found


def fuse(layer: Layer, name: str, shards: Sequence[LazyTensor]) -> LazyTensor:
    """One layer's parameter out of the expert-parallel ranks', each [its experts, ...]. Raises InconsistentCheckpoint."""
    if len(shards) != len(layer.held) or any(
        tensor.shape[:1] != (len(experts),)
        or tensor.shape[1:] != shards[0].shape[1:]
        or tensor.dtype != shards[0].dtype
        for tensor, experts in zip(shards, layer.held, strict=False)
    ):
        raise InconsistentCheckpoint(
            f"{layer.path}: {name!r}: expected {[len(experts) for experts in layer.held]} experts by rank, found "
            f"{', '.join(str(list(tensor.shape)) for tensor in shards):.200}"
        )
    slabs: list[Slab] = []
    at: tuple[int, int] | None = None
    for rank, index in layer.places():
        if slabs and at == (rank, index):
            slabs[-1] = replace(slabs[-1], size=slabs[-1].size + 1)
        else:
            slabs.append(Slab(shards[rank].data, len(layer.held[rank]), index, 1))
        at = (rank, index + 1)
    return joined(name, slabs, (layer.count, *shards[0].shape[1:]), 0, shards[0].role)
