"""The Checkpoint is a mapping that reads nothing on its own, and lets go of its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

import lazyzero
from tests import oracle
from tests.generator.simple import usual

pytestmark = pytest.mark.usefixtures("without_fsync")


def held(root: Path) -> list[str]:
    """Files below `root` that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return [path for path in found if path.startswith(str(root))]


def test_it_is_a_mapping(tmp_path: Path) -> None:
    """Names, entries, length, membership, equality of views; a name it lacks is a KeyError."""
    truth = usual(tmp_path / "ckpt")
    with lazyzero.open_checkpoint(truth.root) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert set(checkpoint) == set(truth.want)
        assert len(checkpoint) == len(truth.want)
        assert "embed.weight" in checkpoint
        assert "nothing" not in checkpoint
        assert checkpoint.get("nothing") is None
        assert dict(checkpoint.items())["embed.weight"] == checkpoint["embed.weight"]
        with pytest.raises(KeyError, match="nothing"):
            checkpoint["nothing"]
        assert repr(checkpoint) == f"Checkpoint({str(truth.tag)!r}, ZeRO-2, 2 ranks, 8 tensors)"


def test_it_tells_what_it_is(tmp_path: Path) -> None:
    """Layout, stage, world, version, ties, and the files it was read from."""
    truth = usual(tmp_path / "ckpt", stage=3, world=3)
    with lazyzero.open_checkpoint(truth.root) as checkpoint:
        facts = (checkpoint.layout, checkpoint.stage, checkpoint.world_size, checkpoint.version)
        assert facts == ("ZeRO-3", 3, 3, "0.19.8")
        assert (checkpoint.path, checkpoint.directory) == (str(truth.root), str(truth.tag))
        assert checkpoint.tied == {"head.weight": "embed.weight"}
        assert (checkpoint.missing, checkpoint.warnings) == ({}, ())
        assert {Path(source.path).name for source in checkpoint.sources} == {path.name for path in truth.tag.iterdir()}


def test_closing_gives_back_every_descriptor(tmp_path: Path) -> None:
    """And a tensor is readable all the same, before and after; by `with`, by close(), and twice."""
    truth = usual(tmp_path / "ckpt", world=3)
    with lazyzero.open_checkpoint(truth.root) as checkpoint:
        checkpoint["layer.weight"].numpy()
        assert held(tmp_path)
    assert held(tmp_path) == []
    assert oracle.same_bits(checkpoint["layer.weight"].torch(), truth.want["layer.weight"])
    assert held(tmp_path)
    checkpoint.close()
    checkpoint.close()
    assert held(tmp_path) == []


def test_a_conversion_leaves_nothing_open(tmp_path: Path) -> None:
    """Neither sources nor output."""
    truth = usual(tmp_path / "ckpt", stage=3, world=4)
    lazyzero.convert(truth.root, tmp_path / "out", max_shard_size=700, workers=3)
    lazyzero.verify(truth.root, tmp_path / "out")
    assert held(tmp_path) == []
