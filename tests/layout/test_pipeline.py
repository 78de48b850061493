"""Pipelines: layers' files and stages' masters as one state dict under the names of a PipelineModule."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from made import DATA, Named, assert_tensors, assert_truth, flat, save, values

from lazyzero import open_checkpoint
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, SelfCheckFailed, UnsupportedLayout
from lazyzero.selfcheck import check

REAL = {"i_z1_pipe_w2": "pipeline of 2 stages, ZeRO-1", "i_z0_pipe_tied_w2": "pipeline of 2 stages, BF16_Optimizer"}


@pytest.mark.parametrize("case", REAL)
def test_real(case: str) -> None:
    """Masters, buffers and frozen weights of all layers, tied ones once; the layers' 16-bit copies agree."""
    with open_checkpoint(DATA / case / "checkpoint") as checkpoint:
        assert_truth(checkpoint, case)
        assert checkpoint.layout == REAL[case]
        assert checkpoint.warnings == ()
        assert check(checkpoint.checks, full=True) == len(checkpoint.checks) > 10


def _copy(tmp_path: Path, case: str = "i_z1_pipe_w2") -> Path:
    shutil.copytree(DATA / case / "checkpoint", tmp_path / "checkpoint")
    return next((tmp_path / "checkpoint").glob("global_step*"))


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("layer_02-model_states.pt", "no files of layers 2"),
        ("mp_rank_01_model_states.pt", "mp_rank_01_model_states.pt"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "some pipeline stages have no"),
    ],
)
def test_a_lost_file_is_named(tmp_path: Path, lost: str, said: str) -> None:
    """A layer, a stage's model file or its optimizer's is never left out silently."""
    directory = _copy(tmp_path)
    (directory / lost).unlink()
    with pytest.raises(MissingFiles) as caught:
        open_checkpoint(directory)
    assert said in str(caught.value)


def test_a_lost_stage_is_named(tmp_path: Path) -> None:
    """All files of the last stage gone, what is left does not pass for a shorter pipeline."""
    directory = _copy(tmp_path)
    for path in [*directory.glob("*mp_rank_01*"), directory / "layer_04-model_states.pt"]:
        path.unlink()
    with pytest.raises(MissingFiles, match="saved by 2 model-parallel ranks"):
        open_checkpoint(directory)


def _model_file(directory: Path, mp: int, ranks: int, shapes: Sequence[Named] | None, **root: Any) -> None:
    told = [{name: tensor.shape for name, tensor in group.items()} for group in shapes] if shapes is not None else None
    save(
        {
            "module": None,
            "buffer_names": [],
            "param_shapes": told,
            "mp_world_size": ranks,
            "ds_version": "0.19.8",
            **root,
        },
        directory / f"mp_rank_{mp:02d}_model_states.pt",
    )


def _stage(directory: Path, mp: int, ranks: int, masters: Named, **root: Any) -> None:
    """A stage with one param group on one data-parallel rank."""
    _model_file(directory, mp, ranks, [masters], **root)
    state = {
        "zero_stage": 1, "partition_count": [1], "group_paddings": [0], "single_partition_of_fp32_groups": [flat(masters)],
    }  # fmt: skip
    save({"optimizer_state_dict": state}, directory / f"bf16_zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt")


def _layer(directory: Path, number: int, weights: Mapping[str, torch.Tensor], tp: int | None = None) -> None:
    axis = "" if tp is None else f"-model_{tp:02d}"
    halved = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save(halved, directory / f"layer_{number:02d}{axis}-model_states.pt")


