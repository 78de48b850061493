"""Universal checkpoints (0.7.4 on, made by `ds_to_universal`; from ZeRO-3 since 0.14.5): one directory for each parameter.

zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt   from ZeRO-1/2: a dict, the tensor under `param`, whole, tensor-parallel
                                                slices merged and vocabulary padding removed; from ZeRO-3: the bare 1-D
                                                values, up to 0.16 with some of the padding behind them
mp_rank_*_model_states.pt                       copies of the model files, with shapes, ties, buffers and frozen weights;
or zero_pp_rank_*_model_states.pt               from ZeRO-3

`fp32.pt` can also lie there for names the optimizer does not know (buffers, frozen weights, aliases), as casts; the model
file has the originals.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lazyzero.container.archive import Archive, open_archive
from lazyzero.container.brief import brief
from lazyzero.container.objects import TensorRef
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, ReadError, one_line
from lazyzero.layout.contents import Check, Contents, assemble, view
from lazyzero.layout.discover import FileSet
from lazyzero.layout.found import Found
from lazyzero.layout.states import ModelStates, Shape, as_int, check_name, read_model
from lazyzero.layout.support import Support
from lazyzero.layout.zero3 import frozen_weights, model_paths
from lazyzero.tensor import LazyTensor

MOMENTS = True
_MOST_RANKS = 1_000_000

SUPPORT = (
    Support(
        "universal checkpoints",
        "0.7.4 to 0.19.8",
        "`fp32.pt` of ZeRO-1, -2, -3; optimizer moments",
        "real files of 0.19.8",
    ),
)


def matches(found: Found) -> bool:
    """Whether there is a `zero` directory beside the model files."""
    return found.files.universal


def read(found: Found) -> Contents:
    """The contents of a universal checkpoint: every parameter's file is opened, no tensor is read.

    Raises MissingFiles for a parameter without its file, InconsistentCheckpoint where a shape does not fit.
    """
    files = found.files
    models = _models(files)
    source = _source(files)
    trainable: dict[str, LazyTensor] = {}
    archives = [model.archive for model in models]
    for name, shape in _shapes(models).items():
        archive = _open(files, name, found.state or "fp32")
        archives.append(archive)
        trainable[name] = _parameter(archive, name, shape, source.world, whole=len(models) == 1)
    model, sliced = _common(models, trainable) if len(models) > 1 else (models[0], {})
    frozen: dict[str, LazyTensor] = {}
    if source.stage == 3 and not sliced:
        frozen, more = frozen_weights(model, model_paths(files), source.world)
        archives += more
    assembly = assemble(
        model, trainable, {name: tensor for name, tensor in frozen.items() if name not in trainable},
        partitioned=source.stage == 3, why_missing="its values are in no file of the universal checkpoint",
    )  # fmt: skip
    return Contents(
        layout="universal",
        stage=source.stage,
        world_size=1,
        version=model.version,
        entries=assembly.entries,
        missing=assembly.missing | sliced,
        warnings=tuple(_unclaimed(files, models, trainable)),
        checks=tuple(_checks(model, trainable)) if source.stage < 3 and found.state is None else (),
        archives=tuple(archives),
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """What the checkpoint was converted from: its stage, and over how many ranks each parameter was cut."""

    stage: int
    world: int


def _models(files: FileSet) -> list[ModelStates]:
    """One model file for each model-parallel rank. Raises MissingFiles."""
    by_rank = files.model or {mp: path for (_, mp), path in sorted(files.zero_model.items(), reverse=True)}
    if not by_rank:
        raise MissingFiles(
            f"{files.directory}: a universal checkpoint without mp_rank_*_model_states.pt or "
            "zero_pp_rank_*_model_states.pt; they hold shapes, ties and buffers, copy them from the checkpoint it was made from"
        )
    return [read_model(by_rank[rank], without_module=True) for rank in sorted(by_rank)]


def _source(files: FileSet) -> _Source:
    stage, world = (1, 1) if files.model else (3, len({dp for dp, _ in files.zero_model}))
    path = os.path.join(files.directory, "zero", "optimizer_state.pt")
    if os.path.exists(path):
        state = open_archive(path).root
        if isinstance(state, Mapping):
            stage = as_int(state.get("zero_stage")) or stage
            world = as_int(state.get("partition_count")) or world
            if not 1 <= stage <= 3 or not 1 <= world <= _MOST_RANKS:
                raise InconsistentCheckpoint(
                    f"{path}: expected a stage from 1 to 3 and a number of ranks, found {stage} and {world}; damaged file"
                )
    return _Source(stage, world)


def _shapes(models: list[ModelStates]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for model in models:
        if model.param_shapes is None:
            raise InconsistentCheckpoint(f"{model.path}: expected `param_shapes`, found none; it names the parameters")
        for group in model.param_shapes:
            shapes.update(group)
    return shapes


def _open(files: FileSet, name: str, state: str) -> Archive:
    check_name(files.directory, name)
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise InconsistentCheckpoint(f"{files.directory}: {brief(name)} cannot be a directory of its own")
    path = os.path.join(files.directory, "zero", *name.split("/"), f"{state}.pt")
    if not os.path.exists(path):
        raise MissingFiles(
            f"{path}: not found, though `param_shapes` has {name!r}; copy it, or convert to universal again"
        )
    return open_archive(path)


def _parameter(archive: Archive, name: str, shape: Shape, world: int, *, whole: bool) -> LazyTensor:
    """The parameter in a file of its own; `whole` says that `param_shapes` has the shape of all of it."""
    saved = archive.root
    if isinstance(saved, TensorRef):
        return LazyTensor(
            name, shape, view(name, _unpadded(archive, saved, shape, world), "trainable").data, "trainable"
        )
    ref = saved.get("param") if isinstance(saved, Mapping) else None
    if not isinstance(ref, TensorRef):
        raise InconsistentCheckpoint(f"{archive.path}: expected a tensor, alone or under `param`, found {brief(saved)}")
    resized = not whole or saved.get("is_expert_param") is True
    if _stripped(saved) and ref.shape[1:] == shape[1:] and ref.shape[:1] <= shape[:1]:
        resized = True
    if ref.shape != shape and not resized:
        raise InconsistentCheckpoint(f"{archive.path}: expected shape {list(shape)}, found {list(ref.shape)}")
    return view(name, ref, "trainable")


def _stripped(saved: Mapping[str, Any]) -> bool:
    """Whether the file says that its vocabulary padding was removed (0.7.4 to 0.9.x spelled it otherwise)."""
    return saved.get("vocab_tensor") is True or saved.get("vocab_divisibility_padding_tensor") is not None


def _unpadded(archive: Archive, ref: TensorRef, shape: Shape, world: int) -> TensorRef:
    """The values of a ZeRO-3 parameter without what padding was copied with them.

    Up to 0.16 a rank with nothing but padding gave as many elements as it lies beyond the end.
    """
    numel = math.prod(shape)
    part = -(-numel // world)
    full = numel // part if part else 0  # ranks without padding; only the next two can have less than a whole part
    near = range(full, min(full + 2, world))
    beyond = (min(full, world) + max(world - full - 2, 0)) * part + sum(abs(numel - rank * part) for rank in near)
    if len(ref.shape) != 1 or not ref.contiguous or ref.numel not in (numel, beyond, part * world):
        raise InconsistentCheckpoint(
            f"{archive.path}: expected {numel} elements for shape {list(shape)} (or with padding over {world} ranks "
            f"{part * world}), found {list(ref.shape)}"
        )
    return TensorRef(ref.storage, ref.offset, (numel,), (1,), ref.dtype)


def _common(models: list[ModelStates], trainable: dict[str, LazyTensor]) -> tuple[ModelStates, dict[str, str]]:
    """Of several model-parallel ranks' modules: buffers and aliases, and why the rest (frozen weights) is missing."""
    model = models[0]
    owners = {model.module[name].identity for name in trainable if name in model.module}
    kept = {
        name: ref
        for name, ref in model.module.items()
        if name in (model.buffers or ()) or name in trainable or ref.identity in owners
    }
    why = "its model-parallel slices lie in the model files, which the universal layout does not merge"
    names = [name for each in models for name in (*each.module, *each.frozen_shapes)]
    sliced = {name: why for name in names if name not in kept and name not in trainable}
    if any(each.root.get("module") is None for each in models):
        buffers = [name for each in models for name in sorted(each.buffers or ())]
        sliced.update((name, "it lies in the pipeline's layer files, which were not copied") for name in buffers)
    return replace(model, module=kept, frozen={}, frozen_shapes={}), sliced


def _unclaimed(files: FileSet, models: list[ModelStates], trainable: dict[str, LazyTensor]) -> list[str]:
    known = {name.split("/")[0] for name in [*trainable, *(name for model in models for name in model.module)]}
    zero = os.path.join(files.directory, "zero")
    try:
        others = [
            name for name in sorted(os.listdir(zero)) if name not in known and os.path.isdir(os.path.join(zero, name))
        ]
    except OSError as error:
        raise ReadError(f"{zero}: cannot be listed: {error.strerror}") from None
    if not others:
        return []
    return [
        f"passed over {len(others)} directories in zero/ that no model file names: {', '.join(map(one_line, others[:4]))}"
    ]


def _checks(model: ModelStates, trainable: dict[str, LazyTensor]) -> list[Check]:
    copies = {name: model.module[name] for name in trainable if name in model.module}
    return [
        Check(trainable[name], view(name, ref, "module"))
        for name, ref in copies.items()
        if ref.shape == trainable[name].shape
    ]
