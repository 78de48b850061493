"""ZeRO-1 and -2 checkpoints: a group is one vector, cut over the ranks without regard to parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.archive import save
from benchmarks.models import Parameter
from benchmarks.pickled import Call, Content, Global, Storage, Tensor, ordered, size
from benchmarks.spec import Spec
from benchmarks.stages import VERSION, Stage


class Stage12(Stage):
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


def _offsets(group: list[Parameter]) -> list[int]:
    offsets = [0]
    for parameter in group:
        offsets.append(offsets[-1] + parameter.numel)
    return offsets
