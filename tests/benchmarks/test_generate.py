"""The benchmarks' checkpoints are what DeepSpeed would have written: torch reads them, and lazyzero finds the values."""

from __future__ import annotations

import sys
import types
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.archive import save
from benchmarks.generate import TAG, generate
from benchmarks.models import Model, llama, small_tensors, with_lora
from benchmarks.pickled import Storage, Tensor
from benchmarks.spec import Spec
from benchmarks.values import Values, marks, round_bf16
from lazyzero import open_checkpoint
from lazyzero.selfcheck import check

TINY = llama("tiny")
CASES = [
    Spec(model, stage, world, sparse=sparse, adam=adam, sub_group=sub_group)
    for model, stage, world, sparse, adam, sub_group in [
        (TINY, 1, 1, False, False, 1 << 30),
        (TINY, 1, 3, True, False, 1 << 30),
        (TINY, 2, 4, False, True, 1 << 30),
        (TINY, 2, 64, False, False, 1 << 30),
        (TINY, 3, 1, False, False, 1 << 30),
        (TINY, 3, 5, False, True, 2000),
        (TINY, 3, 64, True, False, 100),
        (with_lora(TINY, rank=3), 1, 2, False, False, 1 << 30),
        (with_lora(TINY, rank=3), 2, 2, False, False, 1 << 30),
        (with_lora(TINY, rank=3), 3, 3, False, False, 1 << 30),
        (small_tensors(50, 12), 2, 7, False, False, 1 << 30),
        (small_tensors(50, 12), 3, 16, False, False, 1 << 30),
    ]
]


def expected(spec: Spec, index: int) -> np.ndarray:
    """All elements of parameter `index`, flat, as float32."""
    parameter = spec.model.parameters[index]
    stored = 4 if parameter.trained else 2
    return spec.values.expected(index, parameter.numel, 0, parameter.numel, stored=stored)


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: f"z{spec.stage}_w{spec.world}_{spec.model.name}")
def test_lazyzero_finds_every_value(spec: Spec, tmp_path: Path) -> None:
    """Every parameter of every stage comes out with the very values that `Values` says, and the self-check agrees."""
    with open_checkpoint(generate(tmp_path / "checkpoint", spec)) as checkpoint:
        assert checkpoint.world_size == spec.world
        assert not checkpoint.missing
        assert not checkpoint.warnings
        assert set(checkpoint) == {parameter.name for parameter in spec.model.parameters}
        for index, parameter in enumerate(spec.model.parameters):
            found = checkpoint[parameter.name].numpy()
            assert found.shape == parameter.shape
            assert np.array_equal(_as_float32(found), expected(spec, index)), parameter.name
        assert check(checkpoint.checks, full=True) == (0 if spec.stage == 3 else sum(map(len, spec.model.groups)))


