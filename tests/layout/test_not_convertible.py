"""What cannot be converted says so by name, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made import save
from safetensors.torch import save_file

from lazyzero import open_checkpoint
from lazyzero.errors import CheckpointNotFound, UnsupportedLayout


def test_nebula(tmp_path: Path) -> None:
    """Nebula leaves torch archives of an empty string under DeepSpeed's names."""
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        save("", tmp_path / name)
    with pytest.raises(UnsupportedLayout, match=r"Nebula.*persistent_storage_path"):
        open_checkpoint(tmp_path)


def datastates(path: Path) -> None:
    """A file of the DataStates engine: a length, JSON, tensors, the pickled rest."""
    header = {
        "module|w": {"dtype": "torch.float16", "shape": [2], "data_offsets": [0, 4]},
        "datastates_metadata": {"data_offsets": [4, 10]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(10))


def test_datastates(tmp_path: Path) -> None:
    """DataStates files are named as such, not taken for safetensors."""
    datastates(tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UnsupportedLayout, match="DataStates"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_placeholders_beside_nothing(tmp_path: Path, form: str) -> None:
    """Empty weights that ZeRO-3 saved are recognised, and the error says where the values are."""
    tensors = {f"layers.{i}.weight": torch.empty(0, dtype=torch.float16) for i in range(5)}
    tensors["inv_freq"] = torch.ones(3)
    if form == "bin":
        save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointNotFound, match=r"5 of 6 tensors are placeholders .*global_step\*"):
        open_checkpoint(tmp_path)


def test_plain_weights(tmp_path: Path) -> None:
    """Weights that are whole need no conversion: the error says so."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointNotFound, match=r"model\.safetensors holds plain weights"):
        open_checkpoint(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    """A weight file that cannot be read does not hide that there is no checkpoint."""
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(CheckpointNotFound, match=r"no DeepSpeed checkpoint here.*model\.safetensors"):
        open_checkpoint(tmp_path)
