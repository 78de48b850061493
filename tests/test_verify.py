"""verify finds whatever is not as it should be: a bit, a name, a file, a tie, a dtype, an index."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import lazyzero
from lazyzero import readers
from lazyzero.dtypes import DTYPES
from lazyzero.errors import (
    LazyZeroError,
    VerificationFailed,
)
from lazyzero.readers import cut
from lazyzero.verify import require, verify
from tests import oracle
from tests.files import state
from tests.generator.simple import module_only
from tests.generator.spec import Buffer, Param, Spec
from tests.generator.stages import write

pytestmark = pytest.mark.usefixtures("without_fsync")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without NaNs, and outputs of it: `st` (3 shards), `bin` (3 shards), `one`, `drop`."""
    work = tmp_path_factory.mktemp("verify")
    params = (
        Param("embed.weight", (20, 8), aliases=("head.weight",)),
        Param("layer.weight", (16, 8)),
        Param("layer.bias", (16,)),
        Param("frozen", (5, 3), kind="frozen"),
    )
    truth = write(Spec(stage=2, world=3, params=params, buffers=(Buffer("mask", (6,), "bool"),)), work / "ckpt")
    for name, options in {
        "st": {"max_shard_size": 700},
        "bin": {"max_shard_size": 600, "format": "bin"},
        "one": {"max_shard_size": None},
        "drop": {"max_shard_size": None, "tied": "drop"},
    }.items():
        lazyzero.convert(truth.root, work / name, **options)  # type: ignore[arg-type]
        (work / name / ".lazyzero.json").unlink()
    return work


@pytest.fixture
def output(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the outputs, to spoil."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(made / name, tmp_path / name))

    return copy


def found(made: Path, output: Path, **options: object) -> list[str]:
    return list(verify(made / "ckpt", output, **options).differences)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["st", "bin", "one", "drop"])
def test_a_right_output_is_right(made: Path, name: str) -> None:
    """Every form of output: no difference, every element compared, every check made in full, nothing written."""
    before = state(made)
    result = verify(made / "ckpt", made / name)
    assert result.differences == ()
    assert result.ok
    elements = 160 + 128 + 16 + 15 + 6
    assert (result.tensors, result.elements) == ((5, elements) if name == "drop" else (6, elements + 160))
    assert result.checked == 3
    assert state(made) == before
    require(result)


@settings(max_examples=120)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(made: Path, data: st.DataObject) -> None:
    """Headers, archive frames, paddings, pickles, every tensor, and the indexes: one bit is enough."""
    name = data.draw(st.sampled_from(["st", "bin"]))
    files = sorted((made / name).iterdir())
    path = data.draw(st.sampled_from(files))
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[position // 8] ^= 1 << position % 8
    spoiled = made / "spoiled"
    shutil.rmtree(spoiled, ignore_errors=True)
    shutil.copytree(made / name, spoiled)
    (spoiled / path.name).write_bytes(raw)
    try:
        result = verify(made / "ckpt", spoiled)
    except LazyZeroError as error:
        assert path.name in str(error)
    else:
        assert not result.ok


@pytest.mark.parametrize("name", ["one", "bin"])
def test_every_element_is_looked_at(made: Path, output: Callable[[str], Path], name: str) -> None:
    """The lowest bit of the first, a middle and the last element of each tensor."""
    folder = output(name)
    for path in oracle.weight_files(folder):
        whole = path.read_bytes()
        tensors = load_file(path) if name == "one" else torch.load(path, weights_only=True)
        for key, tensor in tensors.items():
            at = whole.find(oracle.raw(tensor))
            assert at > 0
            for element in {0, tensor.numel() // 2, tensor.numel() - 1}:
                raw = bytearray(whole)
                raw[at + element * tensor.dtype.itemsize] ^= 1
                path.write_bytes(raw)
                # The bytes found may be those of its tied twin.
                named = {key, "embed.weight"} if key == "head.weight" else {key}
                lines = found(made, folder)
                assert {line.partition(":")[0] for line in lines} & named, (key, element, lines)
        path.write_bytes(whole)
    assert found(made, folder) == []


def test_require_raises_with_the_first_difference(made: Path, output: Callable[[str], Path]) -> None:
    """And how many more there are."""
    folder = output("st")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(VerificationFailed, match="3 weight files and no index"):
        require(verify(made / "ckpt", folder))
    (folder / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(VerificationFailed, match=r"\(and [0-9]+ more\)"):
        require(verify(made / "ckpt", folder))


def test_a_single_file_may_be_given(made: Path) -> None:
    """The file in place of its directory."""
    assert verify(made / "ckpt", made / "one" / "model.safetensors").ok


@pytest.mark.parametrize("format", ["safetensors", "bin"])
@pytest.mark.parametrize("block", [8, 24, 100])
def test_blocks_of_any_size_give_the_whole(
    format: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of all kinds, read in blocks smaller than a row, than an element, or larger than everything."""
    tensors = {
        "scalar": torch.tensor(3.5),
        "deep": torch.arange(60, dtype=torch.float32).reshape(3, 4, 5),
        "long": torch.arange(50, dtype=torch.int64),
        "wide": torch.arange(64, dtype=torch.bfloat16).reshape(2, 32),
        "empty": torch.empty(0, 4),
        "small": torch.arange(12, dtype=torch.float32).to(torch.float8_e4m3fn).reshape(3, 4),
        "flags": torch.tensor([True, False, True]),
    }
    root = module_only(tmp_path / "ckpt", tensors)
    lazyzero.convert(root, tmp_path / "out", dtype="keep", format=format, max_shard_size=None)
    monkeypatch.setattr(readers, "BLOCK", block)
    assert verify(root, tmp_path / "out", dtype="keep").differences == ()
    path = oracle.weight_files(tmp_path / "out")[0]
    raw = path.read_bytes()
    for name in ("deep", "wide", "long"):
        spoiled = bytearray(raw)
        spoiled[raw.find(oracle.raw(tensors[name])) + tensors[name].nbytes - 1] ^= 1
        path.write_bytes(spoiled)
        named = [line.partition(":")[0] for line in verify(root, tmp_path / "out").differences]
        assert [who for who in named if who != path.name] == [name]  # a .bin archive's checksum is wrong as well


@given(shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), count=st.integers(1, 40))
def test_a_cut_is_row_major_and_complete(shape: tuple[int, ...], count: int) -> None:
    """The blocks, one after the other, are the array; none is over its size, each begins where it says."""
    array = np.arange(int(np.prod(shape))).reshape(shape)
    at = 0
    for index, start in cut(shape, count):
        part = np.asarray(array[index]).reshape(-1)
        assert start == at
        assert 0 < len(part) <= count
        assert list(part) == list(range(at, at + len(part)))
        at += len(part)
    assert at == array.size


def test_every_dtype_the_format_names_is_known() -> None:
    """Tags are unique: a file's dtype is one of ours."""
    tags = [dtype.tag for dtype in DTYPES.values() if dtype.tag]
    assert len(tags) == len(set(tags))
