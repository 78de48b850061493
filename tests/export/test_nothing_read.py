"""Opening reads metadata, planning reads and allocates nothing, streaming holds a window: counted, not believed."""

from __future__ import annotations

import mmap
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyzero
from lazyzero.dtypes import FLOAT32
from lazyzero.export import run
from lazyzero.export.budget import Budget
from lazyzero.export.options import make_options
from lazyzero.export.plan import make_plan
from lazyzero.export.run import plan_export, shards
from lazyzero.inspection import describe, show
from lazyzero.tensor import Placeholder
from tests.generator.simple import module_only, usual

pytestmark = pytest.mark.usefixtures("without_fsync")


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Counts bytes read, mappings made and numpy arrays allocated while it lasts."""
    counts = {"bytes": 0, "reads": 0, "mappings": 0, "arrays": 0}

    def preadv(fd: int, views: Any, offset: int, *more: Any) -> int:
        got = original_preadv(fd, views, offset, *more)
        counts["bytes"] += got
        counts["reads"] += 1
        return got

    def mapped(*args: Any, **more: Any) -> mmap.mmap:
        counts["mappings"] += 1
        return original_mmap(*args, **more)

    def allocator(original: Any) -> Any:
        def made(*args: Any, **more: Any) -> Any:
            counts["arrays"] += 1
            return original(*args, **more)

        return made

    original_preadv, original_mmap = os.preadv, mmap.mmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        patch.setattr(mmap, "mmap", mapped)
        for name in ("empty", "zeros", "frombuffer", "concatenate", "array", "asarray"):
            patch.setattr(np, name, allocator(getattr(np, name)))
        yield counts


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MB in two tensors, one of them under two names."""
    weight = torch.arange(4_000_000, dtype=torch.float32)
    tensors = {"a": weight, "b": torch.ones(2_000_000), "tied": weight}
    return module_only(tmp_path_factory.mktemp("large") / "ckpt", tensors)


def test_the_counters_count(large: Path) -> None:
    """Reading a tensor shows in them, so that their silence means something."""
    with counting() as counts, lazyzero.open_checkpoint(large) as checkpoint:
        checkpoint["a"].numpy()
        next(checkpoint["b"].chunks(4096))
    assert counts["bytes"] > 4096
    assert counts["mappings"] == 1
    assert counts["arrays"] > 0


def test_opening_reads_the_metadata_alone(large: Path) -> None:
    """A 24 MB checkpoint opens with a few KB of reads; names, shapes, sizes and ties are then known without another."""
    with counting() as counts, lazyzero.open_checkpoint(large) as checkpoint:
        assert counts["bytes"] < 200_000
        opened = dict(counts)
        facts = [(t.shape, t.dtype, t.nbytes, t.ndim, len(t), t.tied_to, repr(t)) for t in checkpoint.values()]
        assert sum(row[2] for row in facts) == 40_000_000
        assert checkpoint.tied == {"tied": "a"}
        assert repr(checkpoint)
        assert counts == opened
        assert counts["arrays"] == counts["mappings"] == 0


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_planning_reads_and_allocates_nothing(large: Path, format: str) -> None:
    """A plan over 40 MB in any dtype: no read, no mapping, no array, and a few KB of Python objects."""
    with lazyzero.open_checkpoint(large) as checkpoint:
        options = make_options(format=format, max_shard_size="1MB", dtype="bf16")
        with counting() as counts:
            tracemalloc.start()
            try:
                plan = plan_export(checkpoint, options)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            text = show(describe(checkpoint, options, tensors=True))
        assert counts == {"bytes": 0, "reads": 0, "mappings": 0, "arrays": 0}
        assert peak < 200_000
        assert len(plan.shards) == (2 if format == "bin" else 3)
        assert "tied: tied = a" in text


def test_a_plan_of_petabytes_costs_what_a_small_one_does() -> None:
    """Placeholders are shapes: ten thousand tensors of a terabyte each are planned within a few MB."""
    tensors = {f"t{number}": Placeholder((10**6, 250_000), FLOAT32) for number in range(10_000)}
    tracemalloc.start()
    try:
        plan = make_plan(tensors, dtype=None, max_shard_size=5 * 10**9)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.total_size == 10**16
    assert len(plan.shards) == 10_000
    assert peak < 20_000_000


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_no_step_holds_a_shard(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, dtype: str
) -> None:
    """Converting 40 MB through a window of one MB allocates that twice and small things, not a tensor."""
    if format == "bin":
        torch.save({}, tmp_path / "warm")
    monkeypatch.setattr(run, "allot", lambda *args, **more: Budget(1 << 20, 1))
    tracemalloc.start()
    try:
        lazyzero.convert(large, tmp_path / "out", dtype=dtype, format=format, max_shard_size=None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


def test_ten_elements_of_a_large_tensor_are_ten_elements(large: Path) -> None:
    """Rows, runs and chunks read what they show."""
    with lazyzero.open_checkpoint(large) as checkpoint, counting() as counts:
        assert list(next(iter(checkpoint["a"].chunks(40)))) == list(range(10))
        assert counts["bytes"] <= 40 + 64  # and the member's header, once
        assert list(checkpoint["a"][1_000_000:1_000_003]) == [1e6, 1e6 + 1, 1e6 + 2]
        assert counts["bytes"] <= 40 + 64  # a view of the mapped file


def test_partitions_are_read_once(tmp_path: Path) -> None:
    """A conversion of a partitioned checkpoint reads each weight's bytes once, and none of the optimizer's moments."""
    truth = usual(tmp_path / "ckpt", stage=3, world=4)
    options = make_options(self_check=False)
    with lazyzero.open_checkpoint(truth.root) as checkpoint:
        owned = sum(t.nbytes for t in checkpoint.values() if t.tied_to is None)
        tied = sum(t.nbytes for t in checkpoint.values() if t.tied_to is not None)
        with counting() as counts:
            list(shards(checkpoint, tmp_path / "out", options))
        metadata = sum(length for archive in checkpoint.archives for _, length in archive.pickles)
    assert owned + tied <= counts["bytes"] <= owned + tied + metadata + 64 * 60
