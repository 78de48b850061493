"""`verify` compares an output with its checkpoint: whatever differs is said, and what is right passes."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lazyzero
from lazyzero.cli import main
from lazyzero.errors import BrokenArchive, CheckpointNotFound, InvalidRequest, LazyZeroError, SourceChanged
from lazyzero.verify import Verification, verify
from tests.generator.simple import module_only, usual

pytestmark = pytest.mark.usefixtures("without_fsync")
WAYS = [("safetensors", None), ("safetensors", 700), ("bin", None), ("bin", 700)]
INDEX = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}


def converted(place: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint and an output of it."""
    usual(place / "ckpt")
    lazyzero.convert(place / "ckpt", place / "out", **options)
    return place / "ckpt", place / "out"


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], object]) -> None:
    """Changes the tensors or the metadata of a safetensors file, through the official library."""
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def lines(result: Verification) -> str:
    """What differs, as one text; something must."""
    assert not result.ok
    return "\n".join(result.differences)


@pytest.mark.parametrize(("format", "shard"), WAYS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "keep"])
def test_what_is_right_passes(format: str, shard: int | None, dtype: str, tmp_path: Path) -> None:
    """Every way of writing, with the dtype named or not; all elements are compared, by any number of threads."""
    checkpoint, output = converted(tmp_path, format=format, max_shard_size=shard, dtype=dtype, checksum="sha256")
    for workers in (1, 3):
        result = verify(checkpoint, output, workers=workers, dtype=dtype)
        assert result.differences == ()
        assert result.elements == sum(tensor.numel for tensor in lazyzero.open_checkpoint(checkpoint).values())
    assert verify(checkpoint, output).ok


@pytest.mark.parametrize("tied", ["clone", "drop"])
def test_names_left_to_their_owner_are_no_difference(tied: str, tmp_path: Path) -> None:
    """Whether tied names are written or dropped, the output is right."""
    checkpoint, output = converted(tmp_path, tied=tied, max_shard_size=700)
    assert verify(checkpoint, output).differences == ()


@pytest.mark.parametrize(("format", "shard"), WAYS)
def test_one_flipped_bit_anywhere(format: str, shard: int | None, tmp_path: Path) -> None:
    """In data, header, padding, archive frame, pickle, index or checksums: never taken for right."""
    checkpoint, output = converted(tmp_path, format=format, max_shard_size=shard, checksum="sha256")
    sums = output / "SHA256SUMS"
    hashes = sums.read_bytes()
    files = [path for path in output.iterdir() if path.name != ".lazyzero.json"]
    chance = random.Random(f"{format}{shard}")
    for _ in range(60):
        path = chance.choice(files)
        before = path.read_bytes()
        at = chance.randrange(len(before) * 8)
        damaged = bytearray(before)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        if path != sums:
            sums.unlink()  # it must be noticed without
        assert not verify(checkpoint, output, self_check=False).ok, f"{path.name}: bit {at}"
        path.write_bytes(before)
        sums.write_bytes(hashes)
    assert verify(checkpoint, output).ok


@pytest.mark.parametrize("shard", [None, 700])
def test_the_first_differing_element_is_named(shard: int | None, tmp_path: Path) -> None:
    """With its index, its value, what it should be, and how many differ; no other tensor is named."""
    checkpoint, output = converted(tmp_path, max_shard_size=shard)
    should = float(lazyzero.open_checkpoint(checkpoint)["layer.weight"][2, 3])

    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        if "layer.weight" in tensors:
            tensors["layer.weight"][2, 3] = 77.5
            tensors["layer.weight"][9, 0] = -1

    for path in output.glob("*.safetensors"):
        rewrite(path, change)
    (line,) = verify(checkpoint, output).differences
    assert line.startswith("layer.weight: element [2, 3] is 77.5, should be ")
    assert float(line.split("should be ")[1].split()[0]) == pytest.approx(should)
    assert line.endswith("(2 of 128 elements differ)")


