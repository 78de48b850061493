"""ZeRO-3 with its optimizer offloaded to NVMe."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from made import assert_tensors, optim_zero3, values, zero3

from lazyzero import open_checkpoint
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout

ALIGNMENT = 1024

# A module with parameters of its own beside those of its children, so that the two orders of numbering differ.
ORDER = ["own", "a.weight", "a.bias", "b.weight", "b.bias", "head.weight"]
CONSTRUCTED = ["a.weight", "a.bias", "b.weight", "b.bias", "head.weight", "own"]


def tensors(same_size: bool) -> dict[str, torch.Tensor]:
    """Parameters in module order; with `same_size` no swap file can be told by its size."""
    sizes = {
        "own": (4, 3),
        "a.weight": (5, 7),
        "a.bias": (3,),
        "b.weight": (900, 3),
        "b.bias": (4,),
        "head.weight": (11,),
    }
    return {name: values(i, *((4, 5) if same_size else sizes[name])) for i, name in enumerate(ORDER)}


def swap(path: Path, flat: torch.Tensor) -> None:
    """A swap file: the raw values, the length rounded up, whatever stood in the buffer behind them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = flat.numpy().tobytes()
    path.write_bytes(raw + b"\x77" * (-len(raw) % ALIGNMENT))


def offloaded(
    directory: Path, groups: list[list[str]], weights: dict[str, torch.Tensor], numbers: list[str],
    world: int = 3, stay: tuple[int, ...] = (), config: dict[str, object] | None = None,
) -> None:  # fmt: skip
    """A checkpoint whose sub-groups lie in swap files, except those in `stay`; `numbers` is the order of numbering."""
    named = [{name: weights[name] for name in group} for group in groups]
    flats = zero3(directory, named, world, ORDER, ds_config=config if config is not None else {"bf16": {}})
    for rank, mine in enumerate(flats):
        kept = [flat if i in stay else torch.empty(0) for i, flat in enumerate(mine)]
        optim_zero3(directory, rank, world, kept, exp_avg=[flat + 1 if len(flat) else flat for flat in kept])
        for i, (group, flat) in enumerate(zip(groups, mine, strict=True)):
            if i not in stay:
                stem = f"{numbers.index(group[0])}_{numbers.index(group[-1])}.tensor.swp"
                folder = directory / "offloaded_tensors" / f"rank{rank:02d}"
                swap(folder / stem, flat)
                swap(folder / f"exp_avg-{stem}", flat + 1)


GROUPS = [["own", "a.weight"], ["a.bias"], ["b.weight", "b.bias"], ["head.weight"]]


def test_sub_groups_come_back_from_swap_files(tmp_path: Path) -> None:
    """Swapped and kept sub-groups together give every parameter bit for bit, padding left out, moments alike."""
    weights = tensors(same_size=False)
    offloaded(tmp_path, GROUPS, weights, ORDER, stay=(1,))
    expected = {name: weights[name] for group in GROUPS for name in group}
    checkpoint = open_checkpoint(tmp_path)
    assert_tensors(checkpoint, expected)
    assert checkpoint.layout == "ZeRO-3, optimizer on NVMe"
    moments = {name: tensor + 1 for name, tensor in expected.items()}
    assert_tensors(open_checkpoint(tmp_path, state="exp_avg"), moments)


