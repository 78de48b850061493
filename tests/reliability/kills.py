"""Conversions of a checkpoint of some size by the command line, killed by SIGKILL at random moments and given again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

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
    count, sizes = megabytes * 262144, [1 << 20, 70_001, 262_144, 999, 1, 524_289]
    group: dict[str, torch.Tensor] = {}
    while count > 0:
        size = min(count, sizes[len(group) % len(sizes)])
        group[f"layer.{len(group)}.weight"] = values(len(group), size)
        count -= size
    zero3(directory / "global_step1", [group], 2, list(group))
    (directory / "latest").write_text("global_step1")
    return directory


@dataclass(frozen=True, slots=True)
class Trial:
    """One kind of conversion in a directory of its own."""

    checkpoint: Path
    directory: Path
    kind: tuple[str, ...]

    @property
    def output(self) -> Path:
        return self.directory / "output"

    @property
    def taken(self) -> Path:
        return self.directory / "taken"

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        """Begins a conversion in a process group of its own."""
        self.taken.mkdir(parents=True, exist_ok=True)
        options = [word.replace("{taken}", str(self.taken)) for word in self.kind]
        command = [sys.executable, "-m", "lazyzero", "convert", str(self.checkpoint), str(output), *options]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )

    def found(self) -> dict[str, bytes]:
        """All files there are, taken away or not."""
        return (contents(self.output) if self.output.exists() else {}) | contents(self.taken)

    def undisturbed(self) -> tuple[dict[str, bytes], float, float]:
        """What a run gives that nothing happens to, when it began to write, and how long it took, in seconds."""
        began, wrote = time.monotonic(), 0.0
        with self.start(self.output) as process:
            while process.poll() is None:
                if not wrote and self.output.exists():
                    wrote = time.monotonic() - began
                time.sleep(0.001)
            assert process.returncode == 0, process.stdout and process.stdout.read()
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
        with self.start(self.output) as process:
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() in (0, -signal.SIGKILL), process.stdout and process.stdout.read()
        return process.returncode != 0


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


def run(checkpoint: Path, directory: Path, kills: Sequence[int], seed: int) -> int:
    """Kills conversions of each kind as often as `kills` says, and goes on after each; the number of runs it took."""
    chance, runs = random.Random(seed), 0
    for number, wanted in enumerate(kills):
        if not wanted:
            continue
        trial = Trial(checkpoint, directory / str(number), KINDS[number])
        whole, wrote, took = trial.undisturbed()
        while wanted:
            # One time in five anywhere, else while it writes.
            first = 0.0 if chance.random() < 0.2 else wrote * 0.95
            runs += 1
            if trial.killed(chance.uniform(first, took)):
                wanted -= 1
                hold(trial.found(), whole)
            if chance.random() < 0.15 or not wanted:
                finish(trial, whole)
                runs += 1
    return runs


def finish(trial: Trial, whole: dict[str, bytes]) -> None:
    """The same command once more: the result is that of an undisturbed run, byte for byte, and nothing else is there."""
    assert not trial.killed(600)
    found = trial.found()
    assert {**found, journal.NAME: b""} == {**whole, journal.NAME: b""}, trial.kind
    trial.clear()
