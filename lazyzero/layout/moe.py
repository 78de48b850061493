"""Mixture of experts: deepspeed.moe (0.5.0 to 0.19.8, stages 0 to 2), and AutoEP (0.19.2 on, see `autoep`).

The model file has all but the experts. Under ZeRO-1 and -2 experts are param groups of their own, which each
expert-parallel rank fills with experts of its own under the same local names: rank r's expert l is expert
r * (experts of a rank) + l of the model, the name under which it has a file in 16 bit as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lazyzero.container.archive import Archive, open_archive
from lazyzero.container.objects import TensorRef
from lazyzero.dtypes import FLOAT32
from lazyzero.errors import InconsistentCheckpoint
from lazyzero.layout import autoep, autoep_zero3, moments, zero0, zero12
from lazyzero.layout.contents import Check, Contents, assemble, view
from lazyzero.layout.discover import EXPERT_OPTIM, FileSet
from lazyzero.layout.experts import (
    ExpertFiles,
    Scheme,
    expert_name,
    expert_sets,
    in_one_order,
    partition_counts,
    read_expert_files,
    require_all,
    require_one_model_rank,
    told,
    without_aliases,
)
from lazyzero.layout.found import Found
from lazyzero.layout.order import param_groups
from lazyzero.layout.ranks import Optimizer, read_ranks
from lazyzero.layout.states import ModelStates, OptimStates, Shapes, as_int, check_once, require_finite
from lazyzero.layout.support import Support
from lazyzero.tensor import Chain, LazyTensor

MOMENTS = True
SUPPORT = (
    Support(
        "experts (`deepspeed.moe`)",
        "0.5.0 to 0.19.8",
        "stages 0 to 2: masters under global names, each expert's file as cross-check and where there is no master; "
        "any ep_size, residual; optimizer moments",
        "real files of 0.19.8, world 2 and 4",
    ),
    Support(
        "experts (AutoEP)",
        "0.19.2 to 0.19.8",
        "stages 0 to 3: the experts of a layer as one tensor, placements as recorded; optimizer moments",
        "files made with 0.19.8, world 2 and 4",
    ),
)
_MOST_BESIDES = 1 << 20
_WHY_MISSING = "its values are in no file of the checkpoint"


def matches(found: Found) -> bool:
    """Whether there are files of experts, or AutoEP's partitions under ZeRO-3."""
    return bool(found.files.experts or found.files.expert_optim) or autoep_zero3.matches(found)


def read(found: Found) -> Contents:
    """The contents of a checkpoint with experts; at stage 0 samples are read to name the masters.

    Raises UnsupportedLayout under tensor parallelism or in a pipeline, MissingFiles, InconsistentCheckpoint.
    """
    require_one_model_rank(found.files)
    if not found.files.experts and autoep_zero3.matches(found):
        return autoep_zero3.read(found)
    model = zero12.model_states(found)
    files = read_expert_files(found.files, model)
    layers = autoep.layers_of(model)
    model = autoep.with_router_names(model, layers)
    scheme: Scheme = autoep.Fused(layers, files) if layers else Native(model, files)
    if found.files.optim:
        optimizer = read_ranks(found.files, as_int(model.root.get("dp_world_size")))
        trainable = masters(optimizer, model, scheme, found.state)
        archives = [rank.archive for rank in optimizer.ranks]
    else:
        require_all(found.files, files)
        archives = _optimizer_archives(found.files)
        optimizer, states = None, [archive.root.get("optimizer") for archive in archives]
        trainable = scheme.by_value([model.root.get("optimizer"), *states], zero0.candidates_of(without_aliases(model)))
    return _delivered(found, model, optimizer, files, scheme, trainable, archives)


