"""Experts: masters from the ranks that have them, under the model's numbers, and the experts' own files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from made import DATA, Named, assert_tensors, assert_truth, facts_of, flat, save, values

from lazyzero import open_checkpoint
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, SelfCheckFailed, UnsupportedLayout
from lazyzero.layout.experts import expert_sets
from lazyzero.selfcheck import check

REAL = {
    "h_z2_moe_ep2_w4": 21,
    "h_z1_moe_frozen_ep2_w4": 30,
    "h_z2_moe_mixed_ep_w4": 38,
    "h_z1_autoep_ep2_w4": 18,
    "h_z3_autoep_ep2_w4": 0,
}


@pytest.mark.parametrize("case", REAL)
def test_real(case: str) -> None:
    """Every expert has its own masters, whatever order a rank sorted its groups in, and rounds to its own file."""
    with open_checkpoint(DATA / case / "checkpoint") as checkpoint:
        assert_truth(checkpoint, case)
        assert checkpoint.warnings == ()
        assert checkpoint.layout.startswith(f"mixture of experts, ZeRO-{facts_of(case)['stage']}")
        assert check(checkpoint.checks, full=True) == len(checkpoint.checks) == REAL[case]


def test_ranks_of_an_expert() -> None:
    """Experts are spread over neighbouring ranks, or in runs with `use_data_before_expert_parallelism`."""
    assert [list(ranks) for ranks in expert_sets(6, 2, {})] == [[0, 3], [1, 4], [2, 5]]
    blocked = {"use_data_before_expert_parallelism": True}
    assert [list(ranks) for ranks in expert_sets(6, 2, blocked)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(ranks) for ranks in expert_sets(4, 4, None)] == [[0, 1, 2, 3]]


def _copy(tmp_path: Path, case: str) -> Path:
    shutil.copytree(DATA / case / "checkpoint", tmp_path / "checkpoint")
    return next((tmp_path / "checkpoint").glob("global_step*"))


def test_masters_do_without_an_experts_file(tmp_path: Path) -> None:
    """A lost file of an expert takes its cross-check, its buffers and its frozen weights, and all of it is told."""
    case = "h_z1_moe_frozen_ep2_w4"
    directory = _copy(tmp_path, case)
    (directory / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    with open_checkpoint(directory) as checkpoint:
        prefix = "blocks.0.deepspeed_moe.experts.deepspeed_experts.3"
        assert set(checkpoint.missing) == {f"{prefix}.scale"}  # stage 1 does not list frozen parameters
        assert "layer_0_expert_3 first" in checkpoint.warnings[0]
        assert checkpoint[f"{prefix}.fc1.weight"].dtype.name == "float32"
        assert len(checkpoint.checks) == REAL[case] - 4


def test_mixed_up_experts_fail_the_self_check(tmp_path: Path) -> None:
    """Files of two experts exchanged: names still fit, the values do not."""
    directory = _copy(tmp_path, "h_z2_moe_ep2_w4")
    one, two = (directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    one.rename(directory / "aside")
    two.rename(one)
    (directory / "aside").rename(two)
    with open_checkpoint(directory) as checkpoint, pytest.raises(SelfCheckFailed, match="experts"):
        check(checkpoint.checks)


EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts."


def _moe(
    directory: Path, ep: int, world: int, *, blocked: bool = False, stage: int = 2, **root: Any
) -> dict[str, torch.Tensor]:
    """deepspeed.moe as it is saved: 4 experts on `ep` expert-parallel ranks, a dense group, `world` ranks."""
    whole = {"dense": values(99, 7), **{f"{EXPERT}{e}.w": values(e, 3, 2) for e in range(4)}}
    local = 4 // ep
    shapes = [{"dense": torch.Size([7])}, {f"{EXPERT}{e}.w": torch.Size([3, 2]) for e in range(local)}]
    config = {"use_data_before_expert_parallelism": True} if blocked else {}
    save(
        {
            "module": {"dense": whole["dense"].bfloat16()}, "buffer_names": [], "param_shapes": shapes, "shared_params": {},
            "num_experts": [4], "dp_world_size": world, "mp_world_size": 1, "ds_config": config, "ds_version": "0.19.8", **root,
        },
        directory / "mp_rank_00_model_states.pt",
    )  # fmt: skip
    for expert in range(4):
        weights = {f"{EXPERT}{expert}.w": whole[f"{EXPERT}{expert}.w"].bfloat16()}
        save(weights, directory / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    count = world // ep
    for rank in range(world):
        mine, part = (rank // count, rank % count) if blocked else (rank % ep, rank // ep)
        experts = {f"{e}": whole[f"{EXPERT}{e}.w"] for e in range(mine * local, (mine + 1) * local)}
        groups = [_parts({"dense": whole["dense"]}, world)[rank], _parts(experts, count)[part]]
        state = {
            "zero_stage": stage, "partition_count": [world, count], "group_paddings": [padding for _, padding in groups],
            "single_partition_of_fp32_groups": [flats for flats, _ in groups], "base_optimizer_state": [],
        }  # fmt: skip
        save({"optimizer_state_dict": state}, directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return whole


def _parts(tensors: Named, count: int) -> list[tuple[torch.Tensor, int]]:
    """A group's flat on each rank, without the padding of the last, and how much that was."""
    vector = flat(tensors)
    padding = -len(vector) % count
    parts = list(torch.cat([vector, torch.zeros(padding)]).view(count, -1))
    return [
        (part[: len(part) - lost].clone(), lost)
        for part, lost in zip(parts, [0] * (count - 1) + [padding], strict=True)
    ]


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize(("ep", "world"), [(1, 2), (2, 2), (2, 4), (2, 6), (4, 4)])
def test_any_ep_size(tmp_path: Path, ep: int, world: int, blocked: bool) -> None:
    """Local numbers become the model's, whichever ranks hold an expert's partitions."""
    whole = _moe(tmp_path, ep, world, blocked=blocked)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, whole)
        assert check(checkpoint.checks, full=True) == len(whole)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """The number of ranks is the model file's: no group need have as many partitions."""
    _moe(tmp_path, 2, 4)
    (tmp_path / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(MissingFiles, match="need 0-3"):
        open_checkpoint(tmp_path)


def test_tensor_parallel_experts_are_refused(tmp_path: Path) -> None:
    """DeepSpeed records nothing of how such experts were split."""
    _moe(tmp_path, 2, 2)
    (tmp_path / "mp_rank_01_model_states.pt").write_bytes((tmp_path / "mp_rank_00_model_states.pt").read_bytes())
    with pytest.raises(UnsupportedLayout, match="experts under tensor parallelism"):
        open_checkpoint(tmp_path)


def test_experts_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    """Layers' files beside experts' are of a pipeline."""
    _moe(tmp_path, 2, 2)
    save({}, tmp_path / "layer_00-model_states.pt")
    with pytest.raises(UnsupportedLayout, match="experts in a pipeline"):
        open_checkpoint(tmp_path)


def _stage0(directory: Path, ep: int, masters: Sequence[Sequence[torch.Tensor]], **root: Any) -> None:
    save(
        {
            "module": {"dense": values(99, 7).bfloat16()},
            "buffer_names": [],
            "num_experts": [4],
            "mp_world_size": 1,
            **root,
        },
        directory / "mp_rank_00_model_states.pt",
    )
    for expert in range(4):
        weights = {f"{EXPERT}{expert}.w": values(expert, 3, 2).bfloat16()}
        save(weights, directory / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    for rank in range(ep):
        name = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        save({"optimizer": {"fp32_groups": [list(masters[rank])]}}, directory / name)


def test_stage_0(tmp_path: Path) -> None:
    """Masters are in the expert-parallel ranks' wrappers, without names; only that expert rounds to each."""
    experts = [values(expert, 3, 2) for expert in range(4)]
    _stage0(tmp_path, 2, [[values(99, 7), *experts[:2]], [values(99, 7), *experts[2:]]])
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, {"dense": values(99, 7), **{f"{EXPERT}{e}.w": t for e, t in enumerate(experts)}})
        assert check(checkpoint.checks, full=True) == 5
    (tmp_path / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(MissingFiles, match="layer_0_expert_2"):
        open_checkpoint(tmp_path)


def test_stage_0_without_masters(tmp_path: Path) -> None:
    """Without wrappers the experts' files are the source."""
    _stage0(tmp_path, 1, [[]])
    with open_checkpoint(tmp_path) as checkpoint:
        experts = {f"{EXPERT}{e}.w": values(e, 3, 2).bfloat16() for e in range(4)}
        assert_tensors(checkpoint, {"dense": values(99, 7).bfloat16(), **experts})


def _rewrite(path: Path, change: Any) -> None:
    root = torch.load(path, weights_only=True)
    change(root)
    torch.save(root, path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.update(partition_count=[4, 3]), "partition_count"),
        (lambda state: state.update(partition_count=[2, 2]), "has 2 partitions on 4 ranks and no experts"),
        (lambda state: state.update(partition_count=[4]), "partition_count"),
    ],
)
def test_partitions_that_do_not_add_up_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    """Numbers of partitions must divide the ranks, and only experts may have fewer."""
    _moe(tmp_path, 2, 4)
    for path in tmp_path.glob("*optim_states.pt"):
        _rewrite(path, lambda root: change(root["optimizer_state_dict"]))
    with pytest.raises(InconsistentCheckpoint, match=r"optim_states\.pt") as caught:
        open_checkpoint(tmp_path)
    assert said in str(caught.value)


def test_moments() -> None:
    """The optimizer's moments come under the experts' numbers in the model."""
    for case in ("h_z2_moe_mixed_ep_w4", "h_z3_autoep_ep2_w4"):
        weights = open_checkpoint(DATA / case / "checkpoint")
        moments = open_checkpoint(DATA / case / "checkpoint", state="exp_avg")
        trained = {n: t.shape for n, t in weights.items() if t.role == "trainable" and t.tied_to is None}
        assert {name: tensor.shape for name, tensor in moments.items()} == trained
