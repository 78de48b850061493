"""Frozen weights that ZeRO-3 did not save, out of the base model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made import DATA, assert_tensors, assert_truth, facts_of, save
from safetensors.torch import load_file, save_file

from lazyzero import open_checkpoint
from lazyzero.errors import CheckpointNotFound, InconsistentCheckpoint

CASE = "old_0.4.5_z3_lora"
CHECKPOINT = DATA / CASE / "checkpoint"


def truth() -> dict[str, torch.Tensor]:
    """Every name's tensor, tied ones included."""
    tensors = load_file(DATA / CASE / "expected.safetensors")
    return {**tensors, **{alias: tensors[owner] for alias, owner in facts_of(CASE)["tied"].items()}}


def base() -> dict[str, torch.Tensor]:
    """The frozen weights under the names they had before PEFT wrapped the model."""
    tensors = truth()
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensors[name]
        for name in facts_of(CASE)["absent"]
    }


def test_without_it_they_are_listed_as_missing() -> None:
    """DeepSpeed 0.4.5 saved no frozen weights: the names are listed, with the way out, and nothing is invented."""
    checkpoint = open_checkpoint(CHECKPOINT)
    assert_truth(checkpoint, CASE)
    assert set(facts_of(CASE)["absent"]) <= set(checkpoint.missing)
    assert all("--base-model" in why for why in checkpoint.missing.values())


@pytest.mark.parametrize("form", ["safetensors", "shards", "bin", "own names"])
def test_supplied(tmp_path: Path, form: str) -> None:
    """Safetensors or .bin, one file or several, PEFT's names or the base model's: all frozen weights are there, and ties."""
    tensors = base()
    if form == "bin":
        save(tensors, tmp_path / "pytorch_model.bin")
        save("not weights", tmp_path / "training_args.bin")
    elif form == "shards":
        for i, name in enumerate(tensors):
            save_file({name: tensors[name]}, tmp_path / f"model-{i:05d}.safetensors")
    elif form == "own names":
        save_file({name: truth()[name] for name in facts_of(CASE)["absent"]}, tmp_path / "model.safetensors")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(CHECKPOINT, base_model=tmp_path) as checkpoint:
        assert_tensors(checkpoint, truth())
        assert checkpoint.tied == facts_of(CASE)["tied"]
        assert checkpoint.missing == {}
        assert "13 frozen parameters are the base model's" in checkpoint.warnings[0]
        assert {str(tmp_path / name) for name in tmp_path.glob("model*")} <= {s.path for s in checkpoint.sources}


def test_a_tied_name_in_both_places_stays_tied(tmp_path: Path) -> None:
    """Where the base model has both names of a tied weight, the checkpoint's tie holds."""
    tensors = base()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_checkpoint(CHECKPOINT, base_model=tmp_path).tied == facts_of(CASE)["tied"]


def test_what_it_lacks_stays_missing(tmp_path: Path) -> None:
    """A base model without some of the names supplies the others."""
    tensors = base()
    del tensors["model.layers.0.ln.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(open_checkpoint(CHECKPOINT, base_model=tmp_path).missing) == {"base_model.model.model.layers.0.ln.bias"}


def test_placeholders_are_refused(tmp_path: Path) -> None:
    """A base model that is itself full of placeholders is no source of weights."""
    save_file({name: torch.empty(0) for name in base()}, tmp_path / "model.safetensors")
    with pytest.raises(InconsistentCheckpoint, match=r"has shape \[0\], expected values"):
        open_checkpoint(CHECKPOINT, base_model=tmp_path)


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    """Which of two tensors of one name is meant is never guessed."""
    for name in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InconsistentCheckpoint, match="has 'w', and so has"):
        open_checkpoint(CHECKPOINT, base_model=tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    """A directory without weights is an error."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointNotFound):
            open_checkpoint(CHECKPOINT, base_model=path)