def test_large_tensors_are_compared_to_their_ends(tmp_path: Path) -> None:
    """In a tensor of several blocks the last element counts, the first difference is the first, and all are counted."""
    values = torch.arange(5_000_000, dtype=torch.float32).reshape(2, 2_500_000)
    checkpoint = module_only(tmp_path / "ckpt", {"w": values, "empty": torch.empty(0, 3), "one": torch.tensor(1.0)})
    lazyzero.convert(checkpoint, tmp_path / "out")
    assert verify(checkpoint, tmp_path / "out").ok

    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        tensors["w"][1, 2_499_999] = 1
        tensors["w"][0, 7] = 1
        tensors["one"].fill_(2)

    rewrite(tmp_path / "out" / "model.safetensors", change)
    assert verify(checkpoint, tmp_path / "out").differences == (
        "w: element [0, 7] is 1.0, should be 7.0 (2 of 5000000 elements differ)",
        "one: element [] is 2.0, should be 1.0 (1 of 1 elements differ)",
    )


def test_nan(tmp_path: Path) -> None:
    """A copied NaN has exactly its bits; a cast one may be any NaN, but no number."""
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32)
    checkpoint = module_only(tmp_path / "ckpt", {"w": bits.view(torch.float32)})
    for dtype in ("fp32", "bf16", "fp16"):
        lazyzero.convert(checkpoint, tmp_path / dtype, dtype=dtype)
        assert verify(checkpoint, tmp_path / dtype).ok

        def other(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
            raw = tensors["w"].view(torch.int32 if tensors["w"].itemsize == 4 else torch.int16)
            raw[0] ^= 2

        rewrite(tmp_path / dtype / "model.safetensors", other)
        assert verify(checkpoint, tmp_path / dtype).ok == (dtype != "fp32")

        def number(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
            tensors["w"][1] = 0

        rewrite(tmp_path / dtype / "model.safetensors", number)
        assert "element [" in lines(verify(checkpoint, tmp_path / dtype))


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_a_shard_of_another_run(format: str, tmp_path: Path) -> None:
    """Of other values, of another dtype, or of another number of shards."""
    checkpoint, output = converted(tmp_path, format=format, max_shard_size=700)
    first = min(output.glob("*model-*"))
    usual(tmp_path / "other", seed=9)
    lazyzero.convert(tmp_path / "other", tmp_path / "values", format=format, max_shard_size=700)
    lazyzero.convert(checkpoint, tmp_path / "dtype", format=format, max_shard_size=350, dtype="bf16")
    lazyzero.convert(checkpoint, tmp_path / "count", format=format, max_shard_size=2000)
    kept = first.read_bytes()
    for other, said in (("values", "elements differ"), ("dtype", "is bfloat16"), ("count", "is in")):
        shutil.copyfile(min((tmp_path / other).glob("*model-*")), first)
        assert said in lines(verify(checkpoint, output)), other
        first.write_bytes(kept)
    assert verify(checkpoint, output).ok


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_files_and_index(format: str, tmp_path: Path) -> None:
    """Missing, superfluous or unreadable files, and an index that is missing, stale, or none."""
    checkpoint, output = converted(tmp_path, format=format, max_shard_size=700)
    index, (first, second, *_) = output / INDEX[format], sorted(output.glob("*model-*"))

    def said(break_it: Callable[[], object]) -> str:
        kept = tmp_path / "kept"
        shutil.copytree(output, kept)
        break_it()
        found = lines(verify(checkpoint, output))
        shutil.rmtree(output)
        kept.rename(output)
        return found

    def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[], object]:
        told = json.loads(index.read_text())
        change(told)
        return lambda: index.write_text(json.dumps(told))

    assert f"in {first.name}, which is not there" in said(first.unlink)
    assert "no index" in said(index.unlink)
    assert "is no index" in said(lambda: index.write_text("[" * 10**5))
    extra = f"{first.name.split('-')[0]}-00099-of-00099{first.suffix}"
    assert f"is in {extra} and in" in said(lambda: shutil.copyfile(first, output / extra)).replace(
        f"is in {first.name} and in {extra}", f"is in {extra} and in {first.name}"
    )
    assert "are not those of a set" in said(lambda: shutil.copyfile(first, output / extra))
    assert str(second) in said(lambda: second.write_bytes(second.read_bytes()[:-9]))
    assert "total_size is 1," in said(edited(lambda told: told["metadata"].update(total_size=1)))
    assert "has layer.bias in" in said(edited(lambda told: told["weight_map"].update({"layer.bias": first.name})))
    assert "has layer.bias in no file" in said(edited(lambda told: told["weight_map"].pop("layer.bias")))
    assert "has 1 tensors in x.bin, which is not" in said(
        edited(lambda told: told["weight_map"].update({"layer.bias": "x.bin"}))
    )
    assert "has other in" in said(edited(lambda told: told["weight_map"].update(other=first.name)))
    assert verify(checkpoint, output).ok


def test_names_shapes_dtypes_and_metadata(tmp_path: Path) -> None:
    """Each is compared, in a single file too; a tied name left out must be on record with its owner."""
    checkpoint, output = converted(tmp_path, max_shard_size=None, tied="drop")
    path = output / "model.safetensors"
    whole = path.read_bytes()

    def said(change: Callable[[dict[str, torch.Tensor], dict[str, str]], object]) -> str:
        rewrite(path, change)
        found = lines(verify(checkpoint, output))
        path.write_bytes(whole)
        return found

    assert "layer.bias: is in the checkpoint, not in the output" in said(lambda t, m: t.pop("layer.bias"))
    assert "new: is in model.safetensors, not in the checkpoint" in said(lambda t, m: t.update(new=torch.ones(2)))
    assert "layer.weight: has shape [8, 16]" in said(
        lambda t, m: t.update({"layer.weight": t["layer.weight"].reshape(8, 16)})
    )
    assert "steps: is int32" in said(lambda t, m: t.update(steps=t["steps"].int()))
    assert "layer.bias: is float64" in said(lambda t, m: t.update({"layer.bias": t["layer.bias"].double()}))
    assert "lacks format=pt" in said(lambda t, m: m.pop("format"))
    assert "head.weight: is in the checkpoint" in said(lambda t, m: m.pop("head.weight"))
    assert "says that head.weight is layer.bias" in said(lambda t, m: m.update({"head.weight": "layer.bias"}))
    assert "says that note is hello" in said(lambda t, m: m.update(note="hello"))
    assert verify(checkpoint, output).ok
    assert not verify(checkpoint, output, dtype="bf16").ok


def test_ties_of_bin_files(tmp_path: Path) -> None:
    """Tied names share a storage, and names that are not tied do not, though all values are right."""
    checkpoint, output = converted(tmp_path, format="bin", max_shard_size=None)
    path = output / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True)
    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, path)
    assert "head.weight: no longer shares storage with embed.weight" in lines(verify(checkpoint, output))
    same = torch.ones(4)
    other = module_only(tmp_path / "other", {"a": same, "b": same.clone()})
    lazyzero.convert(other, tmp_path / "untied", format="bin")
    torch.save({"a": same, "b": same}, tmp_path / "untied" / "pytorch_model.bin")
    assert "b: shares storage with a, and is not tied" in lines(verify(other, tmp_path / "untied"))


