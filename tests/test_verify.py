"""verify finds whatever is not as it should be: a bit, a name, a file, a tie, a dtype, an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import lazyzero
from lazyzero import readers
from lazyzero.dtypes import DTYPES
from lazyzero.errors import (
    CheckpointNotFound,
    InvalidRequest,
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
def test_a_flipped_bit_anywhere_in_safetensors_or_index_is_found(made: Path, data: st.DataObject) -> None:
    """Header length, header, padding, every tensor, and the index: one bit is enough."""
    files = sorted((made / "st").iterdir())
    path = data.draw(st.sampled_from(files))
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[position // 8] ^= 1 << position % 8
    spoiled = made / "spoiled"
    shutil.rmtree(spoiled, ignore_errors=True)
    shutil.copytree(made / "st", spoiled)
    (spoiled / path.name).write_bytes(raw)
    try:
        result = verify(made / "ckpt", spoiled)
    except LazyZeroError as error:
        assert path.name in str(error)
    else:
        assert not result.ok


@settings(max_examples=80)
@given(data=st.data())
def test_a_flipped_bit_in_a_bin_file_is_found_or_changes_no_tensor(made: Path, data: st.DataObject) -> None:
    """Where verify finds nothing, torch maps exactly the right tensors; in a tensor's own bytes it finds everything."""
    path = data.draw(st.sampled_from(sorted((made / "bin").glob("*.bin"))))
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[position // 8] ^= 1 << position % 8
    spoiled = made / "spoiled-bin"
    shutil.rmtree(spoiled, ignore_errors=True)
    shutil.copytree(made / "bin", spoiled)
    (spoiled / path.name).write_bytes(raw)
    try:
        result = verify(made / "ckpt", spoiled)
    except LazyZeroError as error:
        assert path.name in str(error)
        return
    if not result.ok:
        return  # found
    right, got = (
        torch.load(folder / path.name, weights_only=True, mmap=True, map_location="cpu")
        for folder in (made / "bin", spoiled)
    )
    assert right.keys() == got.keys()
    assert all(oracle.same_bits(right[name], got[name]) for name in right)


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


def test_the_first_wrong_element_is_named(made: Path, output: Callable[[str], Path]) -> None:
    """Name, index, value, and what it should be."""
    folder = output("one")
    tensors = load_file(folder / "model.safetensors")
    right = tensors["layer.weight"][2, 3].item()
    tensors["layer.weight"][2, 3] = 0.5
    tensors["layer.weight"][9, 0] = 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shown = np.float32(right)
    assert found(made, folder) == [
        f"layer.weight: element [2, 3] is 0.5, should be {shown!s} (2 of 128 elements differ)"
    ]


def test_another_runs_shard_is_found(made: Path, output: Callable[[str], Path], tmp_path: Path) -> None:
    """A file of the same name and shapes, but of other weights."""
    params = (
        Param("embed.weight", (20, 8), aliases=("head.weight",)),
        Param("layer.weight", (16, 8)),
        Param("layer.bias", (16,)),
        Param("frozen", (5, 3), kind="frozen"),
    )
    other = write(
        Spec(stage=2, world=3, params=params, buffers=(Buffer("mask", (6,), "bool"),), seed=9), tmp_path / "other"
    )
    lazyzero.convert(other.root, tmp_path / "out", max_shard_size=700)
    for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        folder = output("st")
        shutil.copy(tmp_path / "out" / name, folder / name)
        assert found(made, folder)
        shutil.rmtree(folder)


def test_a_stale_index_is_found(made: Path, output: Callable[[str], Path]) -> None:
    """A name in another file, a name too many, a total that is off, and text that is no index."""
    path = (folder := output("st")) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    moved = {**index["weight_map"], "frozen": next(f for f in files if f != index["weight_map"]["frozen"])}
    for spoiled, told in (
        ({**index, "weight_map": moved}, "has frozen in"),
        ({**index, "weight_map": {**index["weight_map"], "ghost": files[0]}}, "has ghost in"),
        ({**index, "weight_map": {k: v for k, v in index["weight_map"].items() if k != "mask"}}, "has mask in no file"),
        ({**index, "metadata": {"total_size": 1}}, "total_size is 1"),
        ({"weight_map": index["weight_map"]}, "is no index"),
        ([1, 2], "is no index"),
    ):
        path.write_text(json.dumps(spoiled))
        lines = found(made, folder)
        assert len(lines) == 1, lines
        assert lines[0].startswith("model.safetensors.index.json: ")
        assert told in lines[0]
    path.write_bytes(b"\xff{")
    assert "is no index" in found(made, folder)[0]
    path.unlink()
    assert found(made, folder) == ["3 weight files and no index; the output is unfinished"]


def test_a_missing_file_is_found(made: Path, output: Callable[[str], Path]) -> None:
    """The files that are there are not a whole set, and are named."""
    folder = output("st")
    gone = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["layer.bias"]
    (folder / gone).unlink()
    lines = found(made, folder)
    assert any("not those of a set" in line for line in lines)


def test_an_extra_file_is_found(made: Path, output: Callable[[str], Path]) -> None:
    """A leftover shard repeats names; one of another model adds them."""
    folder = output("st")
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00004-of-00003.safetensors")
    assert any("is in model-00001-of-00003.safetensors and in model-00004" in line for line in found(made, folder))
    save_file({"ghost": torch.ones(2)}, folder / "model-00004-of-00003.safetensors", {"format": "pt"})
    assert "ghost: is in model-00004-of-00003.safetensors, not in the checkpoint" in found(made, folder)


def test_a_lost_tie_is_found(made: Path, output: Callable[[str], Path]) -> None:
    """Right values in two storages are not right in a .bin file."""
    folder = output("bin")
    for path in folder.glob("*.bin"):
        loaded = torch.load(path, weights_only=True)
        if "head.weight" in loaded:
            loaded["head.weight"] = loaded["head.weight"].clone()
            torch.save(loaded, path)
    lines = found(made, folder)
    assert "head.weight: no longer shares storage with embed.weight" in lines


def test_a_wrong_dtype_or_shape_is_found(made: Path, output: Callable[[str], Path]) -> None:
    """One tensor in another type, one transposed, and all of them when the type asked for is another."""
    folder = output("one")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["layer.bias"] = tensors["layer.bias"].half()
    tensors["embed.weight"] = tensors["embed.weight"].t().contiguous()
    save_file(tensors, path, {"format": "pt"})
    lines = found(made, folder, dtype="fp32")
    assert "layer.bias: is float16 in model.safetensors, should be float32" in lines
    assert "embed.weight: has shape [8, 20] in model.safetensors, [20, 8] in the checkpoint" in lines
    assert len([line for line in found(made, made / "one", dtype="bf16") if "should be bfloat16" in line]) == 5


def test_missing_metadata_is_found(made: Path, output: Callable[[str], Path]) -> None:
    """transformers refuses a file without format=pt."""
    folder = output("one")
    path = folder / "model.safetensors"
    save_file(load_file(path), path)
    assert found(made, folder) == ["model.safetensors: its metadata lacks format=pt, which transformers asks for"]


def test_a_dropped_alias_must_be_recorded(made: Path, output: Callable[[str], Path]) -> None:
    """An alias left out without a word, or recorded under another owner, is missing."""
    folder = output("drop")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for metadata in ({}, {"head.weight": "layer.weight"}):
        save_file(tensors, path, {"format": "pt", **metadata})
        assert "head.weight: is in the checkpoint, not in the output" in found(made, folder)
    save_file({k: v for k, v in tensors.items() if k != "mask"}, path, {"format": "pt", "head.weight": "embed.weight"})
    assert found(made, folder) == ["mask: is in the checkpoint, not in the output"]


def test_require_raises_with_the_first_difference(made: Path, output: Callable[[str], Path]) -> None:
    """And how many more there are."""
    folder = output("st")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(VerificationFailed, match="3 weight files and no index"):
        require(verify(made / "ckpt", folder))
    (folder / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(VerificationFailed, match=r"\(and [0-9]+ more\)"):
        require(verify(made / "ckpt", folder))


def test_what_cannot_be_verified_says_so(made: Path, output: Callable[[str], Path], tmp_path: Path) -> None:
    """No directory, an empty one, both formats at once, a broken file of each."""
    with pytest.raises(CheckpointNotFound, match="no such directory"):
        verify(made / "ckpt", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match="to verify"):
        verify(made / "ckpt", tmp_path / "empty")
    folder = output("st")
    shutil.copy(next((made / "bin").glob("*.bin")), folder)
    with pytest.raises(InvalidRequest, match="holds both"):
        verify(made / "ckpt", folder)
    for name, suffix in (("one", ".safetensors"), ("bin", ".bin")):
        broken = output(name)
        path = next(path for path in broken.iterdir() if path.suffix == suffix)
        path.write_bytes(path.read_bytes()[:50])
        assert any(path.name in line for line in found(made, broken))


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
