"""Universal checkpoints as input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from made import DATA, assert_tensors, assert_truth, save, values, views_of

from lazyzero import open_checkpoint
from lazyzero.errors import InconsistentCheckpoint, InvalidRequest, MissingFiles
from lazyzero.selfcheck import check


@pytest.mark.parametrize("stage", [1, 3])
def test_real(stage: int) -> None:
    """A universal checkpoint converted by DeepSpeed gives the weights, buffers, frozen weights and ties of its source."""
    case = f"l_a_z{stage}_bf16_w2_universal"
    with open_checkpoint(DATA / case / "checkpoint") as checkpoint:
        assert_truth(checkpoint, case)
        assert (checkpoint.layout, checkpoint.stage, checkpoint.missing) == ("universal", stage, {})
        assert check(checkpoint.checks, full=True) == (8 if stage == 1 else 0)


def from_zero3(directory: Path, tensors: dict[str, torch.Tensor], world: int, stored: dict[str, torch.Tensor]) -> None:
    """A universal checkpoint from ZeRO-3 with the given 1-D values."""
    shapes = [{name: tensor.shape for name, tensor in tensors.items()}]
    for rank in range(world):
        model = {"module": {name: torch.empty(0) for name in tensors}, "param_shapes": shapes, "ds_version": "0.14.5"}
        save(model, directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    for name, tensor in stored.items():
        save(tensor, directory / "zero" / name / "fp32.pt")


def padded_by_old_releases(tensor: torch.Tensor, world: int) -> torch.Tensor:
    """What 0.14.5 to 0.16 wrote: a rank beyond the end adds as many elements of padding as it lies beyond."""
    part = -(-tensor.numel() // world)
    more = sum(min(part, abs(tensor.numel() - rank * part)) for rank in range(world)) - tensor.numel()
    return torch.cat([tensor.reshape(-1), torch.full((more,), 9.0)])


@pytest.mark.parametrize("shape", [(5,), (1,), (3, 7), (2, 4), ()])
@pytest.mark.parametrize("way", ["exact", "old", "whole padding"])
def test_padding_of_zero3_is_cut(tmp_path: Path, shape: tuple[int, ...], way: str) -> None:
    """Whatever padding a release copied behind a ZeRO-3 parameter, its own elements come out in its shape."""
    world, tensor = 4, values(1, math.prod(shape)).view(shape)
    part = -(-tensor.numel() // world)
    stored = {
        "exact": tensor.reshape(-1),
        "old": padded_by_old_releases(tensor, world),
        "whole padding": torch.cat([tensor.reshape(-1), torch.full((part * world - tensor.numel(),), 9.0)]),
    }[way]
    from_zero3(tmp_path / "t", {"w": tensor}, world, {"w": stored})
    assert_tensors(open_checkpoint(tmp_path), {"w": tensor})


def test_padding_that_no_release_wrote_is_refused(tmp_path: Path) -> None:
    """A 1-D file whose length follows from nothing is an error that names the file and both lengths."""
    tensor = values(1, 5)
    from_zero3(tmp_path, {"w": tensor}, 4, {"w": torch.cat([tensor, torch.zeros(2)])})
    with pytest.raises(InconsistentCheckpoint, match=r"fp32\.pt: expected 5 elements .* found \[7\]"):
        open_checkpoint(tmp_path)


def from_zero1(directory: Path, modules: list[Any], shapes: list[Any], stored: dict[str, Any], **extra: Any) -> None:
    """A universal checkpoint from ZeRO-1 over several model-parallel ranks."""
    for rank, (module, own) in enumerate(zip(modules, shapes, strict=True)):
        model = {"module": module, "param_shapes": [own], "ds_version": "0.16.0", **extra}
        save(model, directory / f"mp_rank_{rank:02d}_model_states.pt")
    for name, value in stored.items():
        save(value, directory / "zero" / name / "fp32.pt")


def test_vocabulary_padding_stays_removed(tmp_path: Path) -> None:
    """Where the file says that vocabulary padding was taken off, its shape counts, for tied names too."""
    padded = values(2, 8, 3)
    module = views_of([{"emb": padded}])
    module["head"] = module["emb"]
    stored = {"emb": {"param": padded[:6], "cat_dim": 0, "vocab_tensor": True}}
    from_zero1(tmp_path, [module], [{"emb": (8, 3)}], stored)
    checkpoint = open_checkpoint(tmp_path)
    assert_tensors(checkpoint, {"emb": padded[:6], "head": padded[:6]})
    assert checkpoint.tied == {"head": "emb"}


def test_another_shape_without_a_reason_is_refused(tmp_path: Path) -> None:
    """A shape that differs from `param_shapes` needs a recorded reason."""
    from_zero1(tmp_path, [{}], [{"emb": (8, 3)}], {"emb": {"param": values(2, 6, 3)}})
    with pytest.raises(InconsistentCheckpoint, match=r"expected shape \[8, 3\], found \[6, 3\]"):
        open_checkpoint(tmp_path)


def test_model_parallel_slices_are_not_mistaken_for_weights(tmp_path: Path) -> None:
    """From tensor parallelism: merged parameters whole, buffers from rank 0, sliced frozen weights listed as missing."""
    whole = values(3, 4, 6)
    modules = [{"w": part.half(), "frozen": part.half(), "buf": torch.arange(3)} for part in whole.chunk(2)]
    from_zero1(tmp_path, modules, [{"w": (2, 6)}] * 2, {"w": {"param": whole, "cat_dim": 0}}, buffer_names=["buf"])
    checkpoint = open_checkpoint(tmp_path)
    assert_tensors(checkpoint, {"w": whole, "buf": torch.arange(3)})
    assert set(checkpoint.missing) == {"frozen"}
    assert checkpoint.checks == ()


def test_pipeline(tmp_path: Path) -> None:
    """From a pipeline: the parameters of all stages, and its buffers named as missing."""
    a, b = values(4, 3, 2), values(5, 2)
    from_zero1(tmp_path, [None, None], [{"0.w": (3, 2)}, {"1.b": (2,)}], {"0.w": {"param": a}, "1.b": {"param": b}},
               buffer_names=["1.rot"])  # fmt: skip
    checkpoint = open_checkpoint(tmp_path)
    assert_tensors(checkpoint, {"0.w": a, "1.b": b})
    assert "layer files" in checkpoint.missing["1.rot"]


def test_missing_parameter_is_named(tmp_path: Path) -> None:
    """A parameter without its directory is an error that names the path."""
    from_zero1(tmp_path, [{}], [{"w": (2,), "v": (2,)}], {"w": {"param": values(1, 2)}})
    with pytest.raises(MissingFiles, match=r"zero/v/fp32\.pt: not found"):
        open_checkpoint(tmp_path)


def test_missing_model_files_are_named(tmp_path: Path) -> None:
    """Without model files there are no shapes and ties: an error says so."""
    save({"param": values(1, 2)}, tmp_path / "zero" / "w" / "fp32.pt")
    with pytest.raises(MissingFiles, match="mp_rank"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../w", "a/../../w", "/w", "a//w"])
def test_names_do_not_lead_out_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    """A parameter's name that is a path out of `zero` opens nothing."""
    from_zero1(tmp_path / "t", [{}], [{name: (2,)}], {"inside": {"param": values(1, 2)}})
    save({"param": values(1, 2)}, tmp_path / "w" / "fp32.pt")
    with pytest.raises(InconsistentCheckpoint, match="cannot be a directory"):
        open_checkpoint(tmp_path / "t")


def test_unclaimed_directories_are_told(tmp_path: Path) -> None:
    """A directory in `zero` that no model file names is not passed over in silence."""
    from_zero1(tmp_path, [{}], [{"w": (2,)}], {"w": {"param": values(1, 2)}, "other": {"param": values(1, 2)}})
    assert "other" in open_checkpoint(tmp_path).warnings[0]


def test_several_directories_are_refused(tmp_path: Path) -> None:
    """A universal checkpoint is one directory: adding another is refused."""
    case = DATA / "l_a_z1_bf16_w2_universal" / "checkpoint"
    with pytest.raises(InvalidRequest, match="one directory"):
        open_checkpoint(case, also=[DATA / "a_z1_bf16_w2" / "checkpoint" / "global_step3"])
