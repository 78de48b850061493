"""Killed at any moment, a conversion leaves only whole files behind, and the same command brings it to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CASE = ROOT / "tests" / "data" / "b_z3_tied_triple" / "checkpoint"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: a thousand small files are synced to no disk there."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    directory = memory / f"lazyzero-{os.getpid()}-{tmp_path.name}"
    directory.mkdir()
    yield directory
    subprocess.run(["rm", "-rf", str(directory)], check=True)


@pytest.mark.parametrize(
    ("mode", "step", "options"),
    [
        ("plain", 8, {"checksum": "sha256", "workers": 1}),
        ("plain", 13, {"workers": 2}),
        ("plain", 40, {"format": "bin", "workers": 2}),
        ("taken", 14, {"workers": 1}),
        ("overwrite", 11, {"workers": 1}),
        ("merge", 13, {"workers": 1}),
    ],
)
def test_at_every_call(place: Path, mode: str, step: int, options: dict[str, Any]) -> None:
    """Killed before or after a call to the system, whichever it is: every final name has a whole file, the index comes
    last, temporary files are recognisable and gone after the next run, whose result is that of an undisturbed one."""
    command = [sys.executable, "-m", "tests.reliability.crash", str(CASE), str(place), mode, str(step)]
    run = subprocess.run(
        [*command, json.dumps({"max_shard_size": "8KB", **options})],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) > 5


def test_at_random_moments() -> None:
    """The same for the command line, 15 kills at random, over formats, shards, workers, checksums, --on-shard, --io."""
    command = [sys.executable, "-m", "tests.reliability.soak", "--kills", "15", "--seed", "4", "--megabytes", "12"]
    soak = subprocess.run(
        [*command, "--forked", "--only-random"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert soak.returncode == 0, soak.stderr[-2000:]
    assert "15 of them killed" in soak.stdout
