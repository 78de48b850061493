"""Pipeline parallelism (0.3.0 to 0.19.8): the 16-bit weights in a file for each layer, the masters stage by stage.

layer_<i>[-model_<tp>]-model_states.pt   layer i's state dict, without prefix; on each tensor-parallel rank
mp_rank_<mp>_model_states.pt             mp = stage * tensor-parallel ranks + tp; `module` is None
zero_pp_rank_<dp>_mp_rank_<mp>_optim_states.pt   ZeRO-1 or BF16_Optimizer over one stage's parameters

A PipelineModule calls layer i's parameters `<i>.<name>`, and those of a TiedLayerSpec `tied_modules.<key>.<name>` wherever
it stands; every stage it stands on has a copy, of which the first is the one DeepSpeed goes on with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lazyzero.container.archive import Archive, open_archive
from lazyzero.container.brief import brief
from lazyzero.container.objects import Opaque, TensorRef
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout
from lazyzero.layout import tensor_parallel, zero0, zero12
from lazyzero.layout.contents import Contents, assemble, view
from lazyzero.layout.discover import LAYER, FileSet
from lazyzero.layout.found import Found
from lazyzero.layout.ranks import Optimizer, read_ranks, spans
from lazyzero.layout.states import ModelStates, Shapes, as_int, check_once, named, read_model
from lazyzero.layout.support import Support
from lazyzero.layout.tied_layers import TIED, tied_names, tied_prefix
from lazyzero.layout.tp_merge import alike
from lazyzero.tensor import LazyTensor

MOMENTS = True
SUPPORT = (
    Support(
        "pipelines",
        "0.3.14 to 0.19.8",
        "layers' files and masters under the names of a `PipelineModule`, tied layers once; ZeRO-1, BF16_Optimizer or "
        "neither; with tensor parallelism; optimizer moments",
        "real files of 0.19.8, 2 to 4 stages",
    ),
)
_TOLD_NAMES = (
    "without ZeRO no file names a pipeline's parameters: they are named after the layers they were saved for, also those of "
    "a TiedLayerSpec, which a PipelineModule calls `tied_modules.<key>.*`"
)


def matches(found: Found) -> bool:
    """Whether there are files of layers."""
    return bool(found.files.layers)


def read(found: Found) -> Contents:
    """The contents of a pipeline's checkpoint. Reads samples of tied layers to tell which ones they are.

    Raises MissingFiles, UnsupportedLayout, or InconsistentCheckpoint when a stage's flats are not its parameters.
    """
    files = found.files
    if files.experts or files.zero_model:
        what = "experts (deepspeed.moe)" if files.experts else "ZeRO-3"
        raise UnsupportedLayout(f"{files.directory}: a pipeline with {what}, which DeepSpeed does not write")
    layers = _by_rank(files)
    ranks = files.model_ranks
    if not ranks or len(ranks) % len(layers) or ranks != list(range(len(ranks))):
        raise MissingFiles(
            f"{files.directory}: expected mp_rank_* files for every stage of each of {len(layers)} tensor-parallel ranks, "
            f"found {spans(ranks)}; copy the others from the nodes that wrote them"
        )
    parts = [
        _contents(found, [files.of_model_rank(rank) for rank in ranks[tp :: len(layers)]], layers[tp])
        for tp in range(len(layers))
    ]
    return parts[0] if len(parts) == 1 else tensor_parallel.join(found, parts)


def _by_rank(files: FileSet) -> list[dict[int, str]]:
    """layer -> path for each tensor-parallel rank. Raises MissingFiles where a rank lacks a layer."""
    found: dict[int, dict[int, str]] = {}
    for path in files.layers:
        match = LAYER.fullmatch(os.path.basename(path))
        if match is not None:
            found.setdefault(int(match[2] or 0), {})[int(match[1])] = path
    every = {layer for layers in found.values() for layer in layers}
    for rank in range(max(found) + 1):
        lacking = every - found.get(rank, {}).keys()
        if lacking:
            raise MissingFiles(
                f"{files.directory}: tensor-parallel rank {rank} has no files of layers {spans(sorted(lacking))} "
                f"(layer_{min(lacking):02d}-model_{rank:02d}-model_states.pt); copy them from the node that wrote them"
            )
    return [dict(sorted(found[rank].items())) for rank in sorted(found)]


_Layers = dict[int, dict[str, TensorRef]]


@dataclass(frozen=True, slots=True)
class _Stage:
    """One pipeline stage: its model file, which has no weights, and its optimizer's files where ZeRO wrote any."""

    model: ModelStates
    optimizer: Optimizer | None

    @property
    def names(self) -> set[str]:
        """The parameters and buffers that the stage's files name."""
        return {name for group in self.model.param_shapes or () for name in group} | set(self.model.buffers or ())


