"""Stage 0: no partitions, no optimizer files; the weights are `module`.

DeepSpeed's 16-bit wrappers keep fp32 masters in the model file, without names: FP16_Optimizer one flat vector per param
group (`fp32_groups_flat`), FP16_UnfusedOptimizer one tensor per parameter (`fp32_groups`). A master is named by the one
parameter that it rounds to; where several parameters, or none, fit, the 16-bit values are what is left to use.
"""

from __future__ import annotations

from typing import Any

from lazyzero.container.objects import TensorRef
from lazyzero.errors import UnsupportedLayout
from lazyzero.layout.contents import Check, Contents, assemble, view
from lazyzero.layout.found import Found
from lazyzero.layout.matching import Effort, Pool, walk
from lazyzero.layout.states import ModelStates, read_model
from lazyzero.layout.support import Support
from lazyzero.tensor import Chain, LazyTensor, Slice

SUPPORT = (
    Support(
        "stage 0",
        "0.3.0 to 0.19.8",
        "`module`, and the unnamed fp32 masters of 16-bit wrappers where they can be told apart",
        "real files of 0.19.8",
    ),
)


def matches(found: Found) -> bool:
    """Whether there are weights and no partitions."""
    return bool(found.files.model) and not found.files.optim and not found.files.zero_model


def read(found: Found) -> Contents:
    """The contents of a stage-0 checkpoint. Reads samples of the 16-bit weights to name the masters."""
    files = found.files
    if len(files.model) > 1:
        raise UnsupportedLayout(f"{files.directory}: model-parallel ranks {sorted(files.model)}; not supported here")
    model = read_model(next(iter(files.model.values())))
    candidates = candidates_of(model)
    masters = masters_of(model.root.get("optimizer"), candidates)
    assembly = assemble(
        model, masters, {}, partitioned=False, why_missing="its values are in no file of the checkpoint"
    )
    checks = tuple(Check(tensor, candidates[name]) for name, tensor in masters.items())
    return Contents(
        layout="stage 0",
        stage=0,
        world_size=1,
        version=model.version,
        entries=assembly.entries,
        missing=assembly.missing,
        warnings=tuple(_told(model, candidates, masters)),
        checks=checks,
        archives=(model.archive,),
    )


def candidates_of(model: ModelStates) -> dict[str, LazyTensor]:
    """The 16-bit parameters a master can belong to, each tied group once."""
    seen: set[tuple[object, ...]] = set()
    chosen: dict[str, LazyTensor] = {}
    for name, ref in model.module.items():
        wanted = ref.dtype.floating and ref.dtype.itemsize == 2 and ref.numel and name not in (model.buffers or ())
        if wanted and ref.identity not in seen:
            seen.add(ref.identity)
            chosen[name] = view(name, ref, "module")
    return chosen


def _told(model: ModelStates, candidates: dict[str, LazyTensor], masters: dict[str, LazyTensor]) -> list[str]:
    if not _has_masters(model.root.get("optimizer")) or len(masters) == len(candidates):
        return []
    left = len(candidates) - len(masters)
    return [
        f"{left} of {len(candidates)} 16-bit tensors have no fp32 master that is theirs alone (frozen ones have none); "
        f"their values are the 16-bit ones"
    ]


def _has_masters(optimizer: Any) -> bool:
    return isinstance(optimizer, dict) and ("fp32_groups_flat" in optimizer or "fp32_groups" in optimizer)


def masters_of(optimizer: Any, candidates: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The masters in a 16-bit wrapper's state, under the names of the candidates that they alone round to."""
    if not isinstance(optimizer, dict):
        return {}
    pool, effort = Pool(candidates), Effort()
    named: dict[str, LazyTensor] = {}
    for flat in _refs(optimizer.get("fp32_groups_flat")):
        chain = Chain([flat], flat.dtype)
        named.update((name, _master(name, candidates, chain, at)) for name, at in walk(chain, pool, effort)[0].items())
    for group in _groups(optimizer.get("fp32_groups")):
        for ref in group:
            chain = Chain([ref], ref.dtype)
            names = [name for name in pool.fitting(chain, 0, effort) if candidates[name].shape == ref.shape]
            if len(names) == 1 and names[0] not in named:
                named[names[0]] = _master(names[0], candidates, chain, 0)
    return named


def _groups(value: Any) -> list[list[TensorRef]]:
    return [[ref for ref in _refs(group) if ref.contiguous] for group in value] if isinstance(value, list) else []


def _refs(value: Any) -> list[TensorRef]:
    return [ref for ref in value if isinstance(ref, TensorRef)] if isinstance(value, list) else []


def _master(name: str, pool: dict[str, LazyTensor], chain: Chain, at: int) -> LazyTensor:
    return LazyTensor(name, pool[name].shape, Slice(chain, at), "trainable")
