"""Places that cannot take the output: a full disk, a read-only one, a file; each on a file system of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyzero
from lazyzero.cli import main
from lazyzero.errors import InvalidRequest, LazyZeroError, NotEnoughSpace, OutputRefused, WriteError
from lazyzero.export import kernel
from lazyzero.export.trace import MemoryTrace
from tests.files import contents, state
from tests.generator.simple import module_only, usual

Mount = Callable[..., Path]
KINDS: list[dict[str, Any]] = [
    {"max_shard_size": "200KB"},
    {"max_shard_size": "200KB", "checksum": "sha256", "workers": 1},
    {"max_shard_size": None},
    {"max_shard_size": "200KB", "format": "bin"},
    {"max_shard_size": None, "format": "bin"},
]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a tmpfs of so many KiB at `tmp_path`/mounted; called again, changes it."""
    place = tmp_path / "mounted"
    place.mkdir()

    def mounted(size: int, *options: str) -> Path:
        how = ["-o", ",".join([f"size={size}k", *(["remount"] if place.is_mount() else []), *options])]
        done = subprocess.run(["mount", "-t", "tmpfs", *how, "tmpfs", str(place)], capture_output=True, check=False)
        if done.returncode and not place.is_mount():
            pytest.skip("mounting a tmpfs is not permitted here")
        assert not done.returncode, done.stderr
        return place

    yield mounted
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One megabyte in tensors of 50 KB."""
    tensors = {f"layer.{number}": torch.full((12_500,), float(number)) for number in range(20)}
    return module_only(tmp_path_factory.mktemp("places") / "ckpt", tensors)


@pytest.mark.parametrize("preallocates", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_really_full(
    kind: dict[str, Any], preallocates: bool, checkpoint: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it happens: NotEnoughSpace naming the file, whole shards kept, nothing unfinished; with more space the same
    command goes on, and the result is that of an undisturbed run."""
    if not preallocates:
        monkeypatch.setattr(kernel, "allocate", lambda fd, size: False)
    lazyzero.convert(checkpoint, mount(4096) / "undisturbed", **kind)
    whole = contents(mount(4096) / "undisturbed")
    for size in (8, 100, 260, 450, 750, 980):
        output = mount(4096) / "out"
        subprocess.run(["rm", "-rf", str(output), str(output.parent / "undisturbed")], check=True)
        output.mkdir()
        mount(size)
        with pytest.raises(NotEnoughSpace, match=r"No space left on device; free some space.*again"):
            lazyzero.convert(checkpoint, output, force=True, **kind)
        found = contents(output)
        assert found.items() < whole.items()
        assert {path.name for path in output.iterdir()} == ({*found, ".lazyzero.json"} if found else set())
        mount(4096)
        assert lazyzero.convert(checkpoint, output, **kind).resumed == len(found)
        assert contents(output) == whole


def test_the_check_before_the_first_byte(checkpoint: Path, mount: Mount, capsys: pytest.CaptureFixture[str]) -> None:
    """What is needed and what is free is said; nothing is written, no directory made; --force tries."""
    place = mount(1500)
    assert main(["convert", str(checkpoint), str(place / "out")]) == 1
    said = capsys.readouterr().err
    assert "needs 1.0 MB" in said
    assert "1.5 MB are free; nothing was written" in said
    assert not list(place.iterdir())
    assert main(["convert", str(checkpoint), str(place / "out"), "--force"]) == 0


def test_a_disk_that_is_full_of_what_is_to_be_replaced(checkpoint: Path, mount: Mount) -> None:
    """`overwrite` counts the space it is about to free."""
    place = mount(2200)
    lazyzero.convert(checkpoint, place / "out")
    with pytest.raises(NotEnoughSpace):
        lazyzero.convert(checkpoint, place / "other")
    lazyzero.convert(checkpoint, place / "out", dtype="bf16", overwrite=True)


