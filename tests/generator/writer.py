"""The parts that all of DeepSpeed's files have in common, made with torch."""

from __future__ import annotations

import argparse
import io
import math
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import foreign
from tests.generator.spec import VERSIONS, Buffer, Param, Spec, Truth

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Writer:
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