def test_checksums(tmp_path: Path) -> None:
    """A hash that is out of date, a line for another file, one that lacks, one that is no such line."""
    checkpoint, output = converted(tmp_path, max_shard_size=700, checksum="sha256")
    sums = output / "SHA256SUMS"
    whole = sums.read_text()
    first = whole.splitlines()[0]
    for text, said in (
        (whole.replace(first[:8], "00000000"), "whose SHA-256 is"),
        (whole + f"{'0' * 64}  other\n", "line for 'other'"),
        (whole.replace(first, ""), "lacks model-00001"),
        (whole.replace("  model-00001", " model-00001"), "lacks model-00001"),
        ("\udcff", "line for"),
    ):
        sums.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert said in lines(verify(checkpoint, output))
    sums.write_text(whole)
    assert verify(checkpoint, output).ok


def test_no_output(tmp_path: Path) -> None:
    """No such directory, nothing in it, both formats in it: errors that say so."""
    checkpoint, output = converted(tmp_path)
    with pytest.raises(CheckpointNotFound, match="no such directory"):
        verify(checkpoint, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match=r"no model\*\.safetensors"):
        verify(checkpoint, tmp_path / "empty")
    (output / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="both"):
        verify(checkpoint, output)


@pytest.mark.parametrize("workers", [1, 2])
def test_sources_that_shrink_meanwhile(workers: int, tmp_path: Path) -> None:
    """A source that is truncated after it was opened is an error, not a difference."""
    checkpoint, output = converted(tmp_path)
    with lazyzero.open_checkpoint(checkpoint) as opened:
        for path in (checkpoint / "global_step3").glob("*optim*"):
            path.write_bytes(path.read_bytes()[:300])
        with pytest.raises(SourceChanged):
            verify(opened, output, workers=workers, self_check=False)


