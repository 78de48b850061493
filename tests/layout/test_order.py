"""The order of parameters in old flats: recovered through `module`, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from made import DATA, assert_tensors, assert_truth, flat, save, values, views_of, zero2

from lazyzero import open_checkpoint
from lazyzero.errors import InconsistentCheckpoint, UnsupportedLayout
from lazyzero.selfcheck import check


@pytest.mark.parametrize("case", ["old_0.3.16_z1_fp16", "old_0.3.16_z2_lora"])
def test_real(case: str) -> None:
    """Real files whose `param_shapes` are in module order, frozen ones among them, come out under the right names."""
    with open_checkpoint(DATA / case / "checkpoint") as checkpoint:
        assert_truth(checkpoint, case)
        assert check(checkpoint.checks, full=True) > 3


def test_zero3_of_that_age_is_refused() -> None:
    """ZeRO-3 has no 16-bit copy to decide the order by: the error names the version and the way out."""
    with pytest.raises(UnsupportedLayout, match=r"before 0\.4\.3 .* save a state dict"):
        open_checkpoint(DATA / "old_0.3.16_z3_plain" / "checkpoint")


def weights(same_shape: bool = False) -> dict[str, torch.Tensor]:
    """Parameters in module order."""
    shapes = [(4, 3)] * 5 if same_shape else [(4, 3), (5,), (3, 4), (2, 6), (7, 3)]
    return {f"p{i}": values(i, *shape) for i, shape in enumerate(shapes)}


def parts(vector: torch.Tensor, world: int = 2) -> list[torch.Tensor]:
    """A flat's partitions, the padding cut off the last."""
    size = -(-len(vector) // world)
    return list(vector.split(size))


def round_robin(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The order in which 0.4.0 to 0.4.3 stored a group."""
    names = [*list(tensors)[0::2], *list(tensors)[1::2]]
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("version", ["0.4.0", "0.4.1", "0.4.2+abc", "0.4.3", None])
@pytest.mark.parametrize("same_shape", [False, True])
def test_round_robin_that_is_not_recorded(tmp_path: Path, version: str | None, same_shape: bool) -> None:
    """0.4.0 to 0.4.3 stored parameters round-robin and recorded module order: values get their own names."""
    tensors = weights(same_shape)
    stored = round_robin(tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    zero2(tmp_path, [parts(flat(stored))], views_of([stored]), version=version, shapes=shapes)
    assert_tensors(open_checkpoint(tmp_path), tensors)


def test_recorded_order_is_kept_from_0_4_4_on(tmp_path: Path) -> None:
    """From 0.4.4 on the recorded order is that of the flats, whatever `module` looks like."""
    tensors = weights(same_shape=True)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    module = {name: tensor.half() for name, tensor in reversed(tensors.items())}
    zero2(tmp_path, [parts(flat(tensors))], module, version="0.4.4", shapes=shapes)
    assert_tensors(open_checkpoint(tmp_path), tensors)


def test_one_dict_for_several_groups(tmp_path: Path) -> None:
    """Up to 0.5.3 one dict spans all groups: it is cut where the flats end, and what is left over is an error."""
    tensors = weights()
    groups = [{name: tensors[name] for name in names} for names in (("p0", "p1"), ("p2", "p3", "p4"))]
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    flats = [parts(flat(group)) for group in groups]
    zero2(tmp_path, flats, views_of(groups), version="0.5.0", shapes=shapes)
    assert_tensors(open_checkpoint(tmp_path), tensors)
    zero2(tmp_path, flats, views_of(groups), version="0.5.0", shapes={**shapes, "p5": (2,)})
    with pytest.raises(InconsistentCheckpoint, match=r"1 are left over \('p5' first"):
        open_checkpoint(tmp_path)


def test_no_param_shapes_at_all(tmp_path: Path) -> None:
    """Before 0.3.14 no file names the parameters of a flat: groups, frozen weights and buffers are told apart by `module`."""
    tensors = weights()
    groups = [{name: tensors[name] for name in names} for names in (("p3", "p1"), ("p0", "p4", "p2"))]
    others = {"frozen": values(9, 3, 3).half(), "running_mean": values(8, 4).half(), "count": torch.tensor(3)}
    module = views_of(groups)
    module = {**module, **others, "alias": module["p0"]}
    zero2(tmp_path, [parts(flat(group)) for group in groups], module)
    checkpoint = open_checkpoint(tmp_path)
    assert_tensors(checkpoint, {**tensors, **others, "alias": tensors["p0"]})
    assert checkpoint.tied == {"alias": "p0"}


def test_groups_of_one_size_are_told_by_values(tmp_path: Path) -> None:
    """Two groups of the same size are not mixed up, not even when they begin alike."""
    first = torch.zeros(4, 3)
    groups = [{"a": first, "b": values(1, 2)}, {"c": first.clone(), "d": values(2, 2)}]
    module = views_of(groups[::-1])
    zero2(tmp_path, [parts(flat(group)) for group in groups], module)
    assert_tensors(open_checkpoint(tmp_path), {name: t for group in groups for name, t in group.items()})


def test_by_values_where_the_copies_were_cloned(tmp_path: Path) -> None:
    """A `module` whose tensors have storages of their own still decides the order by its values."""
    tensors = weights(same_shape=True)
    stored = round_robin(tensors)
    module = {name: tensor.half() for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    zero2(tmp_path, [parts(flat(stored))], module, version="0.4.1", shapes=shapes)
    assert_tensors(open_checkpoint(tmp_path), tensors)


def test_equal_values_are_not_guessed(tmp_path: Path) -> None:
    """Cloned copies that round alike, over masters that differ, leave the order open: refused."""
    tensors = {"a": torch.full((3,), 1.0), "b": torch.full((3,), 1.0 + 2**-20), "c": values(3, 4)}
    module = {name: tensor.half() for name, tensor in tensors.items()}
    zero2(tmp_path, [parts(flat(tensors))], module, version="0.4.1")
    with pytest.raises(UnsupportedLayout, match=r"0\.4\.1 does not record the order"):
        open_checkpoint(tmp_path)


def test_other_values_than_the_masters_are_refused(tmp_path: Path) -> None:
    """Copies that are not what the masters round to decide nothing."""
    tensors = weights()
    zero2(tmp_path, [parts(flat(tensors))], views_of([{name: tensor + 1 for name, tensor in tensors.items()}]))
    with pytest.raises(UnsupportedLayout, match="do not decide it"):
        open_checkpoint(tmp_path)


def intervals(vector: torch.Tensor, world: int, size: int, *, lean: bool) -> list[list[torch.Tensor]]:
    """A flat vector's sub-partitions by rank: interval by interval, the ranks in turn; `lean` cuts the padding."""
    count = math.ceil(math.ceil(len(vector) / world) / size)
    padded = torch.cat([vector, torch.zeros(count * size * world - len(vector))])
    pieces = list(padded.split(size))
    if lean:
        pieces = [piece[: max(0, len(vector) - i * size)] for i, piece in enumerate(pieces)]
    return [pieces[rank::world] for rank in range(world)]


def old_zero1(directory: Path, groups: list[dict[str, torch.Tensor]], world: int, size: int, *, lean: bool) -> None:
    """ZeRO-1 as 0.2 to 0.3.16 wrote it, with `size` elements at most in a sub-partition."""
    save({"module": views_of(groups, padding=world * size)}, directory / "mp_rank_00_model_states.pt")
    nested = [intervals(flat(group), world, min(size, -(-len(flat(group)) // world)), lean=lean) for group in groups]
    for rank in range(world):
        mine = [group[rank] for group in nested]
        moments = [[{"step": 1, "exp_avg": part * 2} for part in group] for group in mine]
        state: dict[str, Any] = {"local_sub_partitions_of_fp32_groups": mine, "base_optimizer_state": moments}
        if lean:
            state.update(zero_stage=1, partition_count=world)
        else:
            numbered = dict(enumerate(part for group in moments for part in group))
            state["base_optimizer_state"] = {"state": numbered, "param_groups": []}
        save({"optimizer_state_dict": state}, directory / f"zero_pp_rank_{rank}_mp_rank_00optim_states.pt")


@pytest.mark.parametrize("lean", [True, False], ids=["padding cut", "padding kept"])
@pytest.mark.parametrize("size", [2, 5, 8, 1000])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_intervals(tmp_path: Path, world: int, size: int, lean: bool) -> None:
    """However many intervals a group was cut into, with padding or without, masters and moments come out whole."""
    tensors = weights()
    groups = [{name: tensors[name] for name in names} for names in (("p3", "p1"), ("p0", "p4", "p2"))]
    old_zero1(tmp_path, groups, world, size, lean=lean)
    checkpoint = open_checkpoint(tmp_path)
    assert_tensors(checkpoint, tensors)
    assert (checkpoint.layout, checkpoint.world_size) == ("ZeRO-1", world)
    assert_tensors(open_checkpoint(tmp_path, state="exp_avg"), {name: tensor * 2 for name, tensor in tensors.items()})


def test_missing_interval_is_refused(tmp_path: Path) -> None:
    """Ranks with different numbers of intervals are files of different runs."""
    old_zero1(tmp_path, [weights()], 2, 5, lean=True)
    path = tmp_path / "zero_pp_rank_1_mp_rank_00optim_states.pt"
    root = torch.load(path)
    root["optimizer_state_dict"]["local_sub_partitions_of_fp32_groups"][0].pop()
    save(root, path)
    with pytest.raises(InconsistentCheckpoint, match="differ between ranks"):
        open_checkpoint(tmp_path)