def masters(optimizer: Optimizer, model: ModelStates, scheme: Scheme, state: str | None) -> dict[str, LazyTensor]:
    """All param groups' parameters, or their moments. Raises InconsistentCheckpoint when elements are left over."""
    ranks, path = in_one_order(optimizer.ranks), optimizer.ranks[0].path
    flats = [rank.flats(zero12.FLATS) for rank in ranks]
    counts = partition_counts(optimizer, len(flats[0]))
    sets = [expert_sets(len(ranks), count, model.root.get("ds_config")) for count in counts]
    chains = [_chain(ranks, of_group[0], flats, index) for index, of_group in enumerate(sets)]
    names = param_groups(model, ranks, chains)
    if state is not None:
        flats = [moments.zero12_flats(rank, state) for rank in ranks]
    trainable: dict[str, LazyTensor] = {}
    if len(names) != len(sets) or any(len(groups) != len(sets) for groups in flats):
        raise InconsistentCheckpoint(f"{path}: expected {len(sets)} param groups on each rank, found another number")
    for index, (shapes, of_group) in enumerate(zip(names, sets, strict=True)):
        experts = scheme.owns(shapes)
        if len(of_group) > 1 and not experts:
            raise InconsistentCheckpoint(
                f"{path}: group {index} has {counts[index]} partitions on {len(ranks)} ranks and no experts ({next(iter(shapes), None)!r})"
            )
        by_rank = [
            zero12.read_group(
                tuple(ranks[r] for r in members), index, scheme.local(shapes, expert_rank),
                _chain(ranks, members, flats, index),
            )
            for expert_rank, members in enumerate(of_group)
        ]  # fmt: skip
        tensors = scheme.whole(by_rank) if experts else by_rank[0]
        check_once(model.path, trainable, tensors)
        trainable.update(tensors)
    return trainable


def _chain(ranks: Sequence[OptimStates], members: Sequence[int], flats: list[list[TensorRef]], index: int) -> Chain:
    """One group's flats of the ranks that share it."""
    return zero12.chains(Optimizer(tuple(ranks[r] for r in members), ()), [[flats[r][index]] for r in members])[0]


def _optimizer_archives(files: FileSet) -> list[Archive]:
    """The expert-parallel ranks' optimizers of stage 0, in rank order."""
    by_rank = {}
    for path in files.expert_optim:
        match = EXPERT_OPTIM.fullmatch(os.path.basename(path))
        archive = open_archive(path)
        if match is not None and isinstance(archive.root, dict):
            require_finite(path, archive.root.get("optimizer"))
            by_rank[int(match[1])] = archive
    return [by_rank[rank] for rank in sorted(by_rank)]


def _delivered(
    found: Found, model: ModelStates, optimizer: Optimizer | None, files: ExpertFiles, scheme: Scheme,
    trainable: dict[str, LazyTensor], archives: Sequence[Archive],
) -> Contents:  # fmt: skip
    # Of experts the model file has frozen weights too, but rank 0's only.
    dense = {name: view(name, ref, "frozen") for name, ref in model.frozen.items() if not scheme.owns([name])}
    rest = {name: tensor for name, tensor in (dense | scheme.stored).items() if name not in trainable}
    assembly = assemble(without_aliases(model), trainable, rest, partitioned=False, why_missing=_WHY_MISSING)
    checks = [check for check in zero12.module_checks(model, trainable) if not _widened_gate(check)]
    checks += [
        Check(trainable[owner], view(alias, model.module[alias], "module"))
        for alias, owner in model.shared.items()
        if alias in model.module and owner in trainable and model.module[alias].shape == trainable[owner].shape
    ]
    checks += [Check(trainable[name], tensor) for name, tensor in scheme.stored.items() if name in trainable]
    stage = 0 if optimizer is None else optimizer.stage
    return Contents(
        layout=f"mixture of experts, {'BF16_Optimizer' if stage is None else f'ZeRO-{stage}' if stage else 'stage 0'}",
        stage=1 if stage is None else stage,
        world_size=1 if optimizer is None else optimizer.world_size,
        version=model.version,
        entries=assembly.entries,
        missing=assembly.missing | {n: _WHY_MISSING for n in _besides(model, trainable) if n not in assembly.entries},
        warnings=(*(optimizer.warnings if optimizer else ()), *told(files)),
        checks=tuple(checks) if found.state is None else (),
        archives=(model.archive, *archives, *files.archives),
    )


