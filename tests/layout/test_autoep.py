"""AutoEP: the experts of a layer as one tensor, wherever its parts are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from made import DATA, assert_tensors, cut, save, values

from lazyzero import open_checkpoint
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout

FUSED = "mlp.experts.w1"


def _layer(rank: int, held: list[list[int]], **changed: Any) -> dict[str, Any]:
    placement = {
        "version": 1, "num_experts": 4, "ep_size": len(held),
        "ranks": [{"rank": r, "experts": experts} for r, experts in enumerate(held)],
    }  # fmt: skip
    return {
        "moe_layer_id": 0, "module_path": "mlp", "num_experts": 4, "num_local_experts": len(held[rank]),
        "ep_size": len(held), "expert_placement": placement, "expert_key_prefix": "mlp.experts", "ep_rank": rank, **changed,
    }  # fmt: skip


def _zero3(directory: Path, held: list[list[int]], copies: int, **changed: Any) -> dict[str, torch.Tensor]:
    """A ZeRO-3 save of `len(held)` expert-parallel ranks, each with `copies` ranks that share its experts."""
    ep = len(held)
    world = ep * copies
    whole = {"dense": values(9, 11), "mlp.router.gate.weight": values(8, 4, 2), FUSED: values(7, 4, 3, 2)}
    empty = torch.empty(0, dtype=torch.bfloat16)
    for rank in range(world):
        mine, index = rank % ep, rank // ep
        experts = whole[FUSED][held[mine]]
        dense = {name: whole[name] for name in ("dense", "mlp.router.gate.weight")}
        module = {name: empty.clone() for name in (*dense, "mlp.gate.gate.weight")}
        save(
            {
                "module": module, "buffer_names": [], "shared_params": {}, "mp_world_size": 1, "dp_world_size": world,
                "param_shapes": [{FUSED: experts.shape}, {name: tensor.shape for name, tensor in dense.items()}],
                "ds_autoep_layers": [_layer(mine, held, **changed)], "ds_version": "0.19.8",
            },
            directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )  # fmt: skip
        flats = [
            cut(experts, copies)[index].clone(),
            torch.cat([cut(tensor, world)[rank] for tensor in dense.values()]),
        ]
        groups = [
            {"partition_count": copies, "partition_rank": index},
            {"partition_count": world, "partition_rank": rank},
        ]
        state = {
            "zero_stage": 3, "partition_count": world, "ds_zero_partition_groups": groups, "fp32_flat_groups": flats,
            "optimizer_state_dict": {},
        }  # fmt: skip
        save({"optimizer_state_dict": state}, directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return whole


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize(
    "held",
    [[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[3, 0], [1, 2]], [[2], [0, 1, 3]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 3], []]],
)
def test_any_placement_under_zero3(tmp_path: Path, held: list[list[int]], copies: int) -> None:
    """Experts are joined by their global numbers, in whatever order and on whatever rank; the router's old name is a tie."""
    whole = _zero3(tmp_path, held, copies)
    whole["mlp.gate.gate.weight"] = whole["mlp.router.gate.weight"]
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, whole)
        assert checkpoint.tied == {"mlp.gate.gate.weight": "mlp.router.gate.weight"}
        assert checkpoint.missing == {}


def test_a_rank_without_its_model_file_is_named(tmp_path: Path) -> None:
    """Only a rank's own model file says which experts its partitions are of."""
    _zero3(tmp_path, [[0, 1], [2, 3]], 2)
    (tmp_path / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(MissingFiles, match="zero_pp_rank_2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"expert_placement": {"version": 2}}, UnsupportedLayout, "version 2"),
        (
            {"expert_placement": {"version": 1, "ranks": [{"rank": 0, "experts": [0, 1, 2]}]}},
            InconsistentCheckpoint,
            "place",
        ),
        ({"expert_placement": None, "num_experts": 5}, InconsistentCheckpoint, "evenly"),
        ({"num_experts": None}, InconsistentCheckpoint, "numbers of experts"),
        ({"num_experts": 1 << 60}, InconsistentCheckpoint, "numbers of experts"),
        ({"expert_key_prefix": 7}, InconsistentCheckpoint, "name of a parameter"),
        ({"ep_rank": 0}, InconsistentCheckpoint, "partitions"),
    ],
)
def test_placements_that_cannot_be_are_refused(
    tmp_path: Path, changed: dict[str, Any], kind: type[Exception], said: str
) -> None:
    """A newer format, experts without a place, or ranks that claim the same experts: nothing is guessed."""
    _zero3(tmp_path, [[0, 1], [2, 3]], 1, **changed)
    with pytest.raises(kind, match=r"model_states\.pt") as caught:
        open_checkpoint(tmp_path)
    assert said in str(caught.value)


def test_partitions_of_another_size_are_refused(tmp_path: Path) -> None:
    """Every element of a sub-group is a parameter's partition."""
    _zero3(tmp_path, [[0, 1], [2, 3]], 2)
    path = tmp_path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    root = torch.load(path, weights_only=True)
    root["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.zeros(5)
    torch.save(root, path)
    with pytest.raises(InconsistentCheckpoint, match="sub-group 0: expected 6 elements, found 5"):
        open_checkpoint(tmp_path)


def test_folded_experts_are_refused(tmp_path: Path) -> None:
    """AutoEP with AutoTP: DeepSpeed itself cannot join it."""
    shutil.copytree(DATA / "h_z1_autoep_ep2_w4" / "checkpoint", tmp_path / "checkpoint")
    path = next(tmp_path.rglob("mp_rank_00_model_states.pt"))
    root = torch.load(path, weights_only=True)
    torch.save({**root, "folding": {"version": 1, "tp_size": 2}}, path)
    with pytest.raises(UnsupportedLayout, match="folded"):
        open_checkpoint(tmp_path / "checkpoint")


def test_an_experts_file_that_is_lost(tmp_path: Path) -> None:
    """The masters are complete without it; the tensors it is a part of have no copy to be compared with."""
    shutil.copytree(DATA / "h_z1_autoep_ep2_w4" / "checkpoint", tmp_path / "checkpoint")
    next(tmp_path.rglob("layer_1_expert_2_*")).unlink()
    with open_checkpoint(tmp_path / "checkpoint") as checkpoint:
        assert len(checkpoint.checks) == 18 - 3
        assert "layer_1_expert_2 first" in checkpoint.warnings[0]


def test_stage_0(tmp_path: Path) -> None:
    """Each expert-parallel rank's wrapper has the master of its own experts as one tensor, known by its values."""
    experts, router = values(7, 4, 3, 2), values(8, 4, 2)
    held = [[0, 1], [2, 3]]
    save(
        {
            "module": {"mlp.router.gate.weight": router.bfloat16(), "mlp.gate.gate.weight": router.bfloat16()},
            "buffer_names": [], "num_experts": [4], "ds_autoep_layers": [_layer(0, held)], "mp_world_size": 1,
            "optimizer": {"fp32_groups": [[router]]},
        },
        tmp_path / "mp_rank_00_model_states.pt",
    )  # fmt: skip
    for number in range(4):
        weights = {f"{FUSED}.{number}": experts[number].bfloat16()}
        save(weights, tmp_path / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    for rank, mine in enumerate(held):
        wrapper = {"fp32_groups": [[router, experts[mine].clone()]]}
        save({"optimizer": wrapper}, tmp_path / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, {FUSED: experts, "mlp.router.gate.weight": router, "mlp.gate.gate.weight": router})
    (tmp_path / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint[FUSED].dtype.name == "bfloat16"
        assert torch.equal(checkpoint[FUSED].torch(), experts.bfloat16())
