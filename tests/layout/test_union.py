"""Several directories of one save as one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made import DATA, assert_truth, save

from lazyzero import open_checkpoint
from lazyzero.errors import CheckpointNotFound, InconsistentCheckpoint, MissingFiles

CASE = "a_z1_bf16_w2"
TAG = "global_step3"
MODEL = "mp_rank_00_model_states.pt"


def optim(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def node(root: Path, names: list[str], tag: str = TAG, latest: bool = True) -> Path:
    """A directory with some of the real checkpoint's files."""
    (root / tag).mkdir(parents=True)
    for name in names:
        shutil.copy(DATA / CASE / "checkpoint" / TAG / name, root / tag / name)
    if latest:
        (root / "latest").write_text(tag)
    return root


def test_ranks_of_two_nodes(tmp_path: Path) -> None:
    """Node-local saves are joined by rank; each alone says what is missing."""
    first = node(tmp_path / "node0", [MODEL, optim(0)])
    second = node(tmp_path / "node1", [MODEL, optim(1)])
    with pytest.raises(MissingFiles):
        open_checkpoint(first)
    for main, also in ((first, second), (second, first)):
        with open_checkpoint(main, also=[also]) as checkpoint:
            assert_truth(checkpoint, CASE)
    assert_truth(open_checkpoint(first, also=second / TAG), CASE)


def test_leftover_of_an_interrupted_save(tmp_path: Path) -> None:
    """Files left in `tmp-checkpoint-*` are found there under the same tag, with no `latest` to point at them."""
    main = node(tmp_path / "checkpoint-3", [MODEL, optim(0)])
    left = node(tmp_path / "tmp-checkpoint-3", [optim(1)], latest=False)
    assert_truth(open_checkpoint(main, also=[left]), CASE)


def test_another_tag_is_not_mixed_in(tmp_path: Path) -> None:
    """A root that has another tag only is refused; a tag directory given as such may have any name."""
    main = node(tmp_path / "a", [MODEL, optim(0)])
    other = node(tmp_path / "b", [optim(1)], tag="global_step4")
    with pytest.raises(CheckpointNotFound, match=r"no tag 'global_step3' .* 'global_step4'"):
        open_checkpoint(main, also=[other])
    assert_truth(open_checkpoint(main, also=[other / "global_step4"]), CASE)


def test_the_same_directory_twice(tmp_path: Path) -> None:
    """Naming a directory again, or a link to it, changes nothing."""
    main = node(tmp_path / "a", [MODEL, optim(0), optim(1)])
    (tmp_path / "link").symlink_to(main)
    assert_truth(open_checkpoint(main, also=[main, tmp_path / "link"]), CASE)


def test_nothing_there(tmp_path: Path) -> None:
    """A further directory that does not exist is an error."""
    main = node(tmp_path / "a", [MODEL, optim(0), optim(1)])
    with pytest.raises(CheckpointNotFound, match="no such directory"):
        open_checkpoint(main, also=[tmp_path / "none"])


def test_duplicates_that_differ(tmp_path: Path) -> None:
    """Two files of one rank that differ in one byte are of two saves: the error names both."""
    main = node(tmp_path / "a", [MODEL, optim(0), optim(1)])
    other = node(tmp_path / "b", [optim(1)])
    path = other / TAG / optim(1)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(InconsistentCheckpoint, match=r"b/global_step3/bf16.* differs from .*a/global_step3/bf16"):
        open_checkpoint(main, also=[other])


def model_of_another_node(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Writes the model file anew with a change."""
    root = torch.load(path, weights_only=False)
    change(root)
    save(root, path)


def test_model_files_of_two_nodes(tmp_path: Path) -> None:
    """Every node's model file has the same parameters; ties and buffers are global rank 0's, whichever is named first."""
    first = node(tmp_path / "node0", [MODEL, optim(0)])
    second = node(tmp_path / "node1", [MODEL, optim(1)])

    def elsewhere(root: dict[str, Any]) -> None:
        root["shared_params"] = {}
        root["module"]["bn.running_mean"].add_(1)
        root["host"] = "node1"

    model_of_another_node(second / TAG / MODEL, elsewhere)
    for main, also in ((first, second), (second, first)):
        assert_truth(open_checkpoint(main, also=[also]), CASE)


@pytest.mark.parametrize("what", ["value", "step", "name"])
def test_model_files_of_two_saves(tmp_path: Path, what: str) -> None:
    """Model files that differ in a parameter or in the step are of two saves and are refused."""
    first = node(tmp_path / "node0", [MODEL, optim(0)])
    second = node(tmp_path / "node1", [MODEL, optim(1)])

    def change(root: dict[str, Any]) -> None:
        if what == "value":
            root["module"]["l2.weight"][0, 0] += 1
        elif what == "step":
            root["global_steps"] += 1
        else:
            root["module"]["renamed"] = root["module"].pop("l2.weight")

    model_of_another_node(second / TAG / MODEL, change)
    with pytest.raises(InconsistentCheckpoint, match="leave it out"):
        open_checkpoint(first, also=[second])
