"""Shard groups smaller than the data-parallel world."""

from __future__ import annotations

import pytest
from made import DATA, assert_truth

from lazyzero import open_checkpoint


@pytest.mark.parametrize(("case", "partitions"), [("k_z3_hpz_w4", 4), ("k_z3_mics_w4", 2)])
def test_real(case: str, partitions: int) -> None:
    """hpZ partitions over the whole world, MiCS over its shard group: both give the truth from the files there are."""
    with open_checkpoint(DATA / case / "checkpoint") as checkpoint:
        assert_truth(checkpoint, case)
        assert checkpoint.world_size == partitions
        assert checkpoint.warnings == ()
