"""Checkpoints as DeepSpeed writes them, of any stage and any shape, with the values that must come out again.

A `Spec` says what is to be written, `write` writes it with torch and returns the truth, `specs` draws any of them. The
truth is what the writer put in: nothing here knows how lazyzero reads.
"""

from __future__ import annotations

import argparse
import io
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st

from tests import foreign

Kind = Literal["trained", "frozen", "left out"]
Shared = Literal["right", "from first name", "chain", "empty", "absent"]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLATS12, FLATS3 = "single_partition_of_fp32_groups", "fp32_flat_groups"


@dataclass(frozen=True)
class Param:
    """A parameter; `aliases` are more names of the same tensor, standing later in the module than `name`."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "trained"
    group: int = 0
    aliases: tuple[str, ...] = ()
    owner: int = 0  # which of its names `param_shapes` and the fragments know it by

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def owner_name(self) -> str:
        return self.names[self.owner % len(self.names)]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Buffer:
    """A persistent buffer; `form` says how it lies in its storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    form: Literal["whole", "transposed", "inside", "stepped"] = "whole"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """Everything that decides the files. `release` 3: 0.19.8, 2: 0.9.5, 1: 0.6.7, 0: 0.5.10."""

    stage: int = 2
    world: int = 2
    precision: str = "bf16"
    params: tuple[Param, ...] = (Param("weight", (3, 5)),)
    buffers: tuple[Buffer, ...] = ()
    release: int = 3
    bf16_optimizer: bool = False
    master: str = "fp32"
    groups: int = 1
    sub_group: int = 1 << 30
    aligned: bool = False
    exclude_frozen: bool = False
    legacy: bool = False
    archive_root: bool = False
    shape_as: Literal["Size", "list", "tuple"] = "Size"
    shared: Shared = "right"
    adam: bool = True
    client: bool = False
    extra_state: bool = False
    mics: int = 1
    flat_masters: bool = False
    rebuilt_from_type: bool = False
    count_as_list: bool = True
    seed: int = 0


@dataclass
class Truth:
    """What must come out: `want` has every name, in the dtype stored.

    `missing` are names in `module` whose data no file has, `mentioned` names that at most `shared_params` tells of.
    """

    root: Path
    tag: Path
    want: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    mentioned: set[str] = field(default_factory=set)
    layout: str = ""
    world: int = 1


VERSIONS = ("0.5.10", "0.6.7", "0.9.5", "0.19.8")