def _contents(found: Found, files: Sequence[FileSet], paths: dict[int, str]) -> Contents:
    """One tensor-parallel rank's part of the model: the files of its stages, and of its layers."""
    archives = {layer: open_archive(path) for layer, path in paths.items()}
    layers = {layer: _weights(archive) for layer, archive in archives.items()}
    stages = [_stage(of_stage, layers) for of_stage in files]
    _require_layers(found.files.directory, stages, layers)
    model, optimizer = stages[0].model, stages[0].optimizer
    trainable, twice = _masters(stages, found.state)
    module, again = _named(layers, trainable, stages)
    model = replace(
        model,
        module=module,
        buffers=frozenset(name for stage in stages for name in stage.model.buffers or ()),
        param_shapes=[
            {name: shape for stage in stages for g in stage.model.param_shapes or () for name, shape in g.items()}
        ],
        shared={alias: owner for stage in stages for alias, owner in stage.model.shared.items()},
    )
    warnings = _told(trainable, twice, again) if found.state is None else []
    if optimizer is None:
        trainable = _unpartitioned(model, stages)
        warnings.append(_TOLD_NAMES)
    assembly = assemble(
        model, trainable, {}, partitioned=False, why_missing="its values are in no file of the checkpoint"
    )
    lost = {name: "a buffer in no layer's file" for name in model.buffers or () if name not in assembly.entries}
    return Contents(
        layout=f"pipeline of {len(stages)} stages, " + _below(optimizer),
        stage=0 if optimizer is None else optimizer.stage or 1,
        world_size=1 if optimizer is None else optimizer.world_size,
        version=model.version,
        entries=assembly.entries,
        missing=assembly.missing | lost,
        warnings=(*(text for stage in stages if stage.optimizer for text in stage.optimizer.warnings), *warnings),
        checks=tuple(zero12.module_checks(model, trainable)) if found.state is None else (),
        archives=tuple(_archives(stages, archives)),
    )


def _stage(files: FileSet, layers: _Layers) -> _Stage:
    path = files.model.get(files.model_ranks[0])
    if path is None:
        raise MissingFiles(
            f"{files.directory}: no mp_rank_{files.model_ranks[0]:02d}_model_states.pt, which holds the names of a pipeline "
            "stage's parameters; copy it from the node that wrote it"
        )
    model = read_model(path, without_module=True)
    if not files.optim:
        return _Stage(model, None)
    optimizer = read_ranks(files)
    if model.param_shapes is None and optimizer.ranks[0].root.get("param_shapes") is None:
        model = replace(model, param_shapes=_from_slices(optimizer, layers))
    return _Stage(model, optimizer)


def _from_slices(optimizer: Optimizer, layers: _Layers) -> list[Shapes]:
    """The parameters where only BF16_Optimizer names them: at stage 0 there is no `param_shapes` (0.18.5 on).

    `param_slice_mappings` has the length of each one's part on each rank, in the order of the flats; the shapes are those
    in the layers' files.
    """
    groups: list[dict[str, int]] = []
    for rank in optimizer.ranks:
        mappings = rank.state.get("param_slice_mappings")
        if not isinstance(mappings, list):
            raise UnsupportedLayout(f"{rank.path}: no file names the parameters of this pipeline stage in their order")
        groups += [{} for _ in range(len(groups), len(mappings))]
        for group, mapping in zip(groups, mappings, strict=False):
            for name, part in named(rank.path, mapping, "param_slice_mappings").items():
                numel = as_int(part.field("numel")) if isinstance(part, Opaque) else None
                if numel is None or numel < 0:
                    raise InconsistentCheckpoint(f"{rank.path}: param_slice_mappings[{name!r}] is {brief(part)}")
                group[name] = group.get(name, 0) + numel
    path = optimizer.ranks[0].path
    return [{name: _shape(path, name, numel, layers) for name, numel in group.items()} for group in groups]