def test_odd_contents_of_bin_files(tmp_path: Path) -> None:
    """Not a dict, not tensors, a dtype that is never written: differences, no traceback."""
    checkpoint, output = converted(tmp_path, format="bin")
    for content in ([1], {"a": 1}, {"a": torch.ones(2, dtype=torch.float8_e8m0fnu)}, torch.ones(1)):
        torch.save(content, output / "pytorch_model.bin")
        assert str(output) in lines(verify(checkpoint, output))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 and 1, a line for each difference or all of it as JSON; `convert --verify` does it in the same run."""
    usual(tmp_path / "ckpt")
    words = [str(tmp_path / "ckpt"), str(tmp_path / "out")]
    assert main(["convert", *words, "--verify"]) == 0
    assert "every element was read back and is right" in capsys.readouterr().out
    assert main(["verify", *words]) == 0
    assert main(["verify", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert told["ok"] and told["differences"] == [] and told["files"] == ["model.safetensors"] and told["checked"] > 0
    rewrite(tmp_path / "out" / "model.safetensors", lambda tensors, metadata: tensors["layer.bias"].fill_(3))
    assert main(["verify", *words]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("differs: layer.bias: element [0] is 3.0")
    assert "1 differences" in shown.err
    assert main(["verify", *words, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 1
    assert main(["verify", str(tmp_path / "ckpt"), str(tmp_path / "nowhere")]) == 1


def test_convert_with_verify_fails_on_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written wrong is noticed by the same run."""
    from lazyzero.export import stream

    usual(tmp_path / "ckpt")
    fill = stream.Buffers.fill

    def wrong(self: Any, *args: Any, **named: Any) -> memoryview:
        data = fill(self, *args, **named)
        data[0] ^= 1
        return data

    monkeypatch.setattr(stream.Buffers, "fill", wrong)
    with pytest.raises(LazyZeroError, match="element"):
        lazyzero.convert(tmp_path / "ckpt", tmp_path / "out", verify=True)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """120 MB are verified by two threads in less than half of it beside the interpreter, whether one tensor has them or many."""
    checkpoint = module_only(
        tmp_path / "ckpt", {"w": torch.zeros(20_000_000), **{f"n{i}": torch.zeros(10, 250) for i in range(4000)}}
    )
    lazyzero.convert(checkpoint, tmp_path / "out", max_shard_size=None)
    command = [
        sys.executable,
        "-m",
        "lazyzero",
        "verify",
        str(checkpoint),
        str(tmp_path / "out"),
        "--json",
        "--no-self-check",
    ]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert told["ok"] and told["elements"] == 30_000_000
    assert told["peak_rss"] < 100e6


def test_readers_say_which_file_is_broken(tmp_path: Path) -> None:
    """A reader asked for a file that is none raises BrokenArchive with its name."""
    from lazyzero.readers import open_output

    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(BrokenArchive, match=name):
            open_output(tmp_path / name).tensors()
