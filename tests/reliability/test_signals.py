"""SIGINT and SIGTERM end everything within a second, whatever it waits for, and what is finished stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyzero
from lazyzero.cli import main
from lazyzero.export import hook
from tests.files import contents
from tests.generator.simple import module_only, usual

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}

# From the third window on (or from the beginning) every read takes half a minute, as over a network that hangs.
SLOW = """
import os, sys, time
from lazyzero import cli
from lazyzero.export import stream
read, fill, calls = os.preadv, stream.Buffers.fill, []
def hanging(*args):
    os.write(2, b"HANGS")
    time.sleep(30)
    return read(*args)
def counting(*args, **named):
    calls.append(1)
    if len(calls) > (0 if sys.argv[3] == "-" else 2):
        os.preadv = hanging
    return fill(*args, **named)
when = sys.argv[1]
if when == "now":
    os.preadv = hanging
elif when == "later":
    stream.Buffers.fill = counting
sys.argv[:2] = sys.argv[:1]
cli.program()
"""


def stopped(number: int, when: str, words: list[str], stdout: int = subprocess.DEVNULL) -> tuple[int, float, str]:
    """Runs a command line, sends the signal once it hangs; its exit code, how long it took to end, what it said."""
    command = [sys.executable, "-c", SLOW, when, *words]
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = b""
        while b"HANGS" not in said:
            more = os.read(process.stderr.fileno(), 1000)
            assert more, said
            said += more
        process.send_signal(number)
        began = time.monotonic()
        process.wait(20)
        took = time.monotonic() - began
        return process.returncode, took, (said + process.stderr.read()).decode().replace("HANGS", "")


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize(
    "options", [["--workers", "1"], ["--workers", "2"], ["--checksum", "sha256"], ["--format", "bin"]]
)
def test_a_conversion_that_waits(
    number: int, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finished shards stay, nothing unfinished does, the message says how to go on, and going on gives the whole."""
    checkpoint = usual(tmp_path / "ckpt").root
    words = [str(checkpoint), str(tmp_path / "out"), "--max-shard-size", "700", "--no-self-check", *options]
    code, took, said = stopped(number, "later", ["convert", *words])
    assert code == CODES[signal.Signals(number)]
    assert took < 1
    assert "finished shards are kept, give the same command to go on" in said
    assert "Traceback" not in said
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert ".lazyzero.json" in names
    assert len(names) > 1
    assert not any(name.endswith((".tmp", ".index.json")) for name in names)
    assert main(["convert", *words]) == 0
    assert f"{len(names) - 1} of them were finished by an earlier run" in capsys.readouterr().out
    words[1] = str(tmp_path / "undisturbed")
    assert main(["convert", *words]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("number", CODES)
def test_a_conversion_that_has_not_begun(number: int, tmp_path: Path) -> None:
    """While the checkpoint is opened: no output directory is there afterwards."""
    checkpoint = usual(tmp_path / "ckpt").root
    code, took, said = stopped(number, "now", ["convert", str(checkpoint), str(tmp_path / "a" / "out")])
    assert code == CODES[signal.Signals(number)]
    assert took < 1
    assert "Traceback" not in said
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("number", CODES)
def test_a_stream(number: int, tmp_path: Path) -> None:
    """What went to standard output is not a whole file, and it is said so."""
    checkpoint = usual(tmp_path / "ckpt").root
    lazyzero.convert(checkpoint, tmp_path / "whole", max_shard_size=None)
    with (tmp_path / "stream").open("wb") as file:
        code, took, said = stopped(number, "later", ["convert", str(checkpoint), "-", "--no-self-check"], file.fileno())
    assert code == CODES[signal.Signals(number)]
    assert took < 1
    assert "Traceback" not in said
    assert "not a whole file" in said
    written, whole = (tmp_path / "stream").read_bytes(), (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert 8 < len(written) < len(whole)
    assert whole.startswith(written)


@pytest.mark.parametrize("number", CODES)
def test_a_stream_that_nobody_reads(number: int, tmp_path: Path) -> None:
    """A pipe that is full does not hold it."""
    checkpoint = module_only(tmp_path / "ckpt", {"w": torch.zeros(10**6)})
    command = [sys.executable, "-m", "lazyzero", "convert", str(checkpoint), "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        time.sleep(0.3)  # the pipe fills up
        process.send_signal(number)
        began = time.monotonic()
        assert process.wait(20) == CODES[signal.Signals(number)]
        assert time.monotonic() - began < 1
        assert b"not a whole file" in process.stderr.read()


@pytest.mark.parametrize("number", CODES)
def test_verification(number: int, tmp_path: Path) -> None:
    """Its threads are not waited for either."""
    checkpoint = usual(tmp_path / "ckpt").root
    lazyzero.convert(checkpoint, tmp_path / "out")
    words = ["verify", str(checkpoint), str(tmp_path / "out"), "--workers", "2"]
    code, took, said = stopped(number, "now", words)
    assert code == CODES[signal.Signals(number)]
    assert took < 1
    assert "Traceback" not in said


def running(group: str) -> list[str]:
    """The processes of a group that have not ended."""
    lines = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
    return [line for line in lines if line.rpartition(")")[2].split()[2] == group and line.rpartition(")")[2][1] != "Z"]


@pytest.mark.parametrize("number", CODES)
def test_a_command_for_finished_files(number: int, tmp_path: Path) -> None:
    """It is ended too, with what it started; the file it had counts as not dealt with."""
    checkpoint = usual(tmp_path / "ckpt").root
    command = f"echo $$ >> {tmp_path}/pids; echo HANGS >&2; sleep 30; true"
    words = ["convert", str(checkpoint), str(tmp_path / "out"), "--max-shard-size", "700", "--on-shard"]
    code, took, said = stopped(number, "", [*words, command])
    assert code == CODES[signal.Signals(number)]
    assert took < 1
    assert "Traceback" not in said
    (pid,) = (tmp_path / "pids").read_text().split()
    assert not running(pid)
    assert main([*words, f'mv "$LAZYZERO_PATH" {tmp_path}/']) == 0
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 4


@pytest.mark.parametrize("number", CODES)
def test_a_signal_while_a_command_is_started(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by then, and ended."""
    real = subprocess.Popen

    def late(*args: Any, **named: Any) -> Any:
        process = real(*args, **named)
        (tmp_path / "pid").write_text(str(process.pid))
        signal.raise_signal(number)
        return process

    monkeypatch.setattr(hook.subprocess, "Popen", late)
    checkpoint = usual(tmp_path / "ckpt").root
    assert (
        main(["convert", str(checkpoint), str(tmp_path / "out"), "--on-shard", "sleep 30"])
        == CODES[signal.Signals(number)]
    )
    assert not running((tmp_path / "pid").read_text())
