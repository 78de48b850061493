"""Headers of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lazyzero.container.safetensors import read_header
from lazyzero.errors import BrokenArchive
from lazyzero.tensor import LazyTensor, View


def test_same_as_the_library_wrote(tmp_path: Path) -> None:
    """Names, dtypes, shapes and bytes are what safetensors saved; its metadata is no tensor."""
    tensors = {
        "a": torch.randn(3, 4), "b": torch.randn(2, 3, 4).bfloat16(), "c": torch.arange(5), "d": torch.tensor(2.5),
        "e": torch.empty(0, 3), "f": torch.tensor([True, False]), "g": torch.randn(7).half(),
    }  # fmt: skip
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    refs = read_header(tmp_path / "m.safetensors")
    assert set(refs) == set(tensors)
    for name, tensor in tensors.items():
        read = LazyTensor(name, refs[name].shape, View(refs[name]), "module").torch()
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert np.array_equal(raw(read), raw(tensor))


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        entry(dtype="F99"),
        entry(dtype=None),
        entry(dtype=["F32"]),
        entry(shape=[3]),
        entry(shape=[-2]),
        entry(shape=[True, 2]),
        entry(shape="2"),
        entry(data_offsets=[0, 4]),
        entry(data_offsets=[8, 16]),
        entry(data_offsets=[-8, 0]),
        entry(data_offsets=[0]),
        {"w": 3},
        [],
        "w",
    ],
)
def test_claims_beyond_the_file_are_refused(tmp_path: Path, header: Any) -> None:
    """A header that claims what the file does not hold is an error that names the file."""
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(BrokenArchive, match=r"m\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x00" * 64, b"\x20" + bytes(7) + b"{", b"\x04" + bytes(7) + b"nope"]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    """Truncated files and files of other kinds are errors that name the file."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(BrokenArchive, match=r"m\.safetensors"):
        read_header(path)
