"""The same command goes on where it stopped; anything else is refused, and what is refused is left as it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyzero
from lazyzero.cli import main
from lazyzero.errors import NotEnoughSpace, OutputRefused, WriteError
from lazyzero.export import outdir
from lazyzero.export.report import Finished
from tests.edit import edit
from tests.files import contents, state
from tests.generator.simple import module_only, usual
from tests.reliability.test_sources import at_window

pytestmark = pytest.mark.usefixtures("without_fsync")
OPTIONS: dict[str, Any] = {"max_shard_size": 700, "dtype": "fp32"}
JOURNAL = ".lazyzero.json"
FORMATS = ["safetensors", "bin"]


def interrupted(place: Path, monkeypatch: pytest.MonkeyPatch, windows: int = 3, **options: Any) -> tuple[Path, Path]:
    """A checkpoint and the output of a conversion that failed at its third window."""
    checkpoint = usual(place / "ckpt").root

    def fail() -> None:
        raise WriteError("the disk went away")

    with monkeypatch.context() as patch:
        at_window(patch, windows, fail)
        with pytest.raises(WriteError):
            lazyzero.convert(checkpoint, place / "out", **{**OPTIONS, **options})
    return checkpoint, place / "out"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("windows", [1, 2, 3, 4])
def test_goes_on(windows: int, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished is not written again, and the result is that of an undisturbed run; memory, workers and the way
    of reading may differ. Where nothing was finished nothing is left."""
    checkpoint, output = interrupted(tmp_path, monkeypatch, windows, format=format)
    before = {path.name: path.stat() for path in output.glob("*model*")} if output.exists() else {}
    assert output.exists() == bool(before)
    assert not list(tmp_path.rglob("*.tmp"))
    report = lazyzero.convert(checkpoint, output, **OPTIONS, format=format, workers=1, io="mmap", max_memory="1GB")
    assert report.resumed == len(before)
    assert all((output / name).stat().st_mtime_ns == seen.st_mtime_ns for name, seen in before.items())
    lazyzero.convert(checkpoint, tmp_path / "undisturbed", **OPTIONS, format=format)
    assert contents(output) == contents(tmp_path / "undisturbed")