@pytest.mark.parametrize("numbers", [ORDER, CONSTRUCTED], ids=["module order", "construction order"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_files_of_one_size_are_told_by_their_numbers(tmp_path: Path, numbers: list[str], order: list[int]) -> None:
    """Where sizes decide nothing, the numbers in the names do, in whichever way and order DeepSpeed gave them."""
    weights = tensors(same_size=True)
    groups = [[["b.weight", "b.bias"], ["a.weight", "a.bias"], ["own"], ["head.weight"]][i] for i in order]
    offloaded(tmp_path, groups, weights, numbers)
    assert_tensors(open_checkpoint(tmp_path), {name: weights[name] for group in groups for name in group})


def test_numbers_that_fit_no_order_are_refused(tmp_path: Path) -> None:
    """Where neither sizes nor numbers decide, nothing is guessed: the error says what to do."""
    numbers = ["b.weight", "b.bias", "own", "head.weight", "a.weight", "a.bias"]
    groups = [["a.weight", "a.bias"], ["b.weight", "b.bias"], ["own"], ["head.weight"]]
    offloaded(tmp_path, groups, tensors(same_size=True), numbers)
    with pytest.raises(UnsupportedLayout, match="without NVMe offload"):
        open_checkpoint(tmp_path)


def test_ambiguous_order_is_refused(tmp_path: Path) -> None:
    """Two orders of numbering that both fit and differ leave it open: refused."""
    numbers = ["a.weight", "own", "head.weight"]
    weights = tensors(same_size=True)
    groups = [["own"], ["a.weight"]]
    offloaded(tmp_path, groups, weights, numbers)
    with pytest.raises(UnsupportedLayout, match="2 ways"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("threads", [1, 8])
def test_length_must_be_what_the_configuration_rounds_to(tmp_path: Path, threads: int) -> None:
    """A file more than the recorded alignment longer than its sub-group is not taken for it."""
    config = {"aio": {"intra_op_parallelism": threads}}
    weights = tensors(same_size=False)
    offloaded(tmp_path, [["b.weight", "b.bias"]], weights, ORDER, config=config)
    for folder in (tmp_path / "offloaded_tensors").iterdir():
        with (folder / "3_4.tensor.swp").open("ab") as file:
            file.write(bytes(ALIGNMENT))
    if threads == 1:
        with pytest.raises(UnsupportedLayout, match="no ways"):
            open_checkpoint(tmp_path)
    else:
        assert_tensors(open_checkpoint(tmp_path), {name: weights[name] for name in ("b.weight", "b.bias")})


def test_missing_rank_is_named(tmp_path: Path) -> None:
    """A rank whose directory of swap files is not here is an error that names it."""
    offloaded(tmp_path, GROUPS, tensors(same_size=False), ORDER)
    shutil.rmtree(tmp_path / "offloaded_tensors" / "rank01")
    with pytest.raises(MissingFiles, match=r"offloaded_tensors/rank01 is not here \(1 of 3 ranks\)"):
        open_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "offloaded_tensors")
    with pytest.raises(MissingFiles, match=r"offloaded to NVMe .* \(3 of 3 ranks\)"):
        open_checkpoint(tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A rank with fewer swap files than the others is an error that names the rank."""
    offloaded(tmp_path, GROUPS, tensors(same_size=False), ORDER)
    (tmp_path / "offloaded_tensors" / "rank02" / "2_2.tensor.swp").unlink()
    with pytest.raises(InconsistentCheckpoint, match="rank 2 has 3"):
        open_checkpoint(tmp_path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    """A swap file shorter than its sub-group is never read beyond its end."""
    offloaded(tmp_path, GROUPS, tensors(same_size=False), ORDER)
    os.truncate(tmp_path / "offloaded_tensors" / "rank00" / "3_4.tensor.swp", 2048)
    with pytest.raises(UnsupportedLayout, match="no ways"):
        open_checkpoint(tmp_path)


def test_local_ranks_of_several_nodes(tmp_path: Path) -> None:
    """Nodes that save to their own disks count ranks from 0 in offloaded_tensors: each is matched in its directory."""
    weights = tensors(same_size=False)
    offloaded(tmp_path / "whole", GROUPS, weights, ORDER, world=4)
    for node, ranks in enumerate(((0, 1), (2, 3))):
        here = tmp_path / f"node{node}" / "step"
        for local, rank in enumerate(ranks):
            for kind in ("model", "optim"):
                name = f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
                here.mkdir(parents=True, exist_ok=True)
                shutil.copy(tmp_path / "whole" / name, here / name)
            shutil.copytree(
                tmp_path / "whole" / "offloaded_tensors" / f"rank{rank:02d}",
                here / "offloaded_tensors" / f"rank{local:02d}",
            )
    checkpoint = open_checkpoint(tmp_path / "node0", also=[tmp_path / "node1"])
    assert_tensors(checkpoint, {name: weights[name] for group in GROUPS for name in group})