def _shape(path: str, name: str, numel: int, layers: _Layers) -> tuple[int, ...]:
    number, _, rest = name.partition(".")
    if name.startswith(TIED):
        rest = name.split(".", 2)[-1]
        number = next((str(n) for n, weights in layers.items() if rest in weights and weights[rest].numel == numel), "")
    ref = layers.get(int(number), {}).get(rest) if number.isdecimal() else None
    if ref is None or ref.numel != numel:
        found = "it is in no layer's file" if ref is None else f"its layer's file has {list(ref.shape)}"
        raise InconsistentCheckpoint(f"{path}: {name!r} has {numel} elements, {found}")
    return ref.shape


def _weights(archive: Archive) -> dict[str, TensorRef]:
    """A layer's state dict; what is no tensor in it (a layer's extra state) is passed over."""
    found = named(archive.path, archive.root, "the file")
    return {name: ref for name, ref in found.items() if isinstance(ref, TensorRef)}


def _require_layers(directory: str, stages: Sequence[_Stage], layers: _Layers) -> None:
    """Every layer that a name belongs to has a file."""
    numbers = {name.split(".", 1)[0] for stage in stages for name in stage.names if not name.startswith(TIED)}
    lacking = sorted({int(text) for text in numbers if text.isdecimal()} - layers.keys())
    if lacking:
        raise MissingFiles(
            f"{directory}: no files of layers {spans(lacking)} (layer_{lacking[0]:02d}-*model_states.pt); they hold the buffers "
            "and frozen weights, copy them from the nodes that wrote them"
        )
    if len({stage.optimizer is None for stage in stages}) > 1:
        raise MissingFiles(f"{directory}: some pipeline stages have no *_optim_states.pt; copy them from their nodes")


_Pairs = list[tuple[LazyTensor, LazyTensor]]


def _masters(stages: Sequence[_Stage], state: str | None) -> tuple[dict[str, LazyTensor], _Pairs]:
    """All stages' parameters, and for tied ones the first stage's with a later stage's copy."""
    trainable: dict[str, LazyTensor] = {}
    twice: _Pairs = []
    for stage in stages:
        if stage.optimizer is not None:
            found = zero12.parameters(stage.optimizer, stage.model, state)
            check_once(stage.model.path, trainable, {name: 0 for name in found if not name.startswith(TIED)})
            twice += [(trainable[name], tensor) for name, tensor in found.items() if name in trainable]
            trainable = found | trainable
    return trainable, twice


def _named(
    layers: _Layers, trainable: dict[str, LazyTensor], stages: Sequence[_Stage]
) -> tuple[dict[str, TensorRef], _Pairs]:
    """The layers' weights under the names of a PipelineModule, and pairs of what several layers hold of a tied one."""
    known = {name for stage in stages for name in stage.names}
    tied = tied_names(known)
    module: dict[str, TensorRef] = {}
    again: _Pairs = []
    for layer, weights in layers.items():
        prefix = f"{layer}."
        if weights and not any(prefix + name in known for name in weights):
            prefix = tied_prefix(weights, tied, trainable) or prefix
        for name, ref in weights.items():
            if prefix + name in module:
                again.append((view(prefix + name, module[prefix + name], "module"), view(prefix + name, ref, "module")))
            else:
                module[prefix + name] = ref
    return module, again


def _told(trainable: dict[str, LazyTensor], twice: _Pairs, again: _Pairs) -> list[str]:
    """Where the copies of tied weights differ, by samples. What no master tells apart, layer files do."""
    pairs = twice + [(one, other) for one, other in again if one.name not in trainable]
    differing = [one.name for one, other in pairs if not alike([one, other])]
    if not differing:
        return []
    return [
        f"the copies of {len(differing)} tied weights ({differing[0]!r} first) differ between the places they are used at; "
        "the first one's values are taken, as DeepSpeed does when it loads them"
    ]


def _unpartitioned(model: ModelStates, stages: Sequence[_Stage]) -> dict[str, LazyTensor]:
    """Without ZeRO, the masters that the stages' own 16-bit wrappers keep."""
    candidates = zero0.candidates_of(model)
    masters: dict[str, LazyTensor] = {}
    for stage in stages:
        left = {name: tensor for name, tensor in candidates.items() if name not in masters}
        masters.update(zero0.masters_of(stage.model.root.get("optimizer"), left))
    return masters


def _below(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return "stage 0"
    return f"ZeRO-{optimizer.stage}" if optimizer.stage else "BF16_Optimizer"


def _archives(stages: Sequence[_Stage], layers: dict[int, Archive]) -> Iterator[Archive]:
    yield from (stage.model.archive for stage in stages)
    yield from (rank.archive for stage in stages if stage.optimizer for rank in stage.optimizer.ranks)
    yield from layers.values()