def test_a_tied_layer_is_known_by_its_values(tmp_path: Path) -> None:
    """Of two layers with the same names and shapes, the one that rounds from the tied masters is the tied one."""
    tied, other = values(1, 4, 3), values(2, 4, 3)
    _stage(tmp_path, 0, 1, {"tied_modules.embed.w": tied, "2.b": values(3, 5)})
    _layer(tmp_path, 0, {"w": other})  # a frozen layer
    _layer(tmp_path, 1, {"w": tied})
    _layer(tmp_path, 2, {"b": values(3, 5)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, {"tied_modules.embed.w": tied, "0.w": other.bfloat16(), "2.b": values(3, 5)})
        assert len(checkpoint.checks) == 2


def test_the_first_stages_copy_of_tied_weights_is_taken(tmp_path: Path) -> None:
    """DeepSpeed goes on with the first stage's; where another stage's differ, a warning says so."""
    _stage(tmp_path, 0, 2, {"tied_modules.embed.w": values(1, 6)})
    _stage(tmp_path, 1, 2, {"tied_modules.embed.w": values(2, 6)})
    _layer(tmp_path, 0, {"w": values(1, 6)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, {"tied_modules.embed.w": values(1, 6)})
        assert "'tied_modules.embed.w' first" in checkpoint.warnings[0]


def test_a_parameter_of_two_stages_is_refused(tmp_path: Path) -> None:
    """Only tied ones can be on several stages."""
    for mp in range(2):
        _stage(tmp_path, mp, 2, {"0.w": values(mp, 6)})
    _layer(tmp_path, 0, {"w": values(0, 6)})
    with pytest.raises(InconsistentCheckpoint, match=r"0\.w"):
        open_checkpoint(tmp_path)


def test_layers_of_another_run_fail_the_self_check(tmp_path: Path) -> None:
    """A layer's file is the copy that its masters must round to."""
    _stage(tmp_path, 0, 1, {"0.w": values(1, 6)})
    _layer(tmp_path, 0, {"w": values(2, 6)})
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(SelfCheckFailed, match=r"0\.w"):
        check(checkpoint.checks)


def test_without_zero(tmp_path: Path) -> None:
    """Stage 0 has the layers' weights, and masters by their values; nothing names tied layers, which is told."""
    weight, bias = values(1, 4, 3), values(2, 5)
    _model_file(tmp_path, 0, 1, None, optimizer={"fp32_groups_flat": [flat({"w": weight, "b": bias})]})
    _layer(tmp_path, 0, {"w": weight})
    _layer(tmp_path, 1, {"b": bias})
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, {"0.w": weight, "1.b": bias})
        assert checkpoint.layout == "pipeline of 1 stages, stage 0"
        assert "TiedLayerSpec" in checkpoint.warnings[0]


def _tensor_parallel(directory: Path, info: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Two stages of two tensor-parallel ranks each; returns the whole."""
    whole = {"tied_modules.embed.w": values(1, 4, 3), "1.w": values(2, 3, 4), "2.norm": values(3, 3)}
    told = {} if info is None else {"universal_checkpoint_info": info}
    for tp in range(2):
        embed, row = whole["tied_modules.embed.w"].chunk(2)[tp], whole["1.w"].chunk(2, dim=1)[tp]
        _stage(directory, tp, 4, {"tied_modules.embed.w": embed, "1.w": row}, **told)
        _stage(directory, 2 + tp, 4, {"tied_modules.embed.w": embed, "2.norm": whole["2.norm"]}, **told)
        for number, weights in enumerate(({"w": embed}, {"w": row}, {"norm": whole["2.norm"]})):
            _layer(directory, number, {name: tensor.clone() for name, tensor in weights.items()}, tp)
    return whole


def test_with_tensor_parallelism(tmp_path: Path) -> None:
    """Model-parallel ranks count the stages first: each tensor-parallel rank's stages are joined, then the ranks."""
    info = {"tp_replicated_parameter_patterns": [".*norm"], "parameter_with_row_parallelism_patterns": ["1.w"]}
    whole = _tensor_parallel(tmp_path, info)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, whole)
        assert checkpoint.layout == "pipeline of 2 stages, ZeRO-1, 2 tensor-parallel ranks"
        assert check(checkpoint.checks, full=True) == 3


def test_with_tensor_parallelism_and_rules(tmp_path: Path) -> None:
    """Where nothing is recorded the user's rules join the ranks; without them the refusal says what is missing."""
    whole = _tensor_parallel(tmp_path / "tag", None)
    with pytest.raises(UnsupportedLayout, match="--tp-rules"):
        open_checkpoint(tmp_path / "tag")
    (tmp_path / "rules").write_text("norm replicated\n1.w 1\nembed 0\n")
    with open_checkpoint(tmp_path / "tag", tp_rules=tmp_path / "rules") as checkpoint:
        assert_tensors(checkpoint, whole)


def test_a_layer_lost_on_one_tensor_parallel_rank(tmp_path: Path) -> None:
    """Each tensor-parallel rank has all layers, or the lost file is named."""
    _tensor_parallel(tmp_path, None)
    (tmp_path / "layer_01-model_01-model_states.pt").unlink()
    with pytest.raises(MissingFiles, match="layer_01-model_01"):
        open_checkpoint(tmp_path)


def test_moments() -> None:
    """The optimizer's moments come under the same names."""
    weights = open_checkpoint(DATA / "i_z1_pipe_w2" / "checkpoint")
    moments = open_checkpoint(DATA / "i_z1_pipe_w2" / "checkpoint", state="exp_avg_sq")
    trained = {name: tensor.shape for name, tensor in weights.items() if tensor.role == "trainable"}
    assert {name: tensor.shape for name, tensor in moments.items()} == trained


def test_what_deepspeed_does_not_write_is_refused(tmp_path: Path) -> None:
    """Neither ZeRO-3 nor a stage without names passes for a pipeline that is understood."""
    _stage(tmp_path / "named", 0, 1, {"0.w": values(1, 6)})
    _layer(tmp_path / "named", 0, {"w": values(1, 6)})
    save({}, tmp_path / "named" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with pytest.raises(UnsupportedLayout, match="ZeRO-3"):
        open_checkpoint(tmp_path / "named")
    _stage(tmp_path / "nameless", 0, 1, {"0.w": values(1, 6)})
    _model_file(tmp_path / "nameless", 0, 1, None)
    _layer(tmp_path / "nameless", 0, {"w": values(1, 6)})
    with pytest.raises(UnsupportedLayout, match="no file names the parameters"):
        open_checkpoint(tmp_path / "nameless")
