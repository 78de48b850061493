"""safetensors output is, byte for byte, what the library itself would have written."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lazyzero
from lazyzero.dtypes import DTYPES
from lazyzero.errors import UnsupportedLayout
from lazyzero.export.plan import Shard
from lazyzero.export.safetensors import encode_header, lay_out
from lazyzero.tensor import Placeholder
from tests.generator.simple import module_only, usual
from tests.strategies import NAMES

pytestmark = pytest.mark.usefixtures("without_fsync")

# Every element type torch has that the format can hold and a state dict may.
STORED = [getattr(torch, name) for name in DTYPES if name not in ("complex128",) and hasattr(torch, name)]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of any bits at all."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def theirs(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> bytes:
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    return path.read_bytes()


@settings(max_examples=60)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(STORED), st.lists(st.integers(0, 6), max_size=3).map(tuple)), min_size=1, max_size=9
    ),
    names=st.lists(NAMES, min_size=9, max_size=9, unique=True),
    seed=st.integers(0, 99),
)
def test_a_file_has_the_librarys_bytes(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], names: list[str], seed: int
) -> None:
    """All dtypes, odd names, empty tensors and scalars: order, header, padding and data equal save_file's."""
    tensors = {
        name: filled(shape, dtype, seed + i) for i, (name, (dtype, shape)) in enumerate(zip(names, kinds, strict=False))
    }
    with tempfile.TemporaryDirectory() as work:
        root = module_only(Path(work) / "ckpt", tensors)
        lazyzero.convert(root, Path(work) / "out", dtype="keep", max_shard_size=None)
        ours = (Path(work) / "out" / "model.safetensors").read_bytes()
        assert ours == theirs(tensors, Path(work) / "theirs.safetensors")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "keep"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_shard_has_the_librarys_bytes(stage: int, dtype: str, tmp_path: Path) -> None:
    """A sharded export of a partitioned checkpoint: each file is what save_file makes of the tensors in it."""
    truth = usual(tmp_path / "ckpt", stage=stage, world=3)
    report = lazyzero.convert(truth.root, tmp_path / "out", dtype=dtype, max_shard_size=700)
    shards = [tmp_path / "out" / name for name in report.files if name.endswith(".safetensors")]
    assert len(shards) > 2
    for shard in shards:
        assert shard.read_bytes() == theirs(load_file(shard), tmp_path / "theirs")


def test_dropped_aliases_are_recorded_beside_their_owner(tmp_path: Path) -> None:
    """`tied='drop'` writes the owner alone and names the alias in that file's metadata, as save_model does."""
    truth = usual(tmp_path / "ckpt")
    report = lazyzero.convert(truth.root, tmp_path / "out", max_shard_size=None, tied="drop")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118 - not a mapping
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert report.tied == {"head.weight": "embed.weight"}
    clone = lazyzero.convert(truth.root, tmp_path / "clone", max_shard_size=None)
    assert clone.nbytes > report.nbytes
    both = load_file(tmp_path / "clone" / "model.safetensors")
    assert torch.equal(both["head.weight"], both["embed.weight"])


def test_the_index_is_the_text_transformers_writes(tmp_path: Path) -> None:
    """Two-space indents, sorted keys, a newline at the end, total_size and weight_map alone."""
    truth = usual(tmp_path / "ckpt")
    report = lazyzero.convert(truth.root, tmp_path / "out", max_shard_size=700)
    raw = (tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8")
    where = {}
    for name in report.files[:-1]:
        where.update(dict.fromkeys(load_file(tmp_path / "out" / name), name))
    total = sum(t.numel() * (8 if t.dtype is torch.int64 else 4) for t in truth.want.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    assert raw == json.dumps(index, indent=2, sort_keys=True) + "\n"


def test_a_dtype_the_format_lacks_names_the_tensor_and_the_way_out() -> None:
    """complex128 ends before a byte is written, with what to do."""
    shard = Shard("model.safetensors", (("z", Placeholder((2,), DTYPES["complex128"])),), 32)
    with pytest.raises(UnsupportedLayout, match=r"^z: safetensors has no complex128 .*--format bin"):
        lay_out(shard)


def test_a_header_no_reader_accepts_is_refused() -> None:
    """The library reads headers of up to 100 MB; one byte more is never written."""
    padding = "x" * 100_000_000
    with pytest.raises(UnsupportedLayout, match="smaller --max-shard-size"):
        encode_header({"__metadata__": {"format": padding}})
