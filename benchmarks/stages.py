"""What the files of all ZeRO stages share, in DeepSpeed 0.19.8's form for bf16 training with fp32 masters and Adam."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.archive import save
from benchmarks.models import Parameter
from benchmarks.pickled import Call, Content, Global, Storage, Tensor, ordered, size
from benchmarks.spec import Spec
from benchmarks.values import Values

VERSION: Final = "0.19.8"
_OPTIM: Final = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class Stage:
    """One checkpoint being written into a tag directory."""

    def __init__(self, spec: Spec, directory: Path) -> None:
        self.spec = spec
        self.model = spec.model
        self.values = spec.values
        self.directory = directory
        self.index = {parameter.name: index for index, parameter in enumerate(spec.model.parameters)}

    def part(self, parameter: Parameter, start: int, stop: int, itemsize: int) -> Iterator[memoryview | int]:
        """Elements [start, stop) of a parameter, zeros where it has no more."""
        end = min(stop, parameter.numel)
        if start < end:
            yield from self.values.parts(self.index[parameter.name], parameter.numel, start, end, itemsize)
        if max(start, end) < stop:
            yield (stop - max(start, end)) * itemsize

    def model_states(self, module: dict[str, object], groups: list[list[Parameter]], **frozen: object) -> object:
        """The contents of a model file."""
        shapes: list[object] = [ordered({p.name: size(p.shape) for p in group}) for group in groups]
        return {
            "module": ordered(module, {"_metadata": ordered({path: {"version": 1} for path in self._modules()})}),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": frozen["shapes"],
            "shared_params": {},
            "frozen_param_fragments": frozen["fragments"],
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": 100,
            "global_samples": 100 * self.spec.world,
            "dp_world_size": self.spec.world,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self.config(),
            "ds_version": VERSION,
        }

    def _modules(self) -> list[str]:
        names = [""]
        for parameter in self.model.parameters:
            path = parameter.name.split(".")[:-1]
            names += [".".join(path[:depth]) for depth in range(1, len(path) + 1)]
        return list(dict.fromkeys(names))

    def config(self) -> dict[str, object]:
        """`ds_config` as the user gave it."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": self.spec.stage},
            "bf16": {"enabled": True},
        }

    def save_optim(self, rank: int, state: dict[str, object]) -> None:
        """Writes a rank's optimizer file."""
        value = {"optimizer_state_dict": state, "ds_config": self.config(), "ds_version": VERSION}
        save(value, self.directory / _OPTIM.format(rank))

    def stage_enum(self) -> Call:
        """`zero_stage`."""
        return Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (self.spec.stage,))

    def loss_scaler(self) -> Call:
        """bf16's, which does nothing."""
        kind = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
        return Call(kind, state={"cur_scale": 1.0, "dynamic": False}, new=True)

    def adam(self, rank: int, lengths: Sequence[int]) -> dict[str, object]:
        """The inner optimizer's state: one pseudo-parameter for each flat group of `lengths` elements."""
        state: dict[object, object] = {}
        for group, numel in enumerate(lengths):
            state[group] = {
                "step": Tensor(Storage(4, 1, lambda: [b"\0\0\xc8\x42"]), ()),
                "exp_avg": Tensor(Storage(4, numel, self._moments(rank, 2 * group, numel)), (numel,)),
                "exp_avg_sq": Tensor(Storage(4, numel, self._moments(rank, 2 * group + 1, numel)), (numel,)),
            }
        groups: list[object] = [
            {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": [group]}
            for group in range(len(lengths))
        ]
        return {"state": state, "param_groups": groups}

    def _moments(self, rank: int, salt: int, numel: int) -> Content:
        if not self.spec.adam:
            return lambda: [4 * numel]
        noise = Values(sparse=False, seed=1)
        return lambda: noise.parts(rank * 64 + salt, numel, 0, numel, 4)
