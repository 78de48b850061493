"""Writes checkpoints of any size in DeepSpeed 0.19.8's exact form (bf16 training, fp32 masters), without torch or DeepSpeed.

python -m benchmarks.generate DIRECTORY --model 1B --stage 3 --world 8

The Adam states are holes unless asked for: they have their full size, and take no space.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.archive import pickled, save, write
from benchmarks.models import PRESETS, Model, Parameter, llama, with_lora
from benchmarks.pickled import Call, Content, Global, Storage, Tensor, ordered, size
from benchmarks.values import Values

VERSION: Final = "0.19.8"
TAG: Final = "global_step100"
_SUB_GROUP: Final = 1_000_000_000  # elements of a rank; DeepSpeed's default
_OPTIM: Final = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@dataclass(frozen=True, slots=True)
class Spec:
    """What to generate. `adam` writes real numbers into the Adam states; `sparse` leaves holes in the weights too."""

    model: Model
    stage: int
    world: int
    sparse: bool = False
    adam: bool = False
    sub_group: int = _SUB_GROUP

    @property
    def values(self) -> Values:
        """The values of the parameters."""
        return Values(self.sparse)

    @property
    def expected_bytes(self) -> int:
        """Bytes of all weights as fp32."""
        return 4 * self.model.numel


def generate(root: Path, spec: Spec) -> Path:
    """Writes the checkpoint below `root` and returns `root`."""
    directory = root / TAG
    directory.mkdir(parents=True)
    writer = _Stage3(spec, directory) if spec.stage == 3 else _Stage12(spec, directory)
    writer.write()
    (root / "latest").write_text(TAG)
    return root


class _Stage:
    """What all stages share."""

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


class _Stage12(_Stage):
    """ZeRO-1 and -2: a group is one vector, cut over the ranks without regard to parameters."""

    def __init__(self, spec: Spec, directory: Path) -> None:
        super().__init__(spec, directory)
        self.groups = self.model.groups
        self.starts = [_offsets(group) for group in self.groups]  # in elements, the total last
        alignment = 2 * spec.world
        self.padded = [-(-starts[-1] // alignment) * alignment for starts in self.starts]

    def write(self) -> None:
        """Writes all files."""
        save(self._model_file(), self.directory / "mp_rank_00_model_states.pt")
        for rank in range(self.spec.world):
            self._write_rank(rank)

    def _model_file(self) -> object:
        flats = [Storage(2, padded, self._run(group, 0, padded, 2)) for group, padded in enumerate(self.padded)]
        views: dict[str, object] = {
            p.name: Tensor(flat, p.shape, offset)
            for flat, group, starts in zip(flats, self.groups, self.starts, strict=True)
            for p, offset in zip(group, starts, strict=False)
        }
        frozen: dict[str, object] = {
            p.name: Tensor(Storage(2, p.numel, self._whole(p)), p.shape) for p in self.model.frozen
        }
        module = {p.name: views.get(p.name) or frozen[p.name] for p in self.model.parameters}
        if self.spec.stage == 1:
            return self.model_states(module, self.groups, shapes=None, fragments=None)
        shapes: dict[str, object] = {p.name: size(p.shape) for p in self.model.frozen}
        return self.model_states(module, self.groups, shapes=ordered(shapes), fragments=ordered(frozen))

    def _whole(self, parameter: Parameter) -> Content:
        return lambda: self.part(parameter, 0, parameter.numel, 2)

    def _run(self, group: int, start: int, stop: int, itemsize: int) -> Content:
        return lambda: self._elements(group, start, stop, itemsize)

    def _elements(self, group: int, start: int, stop: int, itemsize: int) -> Iterator[memoryview | int]:
        starts = self.starts[group]
        for parameter, first, last in zip(self.groups[group], starts, starts[1:], strict=False):
            if first < stop and last > start:
                yield from self.part(parameter, max(start, first) - first, min(stop, last) - first, itemsize)
        if stop > max(start, starts[-1]):
            yield (stop - max(start, starts[-1])) * itemsize

    def _write_rank(self, rank: int) -> None:
        flats: list[object] = []
        paddings: list[object] = []
        addresses: list[object] = []
        lengths = [padded // self.spec.world for padded in self.padded]
        for group, length in enumerate(lengths):
            start = rank * length
            used = min(max(self.starts[group][-1] - start, 0), length)
            storage = Storage(4, length, self._run(group, start, start + length, 4))
            flats.append(Tensor(storage, (used,), requires_grad=True))
            paddings.append(length - used)
            addresses.append(ordered(self._addresses(group, start, start + length)))
        self.save_optim(
            rank,
            {
                "loss_scaler": self.loss_scaler(),
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 1.0,
                "base_optimizer_state": self.adam(rank, lengths),
                "single_partition_of_fp32_groups": flats,
                "zero_stage": self.stage_enum(),
                "group_paddings": paddings,
                "param_alignment_paddings": [[0] * len(group) for group in self.groups],
                "partition_count": [self.spec.world] * len(self.groups),
                "ds_version": VERSION,
                "param_slice_mappings": addresses,
            },
        )

    def _addresses(self, group: int, start: int, stop: int) -> dict[str, object]:
        kind = Global("deepspeed.utils.tensor_fragment", "fragment_address")
        found: dict[str, object] = {}
        starts = self.starts[group]
        for parameter, first, last in zip(self.groups[group], starts, starts[1:], strict=False):
            if first < stop and last > start:
                at = max(first, start)
                found[parameter.name] = Call(kind, state={"numel": min(last, stop) - at, "start": at - start}, new=True)
        return found


class _Stage3(_Stage):
    """ZeRO-3: each parameter is cut over the ranks on its own; frozen ones lie in every rank's model file."""

    def __init__(self, spec: Spec, directory: Path) -> None:
        super().__init__(spec, directory)
        self.groups = [sub for group in self.model.groups for sub in self._sub_groups(group)]

    def length(self, parameter: Parameter) -> int:
        """Elements of a parameter on one rank."""
        return -(-parameter.numel // self.spec.world)

    def _sub_groups(self, group: list[Parameter]) -> Iterator[list[Parameter]]:
        current: list[Parameter] = []
        for parameter in group:
            current.append(parameter)
            if sum(map(self.length, current)) >= self.spec.sub_group:
                yield current
                current = []
        if current:
            yield current

    def write(self) -> None:
        """Writes all files."""
        same = None if self.model.frozen else pickled(self._model_file(0))
        for rank in range(self.spec.world):
            path = self.directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            write(same or pickled(self._model_file(rank)), path)
            self._write_rank(rank)

    def _piece(self, parameter: Parameter, rank: int, itemsize: int) -> Iterator[memoryview | int]:
        length = self.length(parameter)
        return self.part(parameter, rank * length, (rank + 1) * length, itemsize)

    def _model_file(self, rank: int) -> object:
        module: dict[str, object] = {p.name: Tensor(Storage(2, 0, list), (0,)) for p in self.model.parameters}
        fragments: dict[str, object] = {}
        for parameter in self.model.frozen:
            storage = Storage(2, self.length(parameter), self._fragment(parameter, rank))
            fragments[parameter.name] = Tensor(storage, (storage.numel,))
        shapes: dict[str, object] = {p.name: size(p.shape) for p in self.model.frozen}
        return self.model_states(module, self.groups, shapes=ordered(shapes), fragments=ordered(fragments))

    def _fragment(self, parameter: Parameter, rank: int) -> Content:
        return lambda: self._piece(parameter, rank, 2)

    def _flat(self, group: list[Parameter], rank: int) -> Content:
        return lambda: (part for parameter in group for part in self._piece(parameter, rank, 4))

    def _write_rank(self, rank: int) -> None:
        lengths = [sum(map(self.length, group)) for group in self.groups]
        flats: list[object] = []
        for group, length in zip(self.groups, lengths, strict=True):
            ids = f"{self.index[group[0].name]}_{self.index[group[-1].name]}"
            storage = Storage(4, length, self._flat(group, rank))
            flats.append(Tensor(storage, (length,), requires_grad=True, attributes={"ds_id": ids}))
        self.save_optim(
            rank,
            {
                "zero_stage": self.stage_enum(),
                "loss_scaler": self.loss_scaler(),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": self.spec.world,
                "optimizer_state_dict": self.adam(rank, lengths),
                "fp32_flat_groups": flats,
            },
        )


def _offsets(group: list[Parameter]) -> list[int]:
    offsets = [0]
    for parameter in group:
        offsets.append(offsets[-1] + parameter.numel)
    return offsets


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=PRESETS, default="1B")
    parser.add_argument("--layers", type=int, help="another number of layers than the model has")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--world", type=int, default=8, metavar="RANKS")
    parser.add_argument("--sparse", action="store_true", help="leave holes in the weights too, but for a few places")
    parser.add_argument("--adam", action="store_true", help="write the Adam states in full")
    parser.add_argument("--lora", action="store_true", help="freeze the model and add adapters")
    args = parser.parse_args()
    model = llama(args.model, layers=args.layers)
    spec = Spec(with_lora(model) if args.lora else model, args.stage, args.world, args.sparse, args.adam)
    print(generate(args.directory, spec))


if __name__ == "__main__":
    main()