def _touched(checkpoint: Path) -> None:
    path = min(checkpoint.rglob("*optim*"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _longer(checkpoint: Path) -> None:
    path = min(checkpoint.rglob("*optim*"))
    seen = path.stat()
    data = path.read_bytes()
    directory = data.rindex(b"PK\x05\x06")
    path.write_bytes(data[: directory + 20] + b"\x01\x00" + b"x")  # with a comment, the archive is as good
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _other_pickle(checkpoint: Path) -> None:
    path = checkpoint / "global_step3" / "mp_rank_00_model_states.pt"
    seen = path.stat()
    edit(path, lambda state: state.update(global_steps=4))
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _nothing(checkpoint: Path) -> None:
    """The checkpoint stays."""


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (_nothing, {"dtype": "bf16"}, "dtype was float32, now bfloat16"),
        (_nothing, {"max_shard_size": 701}, "max_shard_size was 700, now 701"),
        (_nothing, {"max_shard_size": None}, "max_shard_size was 700, now None"),
        (_nothing, {"tied": "drop"}, "tied was clone, now drop"),
        (_nothing, {"format": "bin"}, "format was safetensors, now bin"),
        (_nothing, {"exclude_frozen": True}, "tensors was 8, now 7"),
        (_nothing, {"state": "exp_avg"}, "state was None, now exp_avg"),
        (_touched, {}, "optim_states.pt was written anew"),
        (_longer, {}, r"optim_states.pt had \d+ bytes, now \d+"),
        (_other_pickle, {}, "mp_rank_00_model_states.pt (had|has other metadata)"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_anything_different_is_refused(
    change: Callable[[Path], None], options: dict[str, Any], said: str, finished: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The message says what differs, of an interrupted and of a finished export alike; the directory stays as it was.
    With `overwrite` it starts anew."""
    checkpoint, output = interrupted(tmp_path, monkeypatch)
    if finished:
        lazyzero.convert(checkpoint, output, **OPTIONS)
    change(checkpoint)
    before = state(output)
    with pytest.raises(OutputRefused, match=said):
        lazyzero.convert(checkpoint, output, **{**OPTIONS, **options})
    assert state(output) == before
    assert lazyzero.convert(checkpoint, output, **{**OPTIONS, **options}, overwrite=True).resumed == 0
    lazyzero.convert(checkpoint, tmp_path / "new", **{**OPTIONS, **options})
    assert contents(output) == contents(tmp_path / "new")


def test_a_checkpoint_that_moved_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are known by what they are, not by where they lie."""
    checkpoint, output = interrupted(tmp_path, monkeypatch)
    checkpoint.rename(tmp_path / "elsewhere")
    assert lazyzero.convert(tmp_path / "elsewhere", output, **OPTIONS).resumed == 2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shard", ["700B", "none"])
def test_a_finished_directory(format: str, shard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to do, and nothing is done, though other files have come to stand there and the disk is full."""
    usual(tmp_path / "ckpt")
    words = ["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--format", format, "--max-shard-size", shard]
    assert main([*words, "--checksum", "sha256"]) == 0
    (tmp_path / "out" / "config.json").write_text("{}")
    before = state(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outdir.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        assert main([*words, "--checksum", "sha256"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert state(tmp_path / "out") == before


JOURNALS: list[bytes] = [
    b"", b"{}", b"[]", b"null", b"1", b'"', b"\x80\x81\x00", bytes(4096), b'{"version": 2}', b'{"version": 1}', b"[" * 10**6,
    b'{"version": 1, "identity": [], "done": {}}', b'{"version": 1, "identity": {"settings": 1}, "done": {}}',
    b'{"version": 1, "identity": {"settings": {}, "plan": "", "sources": {"a": 1}}, "done": {}}',
    b'{"version": 1, "identity": {"settings": {}, "plan": "", "sources": {}}, "done": {"a": 1}}',
    b'{"version": 1, "identity": {"settings": {}, "plan": "", "sources": {}}, "done": {"a": ["x", "", 0]}}',
    b'{"version": 1, "identity": {"settings": {}, "plan": "", "sources": {}}, "done": {"a": [1e999, "", 0]}}',
    b'{"version": ' + b"9" * 10**5 + b"}",
]  # fmt: skip


def _named(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [*map(_named, JOURNALS), _huge, os.mkfifo, Path.mkdir, _loop], ids=str)
def test_a_journal_that_is_none(make: Callable[[Path], object], tmp_path: Path) -> None:
    """Empty, truncated, binary, of another version, nested, huge, a FIFO: refused at once, and left there."""
    checkpoint = usual(tmp_path / "ckpt").root
    output = tmp_path / "out"
    output.mkdir()
    make(output / JOURNAL)
    with pytest.raises(
        OutputRefused, match=r"\.lazyzero\.json: is not a journal of this version .*--overwrite"
    ) as error:
        lazyzero.convert(checkpoint, output)
    assert len(str(error.value)) < 500
    assert [path.name for path in output.iterdir()] == [JOURNAL]
    if make is Path.mkdir:
        with pytest.raises(WriteError, match=r"\.lazyzero\.json: could not be removed"):
            lazyzero.convert(checkpoint, output, overwrite=True)
    else:
        assert lazyzero.convert(checkpoint, output, overwrite=True).resumed == 0


def test_a_truncated_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere it is no journal; every flipped bit of it is noticed, or does no harm."""
    checkpoint, output = interrupted(tmp_path, monkeypatch)
    lazyzero.convert(checkpoint, tmp_path / "undisturbed", **OPTIONS)
    whole = (output / JOURNAL).read_bytes()
    kept = contents(output)
    for cut in range(0, len(whole), len(whole) // 20):
        (output / JOURNAL).write_bytes(whole[:cut])
        with pytest.raises(OutputRefused):
            lazyzero.convert(checkpoint, output, **OPTIONS)
    for at in range(0, len(whole) * 8, len(whole) * 8 // 97):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        (output / JOURNAL).write_bytes(damaged)
        try:
            lazyzero.convert(checkpoint, output, **OPTIONS)
        except OutputRefused:
            continue
        assert contents(output) == contents(tmp_path / "undisturbed")
        shutil.rmtree(output)
        output.mkdir()
        for name, data in kept.items():
            (output / name).write_bytes(data)


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 9), Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_finished_file_that_was_damaged(damage: Callable[[Path], object], tmp_path: Path) -> None:
    """A file that is not as it was left is written again; until it is there, no index is."""
    checkpoint = usual(tmp_path / "ckpt").root
    lazyzero.convert(checkpoint, tmp_path / "out", **OPTIONS, checksum="sha256")
    whole = contents(tmp_path / "out")
    damage(tmp_path / "out" / "model-00002-of-00004.safetensors")

    def look() -> None:
        assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
        assert not (tmp_path / "out" / "model-00002-of-00004.safetensors").exists()

    with pytest.MonkeyPatch.context() as patch:
        at_window(patch, 1, look)
        report = lazyzero.convert(checkpoint, tmp_path / "out", **OPTIONS, checksum="sha256")
    assert report.resumed == 4  # three shards and the checksums
    assert contents(tmp_path / "out") == whole


def test_temporary_files(tmp_path: Path) -> None:
    """Those of a killed run go with the next run, whether it had come to a journal or not; others' stay."""
    checkpoint = usual(tmp_path / "ckpt").root
    output = tmp_path / "out"
    output.mkdir()
    for name in ("model-00001-of-00009.safetensors.lazyzero.tmp", ".lazyzero.json.lazyzero.tmp"):
        (output / name).write_bytes(b"half")
    lazyzero.convert(checkpoint, output, **OPTIONS)
    (output / "pytorch_model.bin.lazyzero.tmp").write_bytes(b"half")
    (output / "model.safetensors.tmp").write_bytes(b"someone else's")
    lazyzero.convert(checkpoint, output, **OPTIONS)
    assert [path.name for path in output.glob("*.tmp")] == ["model.safetensors.tmp"]
    (output / JOURNAL).unlink()
    before = state(output)
    with pytest.raises(OutputRefused, match="is not empty"):
        lazyzero.convert(checkpoint, output, **OPTIONS)
    assert state(output) == before


HOLD = """
import sys, time
import lazyzero
files = lazyzero.stream(sys.argv[1], sys.argv[2], max_shard_size=700)
next(files)
print("holds", flush=True)
time.sleep(60)
"""


def test_two_at_once(tmp_path: Path) -> None:
    """The second is refused at once, of another process or of this one, and does no harm; killed, the first gives way."""
    checkpoint = usual(tmp_path / "ckpt").root
    command = [sys.executable, "-c", HOLD, str(checkpoint), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"holds\n"
        before = state(tmp_path / "out")
        for overwrite in (False, True):
            with pytest.raises(OutputRefused, match="another conversion is writing there"):
                lazyzero.convert(checkpoint, tmp_path / "out", **OPTIONS, overwrite=overwrite)
        assert state(tmp_path / "out") == before
        first.send_signal(signal.SIGKILL)
    assert lazyzero.convert(checkpoint, tmp_path / "out", **OPTIONS).resumed == 1
    files = lazyzero.stream(checkpoint, tmp_path / "here", max_shard_size=700)
    next(files)
    with pytest.raises(OutputRefused, match="another conversion"):
        lazyzero.convert(checkpoint, tmp_path / "here", **OPTIONS)
    files.close()  # type: ignore[attr-defined]
    lazyzero.convert(checkpoint, tmp_path / "here", **OPTIONS)


def test_a_failure_that_is_kept_holds_no_lock(tmp_path: Path) -> None:
    """Whoever handles the error of a first try may try again there and then."""
    checkpoint = usual(tmp_path / "ckpt").root

    def fail(finished: Finished) -> None:
        raise RuntimeError("the network")

    try:
        lazyzero.convert(checkpoint, tmp_path / "out", **OPTIONS, on_shard=fail)
    except RuntimeError:
        assert lazyzero.convert(checkpoint, tmp_path / "out", **OPTIONS).resumed == 1


def taken(place: Path, *words: str, hook: str = 'mv "$LAZYZERO_PATH" "$TAKEN/"') -> int:
    """`convert --on-shard` into `out`, each finished file moved to `taken`, each call on record in `calls`."""
    (place / "taken").mkdir(exist_ok=True)
    hook = hook.replace("$TAKEN", str(place / "taken"))
    call = f'echo "$LAZYZERO_INDEX/$LAZYZERO_COUNT" >> {place}/calls; {hook}'
    return main(
        ["convert", str(place / "ckpt"), str(place / "out"), "--max-shard-size", "700B", *words, "--on-shard", call]
    )


def calls(place: Path) -> list[str]:
    """The calls since the last time."""
    found = (place / "calls").read_text().split() if (place / "calls").exists() else []
    (place / "calls").unlink(missing_ok=True)
    return found


ALL = ["1/5", "2/5", "3/5", "4/5", "5/5"]


def test_what_was_taken_away_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The index comes last; finished, there is nothing to do, and nothing is handed over twice."""
    checkpoint = usual(tmp_path / "ckpt").root
    assert taken(tmp_path) == 0
    assert calls(tmp_path) == ALL
    lazyzero.convert(checkpoint, tmp_path / "undisturbed", **OPTIONS)
    assert contents(tmp_path / "taken") == contents(tmp_path / "undisturbed")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [JOURNAL]
    capsys.readouterr()
    assert taken(tmp_path) == 0
    assert calls(tmp_path) == []
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hook", "again"),
    [
        ('test $LAZYZERO_INDEX != 3 && mv "$LAZYZERO_PATH" "$TAKEN/"', 3),  # fails, the file stays
        ('mv "$LAZYZERO_PATH" "$TAKEN/" && test $LAZYZERO_INDEX != 3', 3),  # moves it, then fails
        ('mv "$LAZYZERO_PATH" "$TAKEN/" && test $LAZYZERO_INDEX != 5', 5),  # the same with the index
        ('test $LAZYZERO_INDEX != 1 && mv "$LAZYZERO_PATH" "$TAKEN/"', 1),
        ('cp "$LAZYZERO_PATH" "$TAKEN/" && test $LAZYZERO_INDEX != 4', 4),  # takes nothing away
    ],
)
def test_a_command_that_fails(hook: str, again: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stops the conversion with exit code 1; going on, it is called for that file again, and for none before it."""
    checkpoint = usual(tmp_path / "ckpt").root
    assert taken(tmp_path, hook=hook) == 1
    assert "the command for finished files ended with 1" in capsys.readouterr().err
    assert calls(tmp_path) == ALL[:again]
    assert taken(tmp_path) == 0
    assert calls(tmp_path) == ALL[again - 1 :]
    lazyzero.convert(checkpoint, tmp_path / "undisturbed", **OPTIONS)
    assert contents(tmp_path / "taken") == contents(tmp_path / "undisturbed")


def test_a_file_taken_away_unasked_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a consumer had been given and was done with may be missing."""
    checkpoint, output = interrupted(tmp_path, monkeypatch)
    (output / "model-00001-of-00004.safetensors").unlink()
    assert taken(tmp_path) == 0
    lazyzero.convert(checkpoint, tmp_path / "undisturbed", **OPTIONS)
    assert contents(tmp_path / "taken") == contents(tmp_path / "undisturbed")


def test_going_on_without_the_consumer(tmp_path: Path) -> None:
    """Without --on-shard everything is to be in the directory: what was taken away is written again."""
    checkpoint = usual(tmp_path / "ckpt").root
    assert taken(tmp_path, hook='test $LAZYZERO_INDEX != 4 && mv "$LAZYZERO_PATH" "$TAKEN/"') == 1
    assert lazyzero.convert(checkpoint, tmp_path / "out", **OPTIONS).resumed == 1
    lazyzero.convert(checkpoint, tmp_path / "undisturbed", **OPTIONS)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_streams_go_on(tmp_path: Path) -> None:
    """A consumer that ends early gets the file it was at again, as `resumed`, and those before it as `handed` too."""
    checkpoint = usual(tmp_path / "ckpt").root
    for finished in lazyzero.stream(checkpoint, tmp_path / "out", max_shard_size=700):
        finished.path.unlink()
        if finished.index == 2:
            break
    found = list(lazyzero.stream(checkpoint, tmp_path / "out", max_shard_size=700))
    assert [(one.index, one.resumed, one.handed, one.path.exists()) for one in found] == [
        (1, True, True, False), (2, False, False, True), (3, False, False, True), (4, False, False, True), (5, False, False, True)
    ]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_checksums(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sha256sum -c` takes SHA256SUMS, also after a resume, and after one of a run that was not asked for checksums."""
    for first in ("sha256", None):
        checkpoint, output = interrupted(tmp_path / str(first), monkeypatch, format=format, checksum=first)
        lazyzero.convert(checkpoint, output, **OPTIONS, format=format, checksum="sha256")
        check = subprocess.run(
            ["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=output, capture_output=True, text=True, check=True
        )
        weights = sorted(path.name for path in output.iterdir() if path.suffix in (".safetensors", ".bin"))
        assert check.stdout.splitlines() == [f"{name}: OK" for name in weights]
        before = state(output)
        lazyzero.convert(checkpoint, output, **OPTIONS, format=format, checksum="sha256")
        assert state(output) == before


def test_checksums_of_what_is_gone(tmp_path: Path) -> None:
    """Files that were taken away without a checksum cannot get one: refused, and the way on is said."""
    usual(tmp_path / "ckpt")
    assert taken(tmp_path, hook='test $LAZYZERO_INDEX != 4 && mv "$LAZYZERO_PATH" "$TAKEN/"') == 1
    with pytest.raises(OutputRefused, match="without a checksum"):
        lazyzero.convert(
            tmp_path / "ckpt", tmp_path / "out", **OPTIONS, checksum="sha256", on_shard=lambda finished: None
        )
    assert taken(tmp_path) == 0


def test_findings_of_files_that_are_done(tmp_path: Path) -> None:
    """`check_finite` looks at what an earlier run has written, too."""
    weights = {"a": torch.tensor([[1.0, float("nan")]]), "b": torch.full((2, 2), float("inf")), "c": torch.ones(3)}
    checkpoint = module_only(tmp_path / "ckpt", weights)
    for _ in range(2):
        report = lazyzero.convert(checkpoint, tmp_path / "out", max_shard_size=16, check_finite=True)
        assert [line for line in report.warnings if "NaN" in line] == ["NaN or infinity in a, b"]
    assert report.resumed == len(report.files)


def test_the_space_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked before the first byte, for what is still to be written; `force` tries anyway; files to be overwritten count
    as free, and are still there when it does not suffice."""
    checkpoint, output = interrupted(tmp_path, monkeypatch)

    def free(count: int) -> None:
        monkeypatch.setattr(outdir.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, count))

    before = state(output)
    free(1 << 20)
    for options in ({}, {"overwrite": True}):
        with pytest.raises(NotEnoughSpace, match=r"needs .* are free; nothing was written; .*--on-shard.*--force"):
            lazyzero.convert(checkpoint, output, **{**OPTIONS, "max_shard_size": 700}, **options)
        assert state(output) == before
    with pytest.raises(NotEnoughSpace):
        lazyzero.convert(checkpoint, tmp_path / "new", **OPTIONS)
    assert not (tmp_path / "new").exists()
    free((1 << 20) + 7000)
    list(lazyzero.stream(checkpoint, tmp_path / "shards", max_shard_size=700))  # one at a time
    with pytest.raises(NotEnoughSpace):
        lazyzero.convert(checkpoint, tmp_path / "new", **OPTIONS)
    free(0)
    assert lazyzero.convert(checkpoint, output, **OPTIONS, force=True).resumed == 2
    free((1 << 20) + 12_000)
    lazyzero.convert(checkpoint, output, **OPTIONS, overwrite=True)
    assert json.loads((output / JOURNAL).read_text())["version"] == 1