class _Writer:
    """One checkpoint being written."""

    def __init__(self, spec: Spec, root: Path) -> None:
        self.spec = spec
        self.rng = np.random.default_rng(spec.seed)
        self.tag = root / "global_step3"
        self.tag.mkdir(parents=True)
        (root / "latest").write_text("global_step3")
        self.truth = Truth(root, self.tag)
        self.dtype = PRECISIONS[spec.precision]
        self.master = PRECISIONS[spec.master] if spec.stage else torch.float32
        self.number = 0
        self.masters: dict[str, torch.Tensor] = {}  # by the parameter's first name
        self.halves: dict[str, torch.Tensor] = {}  # what the module holds, by the parameter's first name
        self.module: dict[str, Any] = {}

    # -- values ------------------------------------------------------------------------------------------------

    def values(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Random values, some of them any bits at all; the first one of each tensor is unlike all others' first."""
        shape = tuple(shape)
        count = math.prod(shape)
        plain = self.rng.standard_normal(count).astype(np.float32)
        wild = self.rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
        mixed = np.where((self.rng.random(count) < 0.2) & ~np.isnan(wild), wild, plain)
        self.number += 1
        if count:
            mixed[0] = (1 + self.number) * (1 + 2.0**-13)  # exact in no 16-bit type, and different in all of them
        return torch.from_numpy(mixed).reshape(shape).to(dtype)

    def garbage(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Padding, which must never be seen again."""
        return torch.full((count,), -777.0, dtype=dtype)

    def buffer(self, buffer: Buffer) -> torch.Tensor:
        dtype = getattr(torch, buffer.dtype)
        shape = buffer.shape
        if buffer.form == "transposed" and len(shape) == 2:
            return self.any_values((shape[1], shape[0]), dtype).t()
        if buffer.form == "inside":
            count = math.prod(shape)
            return self.any_values((count + 7,), dtype)[3 : 3 + count].reshape(shape)
        if buffer.form == "stepped" and len(shape) == 1:
            return self.any_values((2 * shape[0] + 1,), dtype)[: 2 * shape[0] : 2]
        return self.any_values(shape, dtype)

    def any_values(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return self.values(shape, torch.float32).to(dtype)
        if dtype is torch.bool:
            return torch.from_numpy(np.asarray(self.rng.random(shape) < 0.5)).reshape(shape)
        return torch.from_numpy(np.asarray(self.rng.integers(0, 100, shape))).to(dtype).reshape(shape)

    # -- the parts both kinds of file have in common -----------------------------------------------------------

    def make(self) -> None:
        """Values for every parameter; `module` and the truth from them."""
        for param in self.spec.params:
            master = self.values(param.shape, self.master)
            # What training computes with; a frozen one was never anything else.
            half = master.to(self.dtype)
            if not self.in_flats(param):
                master = half
            self.masters[param.name], self.halves[param.name] = master, half

    def shape(self, param: Param) -> Any:
        make: dict[str, Any] = {"Size": torch.Size, "list": list, "tuple": tuple}
        return make[self.spec.shape_as](param.shape)

    def in_flats(self, param: Param) -> bool:
        """Whether the optimizer has it: 0.19.8 leaves zero-sized ones to the frozen."""
        return param.kind == "trained" and (param.numel > 0 or self.spec.release < 3)

    def by_group(self) -> list[list[Param]]:
        """The parameters of each group in the optimizer's order, which is not the module's."""
        groups: list[list[Param]] = [[] for _ in range(self.spec.groups)]
        for param in self.spec.params:
            if self.in_flats(param):
                groups[param.group % self.spec.groups].append(param)
        for group in groups:
            self.rng.shuffle(group)  # type: ignore[arg-type]
        return groups

    def frozen(self) -> list[Param]:
        """What the optimizer does not own, as `frozen_param_shapes` lists it (0.9.1 on)."""
        if self.spec.exclude_frozen:
            return []
        unowned = [p for p in self.spec.params if p.kind == "trained" and not p.numel and self.spec.release == 3]
        return [p for p in self.spec.params if p.kind == "frozen" or p in unowned]

    def shared_params(self) -> dict[str, str] | None:
        """alias -> owner, in the ways it has been recorded; None where the key did not exist."""
        if self.spec.shared == "absent" or self.spec.release < 2:
            return None
        shared: dict[str, str] = {}
        for param in self.spec.params:
            owner = param.owner_name if self.spec.shared == "right" else param.name
            others = [name for name in param.names if name != owner]
            if self.spec.shared == "chain":
                shared.update(dict(zip(others, [owner, *others], strict=False)))
            elif self.spec.shared in ("right", "from first name"):
                shared.update(dict.fromkeys(others, owner))
        return shared

    def fill_module(self, tensors: dict[str, torch.Tensor]) -> None:
        """`module`: `tensors` (by a parameter's first name) under all their names, and the buffers."""
        names: list[tuple[str, torch.Tensor]] = []
        for param in self.spec.params:
            if param.kind == "frozen" and self.spec.exclude_frozen:
                # DeepSpeed leaves out the one name it knows the parameter by.
                names += [(n, tensors[param.name]) for n in param.names if n != param.owner_name]
            else:
                names += [(name, tensors[param.name]) for name in param.names]
        for buffer in self.spec.buffers:
            value = self.buffer(buffer)
            names += [(name, value) for name in (buffer.name, *buffer.aliases)]
            self.want((buffer.name, *buffer.aliases), value)
        if self.spec.extra_state:
            value = torch.arange(6, dtype=torch.uint8)
            names += [("mod._extra_state", value)]
            self.truth.want["mod._extra_state"] = value
        self.module = OrderedDict(names)
        if self.spec.extra_state:
            self.module["other._extra_state"] = {"amax": [1.0, 2.0]}

    def want(self, names: tuple[str, ...], value: torch.Tensor) -> None:
        for name in names:
            self.truth.want[name] = value
            if name != names[0]:
                self.truth.tied[name] = names[0]

    def model_state(self, rank: int) -> dict[str, Any]:
        spec = self.spec
        state: dict[str, Any] = {"module": self.module}
        state["buffer_names"] = [name for b in spec.buffers for name in (b.name, *b.aliases)]
        state["optimizer"] = None
        if spec.release >= 2 and spec.stage:
            state["frozen_param_shapes"] = state["frozen_param_fragments"] = None
        shared = self.shared_params()
        if shared is not None:
            state["shared_params"] = shared if rank == 0 and spec.stage else {}
        state["dp_world_size"] = spec.world * spec.mics
        state["mp_world_size"] = 1
        state["global_steps"] = 3
        state["ds_config"] = self.config()
        state["ds_version"] = VERSIONS[spec.release]
        if spec.client:
            state |= self.client_state()
        return state

    def client_state(self) -> dict[str, Any]:
        """What users put there: everything."""
        return {
            "args": argparse.Namespace(lr=1e-3, layers=[1, 2]),
            "callback": foreign.Callback({"depth": (1, 2, {3})}),
            "reduced": [foreign.Reduced(), foreign.Reduced()],
            "np_rng": np.random.get_state(),
            "scalar": np.float32(3.5),
            "array": np.arange(3),
            "torch_rng": torch.get_rng_state(),
            "nested": {"t": torch.ones(2, 3), 5: {None, True}, (1, "a"): b"bytes", "big": 1 << 100},
            "parameter": torch.nn.Parameter(torch.ones(2)),
        }

    def config(self) -> dict[str, Any]:
        return {
            "zero_optimization": {"stage": self.spec.stage},
            "bf16": {"enabled": self.spec.precision == "bf16"},
            "fp16": {"enabled": self.spec.precision == "fp16"},
        }

    def save(self, state: Any, name: str) -> None:
        path = self.tag / name
        with foreign.importable():
            if self.spec.legacy:
                torch.save(state, path, _use_new_zipfile_serialization=False)
            elif self.spec.archive_root:
                buffer = io.BytesIO()
                torch.save(state, buffer)
                path.write_bytes(buffer.getvalue())
            else:
                torch.save(state, path)

    def optim_name(self, rank: int) -> str:
        prefix = "bf16_" if self.spec.precision == "bf16" and self.spec.release >= 1 else ""
        return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def save_optim(self, rank: int, state: dict[str, Any], shapes: list[Any]) -> None:
        file: dict[str, Any] = {"optimizer_state_dict": state, "ds_config": self.config()}
        if self.spec.release >= 1:
            file["ds_version"] = VERSIONS[self.spec.release]
        else:
            file["param_shapes"] = shapes
        self.save(file, self.optim_name(rank))

    def adam_state(self, flats: list[torch.Tensor]) -> dict[str, Any]:
        """Optimizer state that could be mistaken for weights."""
        state = {
            index: {"step": torch.tensor(3.0), "exp_avg": flat.clone() + 1, "exp_avg_sq": flat.clone() + 2}
            for index, flat in enumerate(flats)
        }
        return {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]} for _ in flats]}

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat as torch pickles it, plain or through the subclass path."""
        if not self.spec.rebuilt_from_type:
            return flat
        flat.noticed = "an attribute makes torch use _rebuild_from_type_v2"  # type: ignore[attr-defined]
        return flat

    # -- stages 1 and 2 ----------------------------------------------------------------------------------------

    def write_12(self) -> None:
        groups = self.by_group()
        layouts = [self.lay_out(group) for group in groups]
        tensors = dict(self.halves)
        for group, (vector, starts, _) in zip(groups, layouts, strict=True):
            flat = vector.to(self.dtype)  # the module's tensors are views of one flat buffer
            for param, start in zip(group, starts, strict=True):
                tensors[param.name] = flat[start : start + param.numel].view(param.shape)
        self.fill_module(tensors)
        self.want_12()
        for rank in range(self.spec.world):
            self.write_12_rank(rank, groups, layouts)
        shapes = [OrderedDict((p.owner_name, self.shape(p)) for p in group) for group in groups]
        state = self.model_state(0)
        if self.spec.release >= 1:
            state["param_shapes"] = shapes
        if self.spec.stage == 2 and self.spec.release >= 2 and not self.spec.bf16_optimizer:
            frozen = self.frozen()
            if not self.spec.exclude_frozen:
                state["frozen_param_shapes"] = OrderedDict((p.owner_name, self.shape(p)) for p in frozen)
                state["frozen_param_fragments"] = OrderedDict((p.owner_name, tensors[p.name]) for p in frozen)
        self.save(state, "mp_rank_00_model_states.pt")
        shown = 2 if self.spec.release == 1 else self.spec.stage
        self.truth.layout = "BF16_Optimizer" if self.spec.bf16_optimizer else f"ZeRO-{shown}"
        self.truth.world = self.spec.world

    def want_12(self) -> None:
        for param in self.spec.params:
            if param.kind == "frozen" and self.spec.exclude_frozen:
                others = tuple(n for n in param.names if n != param.owner_name)
                if others:  # the value is still there under another name; the first is known if sharing is recorded
                    recorded = self.shared_params() or {}
                    known = (param.owner_name,) if param.owner_name in {*recorded, *recorded.values()} else ()
                    self.want((*others, *known), self.halves[param.name])
            else:
                self.want(param.names, self.masters[param.name])

    def lay_out(self, group: list[Param]) -> tuple[torch.Tensor, list[int], list[int]]:
        """A group's flat vector, padded for the world; where each parameter starts; its alignment paddings."""
        aligned = self.spec.aligned and self.spec.release == 3 and not self.spec.bf16_optimizer
        step = 16 // math.gcd(16, self.dtype.itemsize) if aligned else 1
        parts, starts, paddings, at = [torch.empty(0, dtype=self.master)], [], [], 0
        for number, param in enumerate(group, start=1):
            starts.append(at)
            at += param.numel
            padding = 0 if number == len(group) else -at % step
            parts += [self.masters[param.name].reshape(-1), self.garbage(padding, self.master)]
            paddings.append(padding)
            at += padding
        parts.append(self.garbage(-at % (2 * self.spec.world), self.master))
        return torch.cat(parts), starts, paddings

    def write_12_rank(self, rank: int, groups: list[list[Param]], layouts: list[Any]) -> None:
        spec = self.spec
        flats, group_paddings, slices = [], [], []
        for group, (vector, starts, paddings) in zip(groups, layouts, strict=True):
            size = len(vector) // spec.world
            used = sum(p.numel for p in group) + sum(paddings)
            padding = min(size, max(0, (rank + 1) * size - used))
            cut = padding
            if spec.bf16_optimizer:
                cut, padding = 0, len(vector) - used if rank == spec.world - 1 else 0
            partition = vector[rank * size : (rank + 1) * size].clone()
            flats.append(self.tensor(partition[: size - cut]))
            group_paddings.append(padding)
            slices.append(OrderedDict((p.owner_name, foreign.fragment_address(p.numel, 0)) for p in group))
        state: dict[str, Any] = {"clip_grad": 1.0}
        if not spec.bf16_optimizer:
            state |= {"loss_scaler": foreign.LossScaler(), "dynamic_loss_scale": False, "overflow": False}
            enum = spec.release >= 2
            state["zero_stage"] = foreign.ZeroStageEnum(spec.stage) if enum else 2 if spec.release == 1 else spec.stage
        if spec.adam:
            state["base_optimizer_state"] = self.adam_state(flats)
        state[FLATS12] = flats
        if spec.release >= 2:
            state |= {"group_paddings": group_paddings, "param_slice_mappings": slices}
        if spec.release == 3 and not spec.bf16_optimizer:
            state["param_alignment_paddings"] = [paddings for _, _, paddings in layouts]
        state["partition_count"] = [spec.world] * len(flats) if spec.count_as_list else spec.world
        self.save_optim(rank, state, [OrderedDict((p.owner_name, self.shape(p)) for p in g) for g in groups])

    # -- stage 3 -----------------------------------------------------------------------------------------------

    def write_3(self) -> None:
        size = 0 if self.spec.release >= 1 else 1
        self.fill_module({p.name: torch.empty(size, dtype=self.dtype) for p in self.spec.params})
        frozen = self.frozen() if self.spec.release >= 2 else []
        for param in self.spec.params:
            held = self.in_flats(param) or param in frozen
            if held:
                self.want(param.names, self.masters[param.name])
            elif param.kind == "frozen" and self.spec.exclude_frozen:
                self.truth.missing |= set(param.names) - {param.owner_name}
                self.truth.mentioned.add(param.owner_name)
            else:
                self.truth.missing |= set(param.names)
        subs = [sub for group in self.by_group() for sub in self.sub_groups(group)]
        shapes = [OrderedDict((p.owner_name, self.shape(p)) for p in sub) for sub in subs]
        pieces = {p.name: self.cut(self.masters[p.name]) for p in self.spec.params if self.in_flats(p)}
        fragments = {p.name: self.cut(self.halves[p.name]) for p in frozen}
        for rank in range(self.spec.world):
            self.write_3_rank(rank, subs, shapes, pieces)
            state = self.model_state(rank)
            if self.spec.release >= 1:
                state["param_shapes"] = shapes
            if self.spec.release >= 2 and not self.spec.exclude_frozen:
                state["frozen_param_shapes"] = OrderedDict((p.owner_name, self.shape(p)) for p in frozen)
                state["frozen_param_fragments"] = OrderedDict((p.owner_name, fragments[p.name][rank]) for p in frozen)
            self.save(state, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        self.truth.layout, self.truth.world = "ZeRO-3", self.spec.world

    def sub_groups(self, group: list[Param]) -> list[list[Param]]:
        """Consecutive parameters, a new sub-group once one is full."""
        subs: list[list[Param]] = [[]]
        for param in group:
            subs[-1].append(param)
            if sum(p.numel for p in subs[-1]) >= self.spec.sub_group:
                subs.append([])
        return [sub for sub in subs if sub]

    def cut(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's piece, the last ones padded."""
        part = -(-value.numel() // self.spec.world)
        padded = torch.cat([value.reshape(-1), self.garbage(part * self.spec.world - value.numel(), value.dtype)])
        return [padded[rank * part : (rank + 1) * part].clone() for rank in range(self.spec.world)]

    def write_3_rank(
        self, rank: int, subs: list[list[Param]], shapes: list[Any], pieces: dict[str, list[torch.Tensor]]
    ) -> None:
        flats = [self.tensor(torch.cat([pieces[p.name][rank] for p in sub])) for sub in subs]
        state: dict[str, Any] = {
            "zero_stage": foreign.ZeroStageEnum.weights if self.spec.release >= 2 else 3,
            "loss_scaler": foreign.LossScaler(),
            "partition_count": self.spec.world,
        }
        if self.spec.adam:
            state["optimizer_state_dict"] = self.adam_state(flats)
        state[FLATS3] = flats
        self.save_optim(rank, state, shapes)

    # -- stage 0 -----------------------------------------------------------------------------------------------

    def write_0(self) -> None:
        """No partitions; a 16-bit wrapper's masters lie in the model file, without names."""
        self.fill_module(dict(self.halves))
        groups = self.by_group()
        wrapped = self.spec.precision != "fp32"
        for param in self.spec.params:
            masters = self.masters if wrapped and self.in_flats(param) else self.halves
            self.want(param.names, masters[param.name])
        state = self.model_state(0)
        state["param_shapes"] = None
        if wrapped:
            masters = [[self.masters[p.name] for p in group] for group in groups]
            flats = [torch.cat([torch.empty(0), *(m.reshape(-1) for m in group)]) for group in masters]
            made = {"fp32_groups_flat": flats} if self.spec.flat_masters else {"fp32_groups": masters}
            state["optimizer"] = {"cur_scale": 16, **made}
        self.save(state, "mp_rank_00_model_states.pt")
        self.truth.layout = "stage 0"


def write(spec: Spec, root: Path) -> Truth:
    """Writes the checkpoint below `root` and says what must come out of it."""
    writer = _Writer(spec, root)
    writer.make()
    {0: writer.write_0, 1: writer.write_12, 2: writer.write_12, 3: writer.write_3}[spec.stage]()
    return writer.truth


# -- drawing -----------------------------------------------------------------------------------------------------

_NAME = st.one_of(
    st.sampled_from(
        ["w", "weight", "layers.0.weight", "layers.10.weight", "a b", "0", 'quo"te', "back\\slash", "ünïcödé.权重"]
    ),
    st.text(st.characters(categories=["L", "N", "P", "S"], max_codepoint=0x2FFF), min_size=1, max_size=24),
).filter(lambda name: name.isprintable() and not name.endswith("_extra_state") and name != "__metadata__")

_SHAPES = st.one_of(
    st.sampled_from([(), (1,), (0,), (0, 5), (5, 0), (1, 1), (7,), (17, 3), (33,), (3, 4, 5)]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.integers(1, 700).map(lambda count: (count,)),
)

_BUFFER_DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any checkpoint whose outcome is certain."""
    stage = draw(st.sampled_from([0, 1, 1, 2, 2, 3, 3, 3]))
    release = draw(st.sampled_from([3, 3, 3, 2, 1, 0])) if stage else 3
    bf16_optimizer = stage == 1 and release >= 2 and draw(st.booleans())
    precision = "bf16" if bf16_optimizer else draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    master = draw(st.sampled_from(["fp32", "fp32", precision])) if not bf16_optimizer else "fp32"
    groups = draw(st.integers(1, 3))
    names = iter(draw(st.lists(_NAME, min_size=20, max_size=20, unique=True)))
    exclude = release >= 2 and stage > 0 and draw(st.booleans())
    params = []
    for number in range(draw(st.integers(1, 7))):
        shape = (5, 3) if number == 0 else draw(_SHAPES)
        kind: Kind = "trained" if number == 0 else draw(st.sampled_from(["trained", "trained", "frozen", "left out"]))
        if exclude and not math.prod(shape):
            kind = "trained" if release < 3 else "left out"
        # Two names of nothing are not told from two nothings.
        count = draw(st.sampled_from([0, 0, 1, 2])) if math.prod(shape) else 0
        aliases = tuple(next(names) for _ in range(min(count, 2)))
        group = draw(st.integers(0, groups - 1)) if number else 0
        params.append(Param(next(names), shape, kind, group, aliases, draw(st.integers(0, 2))))
        if number >= 4:
            break
    buffers = []
    for _ in range(draw(st.integers(0, 2))):
        form = draw(st.sampled_from(["whole", "transposed", "inside", "stepped"]))
        shape = draw(st.sampled_from([(), (1,), (0,), (5,), (3, 4), (2, 3, 2)]))
        aliases = (next(names),) if math.prod(shape) and draw(st.booleans()) else ()
        buffers.append(Buffer(next(names), shape, draw(st.sampled_from(_BUFFER_DTYPES)), form, aliases))
    return Spec(
        stage=stage,
        world=draw(st.integers(1, 9)),
        precision=precision,
        params=tuple(params),
        buffers=tuple(buffers),
        release=release,
        bf16_optimizer=bf16_optimizer,
        master=master,
        groups=groups,
        sub_group=draw(st.sampled_from([1, 10, 100, 1 << 30])),
        aligned=draw(st.booleans()),
        exclude_frozen=exclude,
        legacy=draw(st.booleans()),
        archive_root=draw(st.booleans()),
        shape_as=draw(st.sampled_from(["Size", "list", "tuple"])),
        shared=draw(st.sampled_from(["right", "from first name", "chain", "empty", "absent"])),
        adam=draw(st.booleans()),
        client=draw(st.booleans()),
        extra_state=draw(st.booleans()),
        mics=draw(st.sampled_from([1, 1, 4])),
        flat_masters=draw(st.booleans()),
        rebuilt_from_type=draw(st.booleans()),
        count_as_list=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 32)),
    )
