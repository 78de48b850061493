"""The promise in the README: any safetensors conversion stays within 64 MiB of resident memory, whatever the model's size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.check import check_output
from benchmarks.generate import generate
from benchmarks.measure import measure
from benchmarks.models import llama
from benchmarks.spec import Spec

BOUND = 64 << 20
NEEDED = 3_000_000_000  # bytes of disk
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module", params=[2, 3], ids=["zero2", "zero3"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Spec]]:
    """A sparse checkpoint of 1 GB, over 8 ranks."""
    root = tmp_path_factory.mktemp("memory")
    if shutil.disk_usage(root).free < NEEDED:
        pytest.skip(f"needs {NEEDED / 1e9:.0f} GB of free disk")
    spec = Spec(llama("1B", layers=3), request.param, 8, sparse=True)
    yield generate(root / "checkpoint", spec), spec
    shutil.rmtree(root)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is Linux's")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_peak_memory_of_a_conversion(source: tuple[Path, Spec], dtype: str, tmp_path: Path) -> None:
    """The whole process stays within the bound for every dtype, as one file and as shards, and writes the right values;
    `inspect` foretold what it takes, within 15 %."""
    checkpoint, spec = source
    shard = "none" if (spec.stage == 3) == (dtype == "bf16") else "200MB"  # each dtype both ways, over the two stages
    output = tmp_path / "out"
    options = ["--dtype", dtype, "--max-shard-size", shard]
    program = [sys.executable, "-m", "lazyzero"]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    told = subprocess.run(
        [*program, "inspect", str(checkpoint), *options, "--json"],
        env={**os.environ, **environment}, capture_output=True, check=True,
    )  # fmt: skip
    foretold = json.loads(told.stdout)["output"]["peak_memory"]
    try:
        command = [*program, "convert", str(checkpoint), str(output), *options, "--quiet"]
        run = measure("lazyzero", command, environment=environment, sync=False)
        assert run.exit == 0, run.output
        assert run.peak_rss <= BOUND, f"{run.peak_rss / 2**20:.1f} MiB"
        assert 0.85 * foretold < run.peak_rss < 1.15 * foretold
        assert check_output(output, spec, dtype, full=False)
    finally:
        shutil.rmtree(output, ignore_errors=True)
