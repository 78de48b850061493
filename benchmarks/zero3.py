"""ZeRO-3 checkpoints: each parameter is cut over the ranks on its own; frozen ones lie in every rank's model file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.archive import pickled, write
from benchmarks.models import Parameter
from benchmarks.pickled import Content, Storage, Tensor, ordered, size
from benchmarks.spec import Spec
from benchmarks.stages import Stage


class Stage3(Stage):
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
