"""The optimizer's moments under the parameters' names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made import DATA, assert_tensors, flat, save, values, views_of, zero2

from lazyzero import open_checkpoint
from lazyzero.errors import InconsistentCheckpoint, InvalidRequest, UnsupportedLayout


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("stage", [1, 3])
def test_equal_deepspeeds_own(stage: int, state: str) -> None:
    """Moments equal, name by name and bit by bit, what DeepSpeed's universal converter takes from the same checkpoint."""
    zero = DATA / f"l_a_z{stage}_bf16_w2_universal" / "checkpoint" / "global_step3_universal" / "zero"
    checkpoint = open_checkpoint(DATA / f"a_z{stage}_bf16_w2" / "checkpoint", state=state)
    theirs = {}
    for path in zero.glob(f"*/{state}.pt"):
        saved = torch.load(path)
        tensor = saved["param"] if isinstance(saved, dict) else saved
        theirs[path.parent.name] = tensor.view(checkpoint[path.parent.name].shape)
    assert len(theirs) == 8
    assert_tensors(checkpoint, theirs)
    assert (checkpoint.checks, checkpoint.missing) == ((), {})
    assert_tensors(open_checkpoint(zero.parent, state=state), theirs)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4, 5])
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 8, 9, 31, 40])
def test_tail_padding_is_left_out(tmp_path: Path, numel: int, world: int, recorded: bool) -> None:
    """Moments keep the tail padding that saving cuts off the masters' last partition: neither ever comes out.

    A group smaller than the padding leaves some of it in the masters of several ranks, as DeepSpeed slices.
    """
    weights = {"a": values(1, numel)}
    tail = -numel % (2 * world)
    flats = flat(weights, numel + tail).split((numel + tail) // world)
    cut = tail if recorded else -numel % world  # before 0.7.0 less was cut than had been added
    masters = [*flats[:-1], flats[-1][: len(flats[-1]) - cut]]
    zero2(
        tmp_path, [masters], views_of([weights]), version="0.9.0" if recorded else "0.6.7",
        model={"param_shapes": [{"a": (numel,)}]},
    )  # fmt: skip
    for rank in range(world):
        path = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        root = torch.load(path)
        own = root["optimizer_state_dict"]
        own["base_optimizer_state"] = {"state": {0: {"step": 1, "exp_avg": flats[rank] * 2}}}
        if recorded:
            own["group_paddings"] = [tail if rank == world - 1 else 0]
        save(root, path)
    assert_tensors(open_checkpoint(tmp_path), weights)
    assert_tensors(open_checkpoint(tmp_path, state="exp_avg"), {"a": weights["a"] * 2})


def test_a_state_the_optimizer_does_not_keep(tmp_path: Path) -> None:
    """Asked for a state that is not there, the error names the file and what the optimizer does keep."""
    tensors = {"a": values(1, 4)}
    shapes = {"param_shapes": [{"a": (4,)}]}
    zero2(
        tmp_path, [[tensors["a"]]], {}, version="0.9.0", model=shapes,
        base_optimizer_state={"state": {0: {"momentum_buffer": tensors["a"]}}},
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match=r"no flat `exp_avg` \(it has: momentum_buffer"):
        open_checkpoint(tmp_path, state="exp_avg")


def test_states_of_another_number_of_groups(tmp_path: Path) -> None:
    """States that are not one for each flat group are never matched up by guess."""
    shapes = {"param_shapes": [{"a": (4,)}]}
    zero2(
        tmp_path, [[values(1, 4)]], {}, version="0.9.0", model=shapes,
        base_optimizer_state={"state": {i: {"exp_avg": values(1, 4)} for i in range(2)}},
    )  # fmt: skip
    with pytest.raises(InconsistentCheckpoint, match="of 1 groups, found 2"):
        open_checkpoint(tmp_path, state="exp_avg")


def test_unknown_state() -> None:
    """Only the two moments can be asked for."""
    with pytest.raises(InvalidRequest, match="exp_avg, exp_avg_sq"):
        open_checkpoint(DATA / "a_z1_bf16_w2" / "checkpoint", state="weights")


def test_layout_without_moments(tmp_path: Path) -> None:
    """A layout whose moments are not read says so instead of giving weights."""
    save({"module": {"a": values(1, 4)}}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UnsupportedLayout, match="`exp_avg` is not read"):
        open_checkpoint(tmp_path, state="exp_avg")
