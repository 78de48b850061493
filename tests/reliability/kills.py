"""Conversions of a checkpoint of some size by the command line, killed by SIGKILL at random moments and given again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors import safe_open

from lazyzero.cli import main
from lazyzero.export import journal
from tests.layout.made import values, zero3
from tests.reliability.crash import contents, hold

# Rows of options; `{taken}` is the directory that finished files are moved to.
KINDS = (
    ("--max-shard-size", "2MB", "--workers", "2"),
    ("--max-shard-size", "none", "--workers", "2", "--dtype", "bf16"),
    ("--max-shard-size", "1500KB", "--workers", "1", "--checksum", "sha256"),
    ("--max-shard-size", "4MB", "--format", "bin", "--workers", "2"),
    ("--max-shard-size", "2MB", "--on-shard", 'mv "$LAZYZERO_PATH" "{taken}/"'),
    ("--max-shard-size", "none", "--workers", "1", "--io", "mmap"),
    ("--max-shard-size", "4MB", "--format", "bin", "--checksum", "sha256", "--dtype", "fp16"),
    ("--max-shard-size", "none", "--format", "bin", "--workers", "1"),
)


def make_checkpoint(directory: Path, megabytes: int = 12) -> Path:
    """A ZeRO-3 checkpoint of two ranks, its parameters of many sizes."""
    torch.set_num_threads(1)  # threads would not survive a fork
    count, sizes = megabytes * 262144, [1 << 20, 70_001, 262_144, 999, 1, 524_289]
    group: dict[str, torch.Tensor] = {}
    while count > 0:
        size = min(count, sizes[len(group) % len(sizes)])
        group[f"layer.{len(group)}.weight"] = values(len(group), size)
        count -= size
    zero3(directory / "global_step1", [group], 2, list(group))
    (directory / "latest").write_text("global_step1")
    return directory


class Run:
    """A command line of lazyzero in a process group of its own: a new interpreter, or (`forked`) a copy of this one, which
    has everything imported and is killed while it works rather than while it starts."""

    def __init__(self, words: list[str], *, forked: bool, log: Path) -> None:
        self._log = log
        if forked:
            self._process = get_context("fork").Process(target=_main, args=(words, log))
            self._process.start()
        else:
            self._process = Popened([sys.executable, "-m", "lazyzero", *words], log)
        self.pid = self._process.pid

    def ended(self, seconds: float) -> bool:
        """Waits so long at most."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def kill(self) -> None:
        """SIGKILL to it and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid or 0, signal.SIGKILL)

    def code(self) -> int:
        """The exit code; anything but success and SIGKILL is a failure of the test."""
        self._process.join()
        code = self._process.exitcode
        assert code in (0, -signal.SIGKILL), self._log.read_text()
        return int(code)


class Popened:
    """A subprocess with the methods of a multiprocessing.Process."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("wb") as file:
            root = Path(__file__).parents[2]
            self._process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, cwd=root)
        self.pid = self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, seconds: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def _main(words: list[str], log: Path) -> None:
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os._exit(main(words))


@dataclass(frozen=True, slots=True)
class Trial:
    """One kind of conversion in a directory of its own."""

    checkpoint: Path
    directory: Path
    kind: tuple[str, ...]
    forked: bool = False

    @property
    def output(self) -> Path:
        return self.directory / "output"

    @property
    def taken(self) -> Path:
        return self.directory / "taken"

    def start(self) -> Run:
        """Begins a conversion."""
        self.taken.mkdir(parents=True, exist_ok=True)
        options = [word.replace("{taken}", str(self.taken)) for word in self.kind]
        words = ["convert", str(self.checkpoint), str(self.output), *options]
        return Run(words, forked=self.forked, log=self.directory / "log")

    def found(self) -> dict[str, bytes]:
        """All files there are, taken away or not."""
        return (contents(self.output) if self.output.exists() else {}) | contents(self.taken)

    def undisturbed(self) -> tuple[dict[str, bytes], float, float]:
        """What a run gives that nothing happens to, when it began to write, and how long it took, in seconds."""
        began, wrote = time.monotonic(), 0.0
        run = self.start()
        while not run.ended(0.001):
            if not wrote and self.output.exists():
                wrote = time.monotonic() - began
        assert run.code() == 0
        took = time.monotonic() - began
        whole = self.found()
        opens(self.directory, whole)
        self.clear()
        return whole, min(wrote, took), took

    def clear(self) -> None:
        """Empties the place for the next conversion."""
        for directory in (self.output, self.taken):
            for path in directory.iterdir():
                path.unlink()

    def killed(self, after: float) -> bool:
        """A run that is killed `after` so many seconds; False when it was done before."""
        run = self.start()
        if not run.ended(after):
            run.kill()
        return run.code() != 0


def opens(directory: Path, files: dict[str, bytes]) -> None:
    """The official readers open every weight file."""
    for name, data in files.items():
        path = directory / f"opened-{name}"
        if name.endswith((".safetensors", ".bin")):
            path.write_bytes(data)
            if name.endswith(".bin"):
                assert torch.load(path, weights_only=True, mmap=True)
            else:
                with safe_open(path, "pt") as file:
                    assert list(file.keys())
            path.unlink()


def run(checkpoint: Path, directory: Path, kills: Sequence[int], seed: int, *, forked: bool = False) -> int:
    """Kills conversions of each kind as often as `kills` says, and goes on after each; the number of runs it took."""
    chance, runs = random.Random(seed), 0
    for number, wanted in enumerate(kills):
        if not wanted:
            continue
        trial = Trial(checkpoint, directory / str(number), KINDS[number], forked)
        whole, wrote, took = trial.undisturbed()
        while wanted:
            # One time in five anywhere, else while it writes.
            first = 0.0 if chance.random() < 0.2 else wrote * 0.95
            runs += 1
            killed = trial.killed(chance.uniform(first, took))
            hold(trial.found(), whole)
            wanted -= killed
            took *= 1 if killed else 0.9  # it is faster than the first time
            if not killed or not wanted or chance.random() < 0.15:
                finish(trial, whole)
                runs += 1
    return runs


def finish(trial: Trial, whole: dict[str, bytes]) -> None:
    """The same command once more: the result is that of an undisturbed run, byte for byte, and nothing else is there."""
    assert not trial.killed(600)
    found = trial.found()
    assert {**found, journal.NAME: b""} == {**whole, journal.NAME: b""}, trial.kind
    trial.clear()
