"""Where output may go, what it may replace, and what is left when it may not."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest

import lazyzero
from lazyzero.errors import LazyZeroError, NotEnoughSpace, OutputRefused, WriteError
from lazyzero.export.outdir import is_ours
from tests.files import contents, state
from tests.generator.simple import usual

pytestmark = pytest.mark.usefixtures("without_fsync")
WAYS = [("safetensors", None), ("safetensors", 700), ("bin", None), ("bin", 700)]


@pytest.mark.parametrize(("format", "shard"), WAYS)
def test_sources_are_never_touched(format: str, shard: int | None, tmp_path: Path) -> None:
    """Hash, modification time and mode of every source file are as before, in a directory that may not be written."""
    truth = usual(tmp_path / "ckpt")
    for path in truth.tag.iterdir():
        path.chmod(0o444)
    truth.tag.chmod(0o555)
    before = state(truth.root)
    try:
        lazyzero.convert(truth.root, tmp_path / "out", format=format, max_shard_size=shard)
        assert state(truth.root) == before
    finally:
        truth.tag.chmod(0o755)


@pytest.mark.parametrize(("format", "shard"), WAYS)
def test_the_root_may_take_the_output_beside_everything_there(format: str, shard: int | None, tmp_path: Path) -> None:
    """Into checkpoint-500 itself: config, tokenizer and sources stay as they are, the new files stand beside them."""
    root = tmp_path / "checkpoint-500"
    usual(root)
    (root / "config.json").write_text("{}")
    (root / "adapter_model.safetensors").write_bytes(b"another's")
    before = state(root)
    report = lazyzero.convert(root, root, format=format, max_shard_size=shard)
    after = state(root)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {*report.files, ".lazyzero.json"}


def test_the_root_keeps_weights_it_has(tmp_path: Path) -> None:
    """A model.safetensors already in the root is not replaced without --overwrite, and then nothing else is written."""
    root = tmp_path / "checkpoint-500"
    usual(root)
    (root / "model.safetensors").write_bytes(b"older")
    before = state(root)
    with pytest.raises(OutputRefused, match=r"model\.safetensors.*--overwrite"):
        lazyzero.convert(root, root)
    assert state(root) == before
    lazyzero.convert(root, root, overwrite=True)
    assert (root / "model.safetensors").stat().st_size > 100


@pytest.mark.parametrize("inside", [".", "new", "new/deeper"])
def test_the_tag_directory_is_never_written_to(inside: str, tmp_path: Path) -> None:
    """Neither the tag directory nor anything below it, under any spelling, overwrite or not; nothing appears there."""
    truth = usual(tmp_path / "ckpt")
    before = state(truth.root)
    link = tmp_path / "link"
    link.symlink_to(truth.tag)
    for output in (truth.tag / inside, link / inside, truth.root / "x" / ".." / "global_step3" / inside):
        for source in (truth.root, truth.tag):
            with pytest.raises(OutputRefused, match="tag directory"):
                lazyzero.convert(source, output, overwrite=True)
    assert state(truth.root) == before


def test_parents_are_made_and_an_empty_directory_will_do(tmp_path: Path) -> None:
    """a/b/c appears with its parents; a directory that is there and empty is used."""
    truth = usual(tmp_path / "ckpt")
    lazyzero.convert(truth.root, tmp_path / "a" / "b" / "c")
    (tmp_path / "empty").mkdir()
    lazyzero.convert(truth.root, tmp_path / "empty")
    assert contents(tmp_path / "a" / "b" / "c") == contents(tmp_path / "empty")


def test_what_was_made_is_taken_away_when_nothing_came_of_it(tmp_path: Path) -> None:
    """After a refusal neither the output nor the parents made for it exist; a parent that was there stays."""
    truth = usual(tmp_path / "ckpt")
    (tmp_path / "there").mkdir()
    with pytest.raises(LazyZeroError):
        lazyzero.convert(truth.root, tmp_path / "there" / "a" / "b", max_memory="1MB")
    assert not list((tmp_path / "there").iterdir())


def test_a_directory_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    """The message names what is there and the ways out; everything stays."""
    truth = usual(tmp_path / "ckpt")
    output = tmp_path / "out"
    output.mkdir()
    for name in ("notes.txt", "b", "c", "d", "e"):
        (output / name).write_text("mine")
    before = state(output)
    with pytest.raises(OutputRefused, match=r"is not empty \(b, c, d, e \.\.\.\).*another place.*--overwrite"):
        lazyzero.convert(truth.root, output)
    assert state(output) == before


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """Given a file, or a path below one, nothing happens to it."""
    truth = usual(tmp_path / "ckpt")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputRefused, match="is a file"):
        lazyzero.convert(truth.root, tmp_path / "file", overwrite=True)
    with pytest.raises(WriteError, match="could not be created"):
        lazyzero.convert(truth.root, tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "mine"


def test_overwrite_removes_weight_files_of_our_naming_alone(tmp_path: Path) -> None:
    """Shards, single files and indexes of both formats go; everything whose name only resembles them stays."""
    truth = usual(tmp_path / "ckpt")
    output = tmp_path / "out"
    output.mkdir()
    ours = [
        "model.safetensors", "model.safetensors.index.json", "model-00001-of-00009.safetensors",
        "model-100000-of-123456.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin", ".lazyzero.json",
    ]  # fmt: skip
    others = [
        "adapter_model.safetensors", "model.safetensors.bak", "model-1-of-2.safetensors", "xmodel.safetensors",
        "training_args.bin", "optimizer.bin", "config.json", "model.onnx", "pytorch_model.bin.tmp", "tokenizer.model",
        "model-00001-of-00009.safetensors\n",
    ]  # fmt: skip
    for name in (*ours, *others):
        (output / name).write_bytes(b"old")
    assert [name for name in (*ours, *others) if is_ours(name)] == ours
    lazyzero.convert(truth.root, output, overwrite=True, max_shard_size=None)
    assert {path.name for path in output.iterdir()} == {*others, "model.safetensors", ".lazyzero.json"}
    assert all((output / name).read_bytes() == b"old" for name in others)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o027])
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_the_umask_is_honoured(mask: int, format: str, tmp_path: Path) -> None:
    """Files get 0666 less the umask, directories 0777 less it: what open() and mkdir() would have given."""
    truth = usual(tmp_path / "ckpt")
    before = os.umask(mask)
    try:
        lazyzero.convert(truth.root, tmp_path / "out", format=format, max_shard_size=700)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~mask
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~mask)
    assert len(modes) > 3


def test_two_conversions_do_not_share_a_directory(tmp_path: Path) -> None:
    """While another holds the directory, the second is told so and leaves it alone."""
    truth = usual(tmp_path / "ckpt")
    output = tmp_path / "out"
    output.mkdir()
    fd = os.open(output, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(OutputRefused, match="another conversion is writing there"):
            lazyzero.convert(truth.root, output)
        assert not list(output.iterdir())
    finally:
        os.close(fd)
    lazyzero.convert(truth.root, output)


def test_a_file_system_without_locks_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems refuse flock; the conversion goes on without."""
    truth = usual(tmp_path / "ckpt")

    def refuse(fd: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert lazyzero.convert(truth.root, tmp_path / "out").files == ("model.safetensors",)


def test_a_full_disk_is_known_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact bytes needed, what is free, and the ways out; --force tries all the same."""
    truth = usual(tmp_path / "ckpt")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(NotEnoughSpace, match=r"needs .* bytes\), 1\.0 KB are free; nothing was written.*--force"):
        lazyzero.convert(truth.root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert lazyzero.convert(truth.root, tmp_path / "out", force=True).files == ("model.safetensors",)


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing unlink under --overwrite ends in a WriteError with the file's name."""
    truth = usual(tmp_path / "ckpt")
    output = tmp_path / "out"
    (output / "model.safetensors").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"model\.safetensors: could not be removed"):
        lazyzero.convert(truth.root, output, overwrite=True)
