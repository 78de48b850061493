"""The order of the parameters in the flats of ZeRO-1 and -2: as recorded, or recovered from `module` where it is not.

`param_shapes` is in no file before DeepSpeed 0.3.14; up to 0.4.2 it is in the module's order and counts frozen parameters;
0.4.0 to 0.4.3 store the parameters round-robin and do not say so. But DeepSpeed made the 16-bit parameters views of flat
buffers built like the flats of their masters, and `module` is saved with those views: their offsets are the order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lazyzero.container.brief import brief
from lazyzero.errors import InconsistentCheckpoint, UnsupportedLayout
from lazyzero.layout.contents import view
from lazyzero.layout.matching import Effort, Pool, rounds_to, walk
from lazyzero.layout.states import ModelStates, OptimStates, Shapes, older, read_shapes
from lazyzero.tensor import Chain, LazyTensor

RELIABLE = (0, 4, 4)  # the first version that recorded the order it stored


def param_groups(model: ModelStates, ranks: Sequence[OptimStates], chains: list[Chain]) -> list[Shapes]:
    """The parameters of each flat group in order, one dict for each of `chains` (a group's masters over all ranks).

    Reads samples of values where the order has to be recovered. Raises UnsupportedLayout where it cannot be.
    """
    if model.param_shapes is not None:
        return _grouped(model, model.param_shapes, chains)
    recorded = read_shapes(ranks[0].path, ranks[0].root.get("param_shapes"))
    if recorded is not None and not older(model.version or ranks[0].version, RELIABLE):
        return _grouped(model, recorded, chains)
    return recover(model, ranks, chains)


def recover(model: ModelStates, ranks: Sequence[OptimStates], chains: list[Chain]) -> list[Shapes]:
    """The order as the 16-bit copies have it: one dict per chain, certain or refused. Raises UnsupportedLayout."""
    recorded = read_shapes(ranks[0].path, ranks[0].root.get("param_shapes"))
    pool = _pool(model, None if recorded is None else {name for group in recorded for name in group})
    runs = list(_runs(model, pool))
    groups: list[Shapes] = []
    free = dict(pool)
    effort = Effort()
    for index, chain in enumerate(chains):
        runs = [run for run in runs if all(tensor.name in free for tensor in run.tensors)]
        group = _from_runs(runs, chain, effort) or _from_values(free, chain, effort, padding=2 * len(ranks) - 1)
        if group is None:
            version = model.version or "0.3 or older"
            raise UnsupportedLayout(
                f"{model.path}: DeepSpeed {version} does not record the order of the parameters in its flat groups, and "
                f"for group {index} ({chain.total} elements) the 16-bit copies in `module` do not decide it; if no rank's file is "
                "missing, load the checkpoint with that version and save a state dict"
            )
        groups.append(group)
        for name in group:
            del free[name]
    return groups


@dataclass(frozen=True, slots=True)
class _Run:
    """16-bit parameters that fill one storage from its beginning; `capacity` is its size, padding included."""

    tensors: tuple[LazyTensor, ...]
    capacity: int

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


def _pool(model: ModelStates, names: set[str] | None) -> dict[str, LazyTensor]:
    """What can be a parameter, each tied group once."""
    seen: set[tuple[object, ...]] = set()
    pool: dict[str, LazyTensor] = {}
    for name, ref in model.module.items():
        wanted = name in names if names is not None else name not in (model.buffers or ())
        if wanted and ref.dtype.floating and ref.numel and ref.contiguous and ref.identity not in seen:
            seen.add(ref.identity)
            pool[name] = view(name, ref, "module")
    return pool


def _runs(model: ModelStates, pool: dict[str, LazyTensor]) -> Iterator[_Run]:
    by_storage: dict[int, list[str]] = {}
    for name in pool:
        by_storage.setdefault(id(model.module[name].storage), []).append(name)
    for names in by_storage.values():
        names.sort(key=lambda name: model.module[name].offset)
        at = 0
        for name in names:
            if model.module[name].offset != at:
                break
            at += pool[name].numel
        else:
            storage = model.module[names[0]].storage
            yield _Run(tuple(pool[name] for name in names), storage.nbytes // pool[names[0]].dtype.itemsize)


def _from_runs(runs: list[_Run], chain: Chain, effort: Effort) -> Shapes | None:
    """The one run whose elements are the chain's, rounded: samples first, everything where several begin alike."""
    if not effort.spend(1 + len(runs) // 64):
        return None
    fits = [run for run in runs if run.numel <= chain.total <= run.capacity and _begins(run, chain, whole=False)]
    if len(fits) > 1:
        fits = [run for run in fits if _begins(run, chain, whole=True)]
    if len(fits) != 1:
        return None
    return {tensor.name: tensor.shape for tensor in fits[0].tensors}


def _begins(run: _Run, chain: Chain, *, whole: bool) -> bool:
    at = 0
    for tensor in run.tensors:
        if not rounds_to(chain, at, tensor, whole=whole):
            return False
        at += tensor.numel
    return True


def _from_values(free: dict[str, LazyTensor], chain: Chain, effort: Effort, *, padding: int) -> Shapes | None:
    """The order by values alone, for a `module` that was cloned: every element has a name, but for some padding."""
    found, end = walk(chain, Pool(free), effort)
    if sum(free[name].numel for name in found) != end or chain.total - end > padding:
        return None
    return {name: free[name].shape for name in found}


def _grouped(model: ModelStates, shapes: list[Shapes], chains: list[Chain]) -> list[Shapes]:
    """One dict for each group: up to 0.5.3 one dict spans them all and is cut where the flats end."""
    if len(shapes) == len(chains):
        return shapes
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