def _besides(model: ModelStates, trainable: Iterable[str]) -> Iterable[str]:
    """What the experts have besides trained parameters, whether or not their files are there."""
    kinds: dict[str, list[str]] = {}
    for prefix, rest in sorted(_kinds([*model.frozen_shapes, *(model.buffers or ())])):
        kinds.setdefault(prefix, []).append(rest)
    numbered = {(parts.prefix, parts.number) for parts in map(expert_name, trainable) if parts is not None}
    count = sum(len(kinds.get(prefix, ())) for prefix, _ in numbered)
    if count > _MOST_BESIDES:
        raise InconsistentCheckpoint(
            f"{model.path}: its experts have {count} frozen weights and buffers, more than any model"
        )
    return [f"{prefix}{number}{rest}" for prefix, number in sorted(numbered) for rest in kinds.get(prefix, ())]


def _widened_gate(check: Check) -> bool:
    """Up to 0.14 a forward pass leaves the gate's 16-bit weights in fp32 until the next step: no copy to compare with."""
    return check.stored.name.endswith("gate.wg.weight") and check.stored.dtype == FLOAT32


class Native:
    """deepspeed.moe: every expert's parameters by themselves, numbered on each rank from 0."""

    def __init__(self, model: ModelStates, files: ExpertFiles) -> None:
        local = [*(name for group in model.param_shapes or () for name in group), *model.frozen_shapes]
        self._path = model.path
        self._of_a_rank: dict[str, int] = {}
        self._see([*local, *(model.buffers or ())])
        buffers, frozen = _kinds(model.buffers or ()), _kinds(model.frozen_shapes)
        self.stored = {}
        for name, ref in files.weights.items():
            kind = _kind(name)
            self.stored[name] = view(
                name, ref, "buffer" if kind in buffers else "frozen" if kind in frozen else "module"
            )

    def _see(self, names: Iterable[str]) -> None:
        for name in names:
            parts = expert_name(name)
            if parts is not None:
                self._of_a_rank[parts.prefix] = max(self._of_a_rank.get(parts.prefix, 0), parts.number + 1)

    def owns(self, names: Iterable[str]) -> bool:
        """Whether any of the names is an expert's."""
        return any(expert_name(name) for name in names)

    def local(self, shapes: Shapes, rank: int) -> Shapes:
        """Every rank has as many experts, of the same shapes."""
        self._see(shapes)
        return shapes

    def whole(self, by_rank: Sequence[Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
        """Each rank's experts under their numbers in the model."""
        found: dict[str, LazyTensor] = {}
        for rank, tensors in enumerate(by_rank):
            for name, tensor in tensors.items():
                parts = expert_name(name)
                if parts is None:
                    raise InconsistentCheckpoint(f"{self._path}: {name!r} is in a param group of experts and is none's")
                numbered = parts.numbered(rank * self._of_a_rank[parts.prefix] + parts.number)
                stored = self.stored.get(numbered)
                if stored is not None and stored.shape != tensor.shape:
                    raise InconsistentCheckpoint(
                        f"{self._path}: {numbered!r} has shape {list(tensor.shape)} in `param_shapes` and {list(stored.shape)} in its expert's file"
                    )
                found[numbered] = replace(tensor, name=numbered)
        return found

    def by_value(self, optimizers: Sequence[Any], dense: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Whatever rank an expert's master is on, only that expert rounds to it."""
        experts = {n: t for n, t in self.stored.items() if t.dtype.itemsize == 2 and t.numel and t.role != "buffer"}
        found: dict[str, LazyTensor] = {}
        for optimizer in optimizers:
            found = zero0.masters_of(optimizer, dense | experts) | found
        return found


def _kind(name: str) -> tuple[str, str] | None:
    """What an expert's parameter has in common with those of the other experts beside it."""
    parts = expert_name(name)
    return (parts.prefix, parts.rest) if parts else None


def _kinds(names: Iterable[str]) -> set[tuple[str, str]]:
    return {kind for kind in map(_kind, names) if kind is not None}