def _as_float32(values: np.ndarray) -> np.ndarray:
    flat = values.reshape(-1)
    if flat.dtype == np.float32:
        return flat
    return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    "spec", [CASES[2], CASES[5], CASES[8], CASES[9]], ids=lambda spec: f"z{spec.stage}_{spec.model.name}"
)
def test_torch_reads_every_file(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load opens each file as it would DeepSpeed's, with the tensors' dtypes and sizes."""
    torch = pytest.importorskip("torch")
    _stand_in_for_deepspeed(monkeypatch)
    files = sorted((generate(tmp_path / "checkpoint", spec) / TAG).iterdir())
    assert len(files) == spec.world * (2 if spec.stage == 3 else 1) + (spec.stage != 3)
    for path in files:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        assert loaded["ds_version"] == "0.19.8"
        if path.name.endswith("model_states.pt"):
            assert all(tensor.dtype == torch.bfloat16 for tensor in loaded["module"].values())
            assert all(isinstance(shape, torch.Size) for group in loaded["param_shapes"] for shape in group.values())
        else:
            state = loaded["optimizer_state_dict"]
            flats = state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]
            assert all(flat.dtype == torch.float32 and flat.dim() == 1 and flat.requires_grad for flat in flats)
            assert int(state["zero_stage"].value) == spec.stage


def _stand_in_for_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Anything:
        value: Any = None

    for path, name in [
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ]:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            parent = ".".join(parts[:depth])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setattr(sys.modules[path], name, Anything, raising=False)


def test_archives_are_sound(tmp_path: Path) -> None:
    """Every member is stored, its CRC is right, over holes too, and its data begin at a multiple of 64 bytes."""
    for path in (generate(tmp_path / "checkpoint", CASES[1]) / TAG).iterdir():
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            assert archive.testzip() is None
            for member in archive.infolist():
                file.seek(member.header_offset + 26)
                names = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
                assert (member.header_offset + 30 + names) % 64 == 0
                assert member.compress_type == zipfile.ZIP_STORED


def test_archives_beyond_4_gib(tmp_path: Path) -> None:
    """A storage of more than 4 GiB and those behind it are found, by torch too; holes take no space."""
    torch = pytest.importorskip("torch")
    big, small = (
        Storage(4, (1 << 30) + 3, lambda: [4 << 30, b"\0\0\x80\x3f" * 3]),
        Storage(2, 2, lambda: [b"\x80\x3f" * 2]),
    )
    path = tmp_path / "big.pt"
    save({"big": Tensor(big, (big.numel,)), "small": Tensor(small, (2,)), "large": 1 << 40, "negative": -5}, path)
    assert path.stat().st_blocks * 512 < 1 << 20
    loaded = torch.load(path, mmap=True)
    assert loaded["big"][-4:].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert loaded["small"].tolist() == [1.0, 1.0]
    assert (loaded["large"], loaded["negative"]) == (1 << 40, -5)


def test_adam_states_are_holes_unless_asked_for(tmp_path: Path) -> None:
    """The optimizer files have their full size and take little more than the weights; with `adam` they take it all."""
    model = llama("tiny", layers=40)
    sizes = {}
    for adam in (False, True):
        root = generate(tmp_path / str(adam), Spec(model, 3, 2, adam=adam))
        files = [path.stat() for path in (root / TAG).glob("*optim_states.pt")]
        assert sum(file.st_size for file in files) > 12 * model.numel
        sizes[adam] = sum(file.st_blocks * 512 for file in files)
    assert sizes[False] < 1.2 * 4 * model.numel
    assert sizes[True] > 12 * model.numel


def test_sparse_values_lie_in_a_few_places() -> None:
    """A sparse parameter has values in its marks, first and last element among them, and nowhere else."""
    values = Values(sparse=True).expected(3, 100_000, 0, 100_000)
    assert values[0] != 0 != values[-1]
    filled = {int(at) for at in np.flatnonzero(values)}
    assert filled == {at for first, last in marks(100_000) for at in range(first, last)}
    assert np.array_equal(values[5000:70_000], Values(sparse=True).expected(3, 100_000, 5000, 70_000))


def test_rounding_is_bfloat16s() -> None:
    """round_bf16 rounds to nearest, ties to even, as ml_dtypes does."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(1).integers(0, 0x7F000000, 100_000, dtype=np.uint32).view(np.float32)
    ties = (np.arange(1000, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    for sample in (values, -values, ties):
        assert np.array_equal(round_bf16(sample), sample.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize(
    ("preset", "billions", "tensors"),
    [("1B", 1.1, 201), ("7B", 6.74, 291), ("70B", 68.98, 723), ("405B", 405.85, 1137)],
)
def test_presets_are_the_models(preset: str, billions: float, tensors: int) -> None:
    """The presets have the parameters and the tensors of the models they are named for."""
    model: Model = llama(preset)
    assert model.numel / 1e9 == pytest.approx(billions, abs=0.01)
    assert len(model.parameters) == tensors


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "spec", [CASES[1], CASES[3], CASES[5], CASES[8], CASES[9]], ids=lambda spec: f"z{spec.stage}_{spec.model.name}"
)
def test_deepspeeds_own_converter_finds_every_value(spec: Spec, tmp_path: Path) -> None:
    """DeepSpeed's converter opens what was generated, and finds the same values."""
    zero_to_fp32 = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    root = generate(tmp_path / "checkpoint", spec)
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(root))
    assert set(found) == {parameter.name for parameter in spec.model.parameters}
    for index, parameter in enumerate(spec.model.parameters):
        values = found[parameter.name].detach().float().numpy()
        assert np.array_equal(values.reshape(-1), expected(spec, index)), parameter.name
