""".bin output: an archive torch loads safely and lazily, sound to any zip tool, ties still ties, nothing carried along."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyzero
from lazyzero.errors import InvalidRequest, WriteError
from lazyzero.export import torch_bin
from lazyzero.export.crc import combine
from lazyzero.export.plan import make_plan
from lazyzero.tensor import Placeholder
from tests import oracle
from tests.export.test_safetensors import STORED, filled
from tests.generator.simple import module_only, usual
from tests.strategies import NAMES

pytestmark = pytest.mark.usefixtures("without_fsync")


def bins(output: Path) -> list[Path]:
    return sorted(output.glob("*.bin"))


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("shard", [None, 700])
def test_torch_loads_it_without_trusting_it(shard: int | None, mmap: bool, tmp_path: Path) -> None:
    """weights_only=True, mapped or read: every tensor, bit for bit, tied ones as one storage."""
    truth = usual(tmp_path / "ckpt", stage=1, world=3)
    lazyzero.convert(truth.root, tmp_path / "out", format="bin", max_shard_size=shard)
    loaded = {}
    for path in bins(tmp_path / "out"):
        loaded.update(torch.load(path, weights_only=True, mmap=mmap))
    assert loaded.keys() == truth.want.keys()
    for name, want in truth.want.items():
        assert oracle.same_bits(oracle.as_dtype(want, torch.float32), loaded[name])
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()


def test_tied_names_stay_tied_when_written_to(tmp_path: Path) -> None:
    """Changing one of a tied pair after loading changes the other, and nothing else."""
    truth = usual(tmp_path / "ckpt")
    lazyzero.convert(truth.root, tmp_path / "out", format="bin", max_shard_size=None)
    loaded = torch.load(bins(tmp_path / "out")[0], weights_only=True)
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    loaded["head.weight"].zero_()
    assert not loaded["embed.weight"].any()
    assert all(oracle.same_bits(loaded[n], before[n]) for n in before if n not in ("head.weight", "embed.weight"))


def test_no_shard_carries_more_than_its_own_tensors(tmp_path: Path) -> None:
    """Each file is its tensors' bytes and a frame of a few hundred bytes for each, however large the flat was."""
    truth = usual(tmp_path / "ckpt", stage=2, world=2)
    lazyzero.convert(truth.root, tmp_path / "out", format="bin", max_shard_size=300)
    paths = bins(tmp_path / "out")
    assert len(paths) == 3
    for path in paths:
        tensors = torch.load(path, weights_only=True).values()
        own = sum({t.data_ptr(): t.nbytes for t in tensors}.values())
        assert own <= path.stat().st_size <= own + 2048 + 512 * len(tensors)
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)


def test_zip_tools_find_nothing_wrong(tmp_path: Path) -> None:
    """Checksums are right in the members and in the directory: zipfile and `unzip -t` agree."""
    truth = usual(tmp_path / "ckpt", stage=3, world=3)
    lazyzero.convert(truth.root, tmp_path / "out", format="bin", max_shard_size=700, dtype="bf16")
    for path in bins(tmp_path / "out"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        if tool := shutil.which("unzip"):
            done = subprocess.run([tool, "-t", path], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


@settings(max_examples=40)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from([*STORED, torch.complex128]), st.lists(st.integers(0, 6), max_size=3).map(tuple)),
        min_size=1,
        max_size=9,
    ),
    names=st.lists(NAMES, min_size=9, max_size=9, unique=True),
    seed=st.integers(0, 99),
)
def test_any_tensors_survive(kinds: list[tuple[torch.dtype, tuple[int, ...]]], names: list[str], seed: int) -> None:
    """All dtypes, odd names, empty tensors and scalars load with the bits they had, from a sound archive."""
    tensors = {
        n: filled(shape, dtype, seed + i) for i, (n, (dtype, shape)) in enumerate(zip(names, kinds, strict=False))
    }
    with tempfile.TemporaryDirectory() as work:
        root = module_only(Path(work) / "ckpt", tensors)
        lazyzero.convert(root, Path(work) / "out", dtype="keep", format="bin", max_shard_size=None)
        path = Path(work) / "out" / "pytorch_model.bin"
        loaded = torch.load(path, weights_only=True)
        assert loaded.keys() == tensors.keys()
        for name, want in tensors.items():
            assert (loaded[name].dtype, loaded[name].shape) == (want.dtype, want.shape)
            assert oracle.raw(loaded[name]) == oracle.raw(want)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


def test_before_skip_data_torch_writes_zeros_that_are_then_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.2 to 2.5 cannot leave holes; the result is the same bytes."""
    truth = usual(tmp_path / "ckpt")
    lazyzero.convert(truth.root, tmp_path / "now", format="bin", max_shard_size=None)
    monkeypatch.setattr(torch.serialization, "skip_data", contextlib.nullcontext)
    lazyzero.convert(truth.root, tmp_path / "then", format="bin", max_shard_size=None)
    now, then = (torch.load(bins(tmp_path / way)[0], weights_only=True) for way in ("now", "then"))
    assert all(oracle.same_bits(now[name], then[name]) for name in truth.want)
    with zipfile.ZipFile(bins(tmp_path / "then")[0]) as archive:
        assert archive.testzip() is None


def test_tied_drop_is_for_safetensors(tmp_path: Path) -> None:
    """A .bin file keeps ties by itself; asking to drop them is refused before anything is opened."""
    with pytest.raises(InvalidRequest, match="keeps tied tensors as one storage"):
        lazyzero.convert(tmp_path / "nothing", tmp_path / "out", format="bin", tied="drop")


def test_a_skeleton_never_replaces_a_file(tmp_path: Path) -> None:
    """Where a file stands already, writing the frame fails as a WriteError that names it."""
    plan = make_plan({"a": Placeholder((2,), lazyzero.dtypes.FLOAT32)}, format="bin", dtype=None, max_shard_size=None)
    path = tmp_path / "x"
    path.write_bytes(b"mine")
    with pytest.raises(WriteError, match=str(path)):
        torch_bin.write_skeleton(path, plan.shards[0])
    assert path.read_bytes() == b"mine"


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_checksums_of_parts_join_to_that_of_the_whole(first: bytes, second: bytes) -> None:
    """combine(crc(A), crc(B), len(B)) is crc(A + B)."""
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_checksums_join_over_lengths_beyond_any_buffer() -> None:
    """Eight GiB of zeros after some text: one long step equals many short ones."""
    start = zlib.crc32(b"some text")
    block, count = zlib.crc32(bytes(1 << 20)), 8 << 10
    one_by_one = start
    for _ in range(count):
        one_by_one = combine(one_by_one, block, 1 << 20)
    whole = block
    for power in range(13):
        whole = combine(whole, whole, (1 << 20) << power)
    assert combine(start, whole, 8 << 30) == one_by_one
