"""What is written at each stage: how values are cut over ranks, and where their names are kept."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from tests import foreign
from tests.generator.spec import Param, Spec, Truth
from tests.generator.writer import Writer


class Stage0(Writer):
    """`module` alone, and masters without names."""

    def write(self) -> None:
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


class Stage12(Writer):
    """A flat vector for each group, cut into equal partitions."""

    def write(self) -> None:
        groups = self.by_group()
        layouts = [self.lay_out(group) for group in groups]
        tensors = dict(self.halves)
        for group, (vector, starts, _) in zip(groups, layouts, strict=True):
            flat = vector.to(self.dtype)  # the module's tensors are views of one flat buffer
            for param, start in zip(group, starts, strict=True):
                tensors[param.name] = flat[start : start + param.numel].view(param.shape)
        self.fill_module(tensors)
        self.want_all()
        for rank in range(self.spec.world):
            self.write_rank(rank, groups, layouts)
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

    def want_all(self) -> None:
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

    def write_rank(self, rank: int, groups: list[list[Param]], layouts: list[Any]) -> None:
        spec = self.spec
        flats, group_paddings, slices = [], [], []
        for group, (vector, _, paddings) in zip(groups, layouts, strict=True):
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
        state["single_partition_of_fp32_groups"] = flats
        if spec.release >= 2:
            state |= {"group_paddings": group_paddings, "param_slice_mappings": slices}
        if spec.release == 3 and not spec.bf16_optimizer:
            state["param_alignment_paddings"] = [paddings for _, _, paddings in layouts]
        state["partition_count"] = [spec.world] * len(flats) if spec.count_as_list else spec.world
        self.save_optim(rank, state, [OrderedDict((p.owner_name, self.shape(p)) for p in g) for g in groups])


class Stage3(Writer):
    """Every parameter cut on its own."""

    def write(self) -> None:
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
            self.write_rank(rank, subs, shapes, pieces)
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

    def write_rank(
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
        state["fp32_flat_groups"] = flats
        self.save_optim(rank, state, shapes)


def write(spec: Spec, root: Path) -> Truth:
    """Writes the checkpoint below `root` and says what must come out of it."""
    writer = {0: Stage0, 1: Stage12, 2: Stage12, 3: Stage3}[spec.stage](spec, root)
    writer.make()
    writer.write()
    return writer.truth