def test_shards_that_leave_through_little_space(checkpoint: Path, mount: Mount, tmp_path: Path) -> None:
    """One shard's worth of disk is enough for a model that is taken away as it is written."""
    place = mount(1500)
    (tmp_path / "taken").mkdir()
    words = ["convert", str(checkpoint), str(place / "out"), "--max-shard-size", "200KB"]
    assert main(words) == 1
    assert main([*words, "--on-shard", f'mv "$LAZYZERO_PATH" {tmp_path}/taken/']) == 0
    lazyzero.convert(checkpoint, tmp_path / "undisturbed", max_shard_size="200KB")
    assert contents(tmp_path / "taken") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_only_file_system(kind: dict[str, Any], checkpoint: Path, mount: Mount) -> None:
    """For a new directory and for one that is there, empty or half filled: an error that says so, everything as before."""
    (mount(4096) / "empty").mkdir()
    finished = 0

    def stop(file: Any) -> None:
        nonlocal finished
        finished += 1
        raise RuntimeError

    with pytest.raises(RuntimeError):
        lazyzero.convert(checkpoint, mount(4096) / "half", on_shard=stop, **kind)
    assert finished
    place = mount(4096, "ro")
    before = state(place)
    for name in ("new", "new/deeper", "empty", "half"):
        for overwrite in (False, True):
            if name == "half" and kind["max_shard_size"] is None and not overwrite:
                continue  # all is done there
            with pytest.raises(WriteError, match="Read-only file system") as raised:
                lazyzero.convert(checkpoint, place / name, overwrite=overwrite, **kind)
            assert str(place / name) in str(raised.value)
    assert state(place) == before
    mount(4096, "rw")


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_something_else_in_the_place_of_the_directory(number: int, tmp_path: Path) -> None:
    """A file, a dangling link, a path below a file, a name too long: one line, exit code 1, nothing made."""
    checkpoint = usual(tmp_path / "ckpt").root
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    output = {1: "file", 2: "link", 3: "file/out", 4: f"a/b/{'n' * 300}/c"}[number]
    before = state(tmp_path)
    with pytest.raises((OutputRefused, WriteError)) as raised:
        lazyzero.convert(checkpoint, tmp_path / output, overwrite=True)
    assert output.split("/")[0] in str(raised.value)
    assert "\n" not in str(raised.value)
    assert state(tmp_path) == before
    assert main(["convert", str(checkpoint), str(tmp_path / output)]) == 1


def test_a_name_that_none_can_have(tmp_path: Path) -> None:
    """A NUL is an argument that cannot be honoured, not a crash."""
    checkpoint = usual(tmp_path / "ckpt").root
    with pytest.raises(InvalidRequest, match="NUL"):
        lazyzero.convert(checkpoint, f"{tmp_path}/a\0b")


@pytest.mark.parametrize("name", ["model.safetensors", "SHA256SUMS", "model.safetensors.lazyzero.tmp"])
def test_directories_under_names_to_be_written(name: str, tmp_path: Path) -> None:
    """They are refused, with --overwrite too, and stay with what is in them."""
    checkpoint = usual(tmp_path / "ckpt").root
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / name / "mine").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(LazyZeroError, match=name):
            lazyzero.convert(checkpoint, tmp_path / "out", overwrite=overwrite, checksum="sha256")
    assert (tmp_path / "out" / name / "mine").read_text() == "mine"


def test_a_stream_into_a_full_disk(checkpoint: Path, mount: Mount) -> None:
    """A redirection to a file: exit code 1, one line; no reader takes what is there for whole."""
    place = mount(500)
    with (place / "stream").open("wb") as file:
        command = [sys.executable, "-m", "lazyzero", "convert", str(checkpoint), "-"]
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("lazyzero: error: standard output: could not be written: No space left")
    data = (place / "stream").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert len(data) < max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")


def test_a_memory_trace_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    """A full disk under the trace is told at the end, in one line; what was converted is there."""
    with pytest.raises(NotEnoughSpace, match="/dev/full: could not be written"), MemoryTrace("/dev/full"):
        lazyzero.convert(checkpoint, tmp_path / "out")
    assert lazyzero.verify(checkpoint, tmp_path / "out").ok
    with pytest.raises(WriteError, match="could not be opened"), MemoryTrace(tmp_path):
        raise AssertionError("unreachable")


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    """A directory whose name is no text is written to and spoken of all the same."""
    checkpoint = usual(tmp_path / "ckpt").root
    output = os.fsencode(tmp_path) + b"/out\xff\n"
    command = [sys.executable, "-m", "lazyzero"]
    for words in (["convert", str(checkpoint), output], ["verify", str(checkpoint), output]):
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run([*command, *words], capture_output=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr


def test_closed_streams(tmp_path: Path) -> None:
    """`>&-` and `2>&-`, as daemons have it: the conversion is made; to standard output there is none."""
    checkpoint = usual(tmp_path / "ckpt").root
    command = f"{sys.executable} -m lazyzero convert {checkpoint}"
    assert subprocess.run(f"{command} {tmp_path}/out >&- 2>&-", shell=True, check=False).returncode == 0
    assert lazyzero.verify(checkpoint, tmp_path / "out").ok
    assert subprocess.run(f"{command} - >&- 2>{tmp_path}/said", shell=True, check=False).returncode == 2
    assert "standard output is closed" in (tmp_path / "said").read_text()
