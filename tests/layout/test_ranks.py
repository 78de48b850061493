"""Which files belong together: missing ranks are named, stale ones set aside, foreign ones refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import lazyzero
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout
from lazyzero.layout.ranks import spans
from tests import oracle
from tests.edit import edit
from tests.generator.simple import usual
from tests.generator.spec import Truth

pytestmark = pytest.mark.usefixtures("without_fsync")


def optim(truth: Truth, rank: int) -> Path:
    return next(truth.tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def assert_right(truth: Truth, tmp_path: Path) -> lazyzero.Report:
    report = lazyzero.convert(truth.root, tmp_path / "out")
    assert (
        oracle.faults(truth.want, truth.tied, tmp_path / "out", format="safetensors", dtype=oracle.DTYPES["fp32"]) == []
    )
    return report


@pytest.mark.parametrize("stage", [1, 3])
def test_missing_ranks_are_named(stage: int, tmp_path: Path) -> None:
    """What is there, what is needed, the first file's name, and what to do."""
    truth = usual(tmp_path / "ckpt", stage=stage, world=8)
    for rank in (3, 5, 6, 7):
        optim(truth, rank).unlink()
    with pytest.raises(
        MissingFiles,
        match=r"have 0-2, 4; need 0-7; not found: bf16_zero_pp_rank_3_mp_rank_00_optim_states\.pt and 3 more; copy them",
    ):
        lazyzero.open_checkpoint(truth.root)


def test_rank_0_missing_is_like_any_other(tmp_path: Path) -> None:
    """The number of ranks is known from whichever file there is."""
    truth = usual(tmp_path / "ckpt", world=3)
    optim(truth, 0).unlink()
    with pytest.raises(MissingFiles, match="have 1-2; need 0-2; not found: bf16_zero_pp_rank_0_mp_rank_00"):
        lazyzero.open_checkpoint(truth.root)


def test_the_model_file_missing(tmp_path: Path) -> None:
    """Without the names nothing can be done; the message says which file holds them."""
    two, three = usual(tmp_path / "two"), usual(tmp_path / "three", stage=3)
    (two.tag / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(MissingFiles, match=r"no mp_rank_00_model_states\.pt"):
        lazyzero.open_checkpoint(two.root)
    for path in three.tag.glob("*model_states.pt"):
        path.unlink()
    with pytest.raises(MissingFiles, match=r"no zero_pp_rank_0_mp_rank_00_model_states\.pt"):
        lazyzero.open_checkpoint(three.root)


def test_the_optimizer_files_missing(tmp_path: Path) -> None:
    """ZeRO-3 model files alone hold placeholders: what is missing is named, and nothing empty comes out."""
    truth = usual(tmp_path / "ckpt", stage=3)
    for path in truth.tag.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(MissingFiles, match=r"no \*_optim_states\.pt, which hold the weights"):
        lazyzero.open_checkpoint(truth.root)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_of_a_larger_world_are_set_aside(stage: int, tmp_path: Path) -> None:
    """A run of four ranks, then one of two into the same tag: ranks 2 and 3 are stale, and the warning names them."""
    old = usual(tmp_path / "old", stage=stage, world=4, seed=5)
    truth = usual(tmp_path / "new", stage=stage, world=2)
    for path in old.tag.iterdir():
        if not (truth.tag / path.name).exists():
            shutil.copy(path, truth.tag)
    report = assert_right(truth, tmp_path)
    assert report.warnings
    told = " ".join(report.warnings)
    assert "set aside bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt, bf16_zero_pp_rank_3_mp_rank_00" in told
    assert "2 partitions" in told


@pytest.mark.parametrize("newer", [True, False])
def test_files_of_another_precision_are_set_aside(newer: bool, tmp_path: Path) -> None:
    """fp16 files beside bf16 ones: the model file's configuration decides, not the clock, and a warning names the rest."""
    old = usual(tmp_path / "old", precision="fp16", world=3, seed=5)
    truth = usual(tmp_path / "new", precision="bf16", world=2)
    for path in old.tag.glob("*optim*"):
        shutil.copy(path, truth.tag)
        os.utime(truth.tag / path.name, (0, 0) if not newer else None)
    report = assert_right(truth, tmp_path)
    assert "set aside zero_pp_rank_0_mp_rank_00_optim_states.pt" in report.warnings[0]
    assert "of another precision than bf16_zero_pp_rank_0" in report.warnings[0]


@pytest.mark.parametrize("newest", ["bf16", "fp16"])
def test_without_a_configuration_the_newest_files_are_taken(newest: str, tmp_path: Path) -> None:
    """Where the model file does not say what precision was on, the clock decides."""
    other = "fp16" if newest == "bf16" else "bf16"
    truth = usual(tmp_path / "new", precision=newest, world=2)
    old = usual(tmp_path / "old", precision=other, world=2, seed=5)
    edit(truth.tag / "mp_rank_00_model_states.pt", lambda state: state.update(ds_config=None))
    for path in old.tag.glob("*optim*"):
        shutil.copy(path, truth.tag)
        os.utime(truth.tag / path.name, (0, 0))
    assert_right(truth, tmp_path)


def change(key: str, value: object) -> Any:
    def apply(state: Any) -> None:
        if key in state:
            state[key] = value
        else:
            state["optimizer_state_dict"][key] = value

    return apply


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("zero_stage", 1, "zero_stage 1"),
        ("ds_version", "0.1.0", "ds_version 0.1.0"),
        ("partition_count", [9, 9], "partition_count"),
    ],
)
def test_ranks_of_two_runs_are_not_mixed(key: str, value: object, named: str, tmp_path: Path) -> None:
    """A rank whose stage, version or world differs from rank 0's is named with both values."""
    truth = usual(tmp_path / "ckpt", world=3)
    edit(optim(truth, 2), change(key, value))
    with pytest.raises(InconsistentCheckpoint, match=rf"rank_2.*has {named}.*different runs"):
        lazyzero.open_checkpoint(truth.root)


@pytest.mark.parametrize("count", [0, -1, 1 << 40, "many"])
def test_an_impossible_world_is_refused(count: object, tmp_path: Path) -> None:
    """partition_count must be a number a cluster can have."""
    truth = usual(tmp_path / "ckpt")
    for rank in (0, 1):
        edit(optim(truth, rank), change("partition_count", count))
    with pytest.raises(InconsistentCheckpoint, match="partition_count"):
        lazyzero.open_checkpoint(truth.root)


def test_without_a_recorded_world_the_files_are_counted(tmp_path: Path) -> None:
    """No partition_count, or an empty one: as many ranks as there are files."""
    truth = usual(tmp_path / "ckpt", world=3)
    for rank in range(3):
        edit(optim(truth, rank), change("partition_count", [] if rank else None))
    for rank in range(1, 3):
        edit(optim(truth, rank), change("partition_count", None))
    assert_right(truth, tmp_path)


def test_groups_that_differ_in_their_world_are_not_guessed_at(tmp_path: Path) -> None:
    """Only experts have groups of fewer partitions than ranks."""
    truth = usual(tmp_path / "ckpt", world=2)
    for rank in (0, 1):
        edit(optim(truth, rank), change("partition_count", [2, 1]))
    with pytest.raises(UnsupportedLayout, match="differs between groups"):
        lazyzero.open_checkpoint(truth.root)


def test_a_flat_too_short_or_too_long_is_counted(tmp_path: Path) -> None:
    """One element more or less than parameters and padding: the group, what was expected, what was found."""
    for stage, key, by in (
        (2, "single_partition_of_fp32_groups", 1),
        (2, "single_partition_of_fp32_groups", -1),
        (3, "fp32_flat_groups", 1),
        (3, "fp32_flat_groups", -1),
    ):
        truth = usual(tmp_path / f"{stage}{by}", stage=stage, world=2)

        def resize(state: Any, key: str = key, by: int = by) -> None:
            flats = state["optimizer_state_dict"][key]
            flats[0] = flats[0].new_zeros(len(flats[0]) + by)

        edit(optim(truth, 1), resize)
        with pytest.raises(InconsistentCheckpoint, match=r"expected \d+ .*found \d+"):
            lazyzero.open_checkpoint(truth.root)


@pytest.mark.parametrize(("stage", "key"), [(1, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")])
def test_flats_of_different_dtypes_are_refused(stage: int, key: str, tmp_path: Path) -> None:
    """A rank whose masters are fp16 beside one whose are fp32; the dtypes are named."""
    truth = usual(tmp_path / "ckpt", stage=stage)

    def half(state: Any) -> None:
        flats = state["optimizer_state_dict"][key]
        flats[:] = [flat.half() for flat in flats]

    edit(optim(truth, 1), half)
    with pytest.raises(InconsistentCheckpoint, match=r"float16.*float32"):
        lazyzero.open_checkpoint(truth.root)


def test_sub_groups_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    """Within one rank."""
    truth = usual(tmp_path / "ckpt", stage=3)

    def half(state: Any) -> None:
        flats = state["optimizer_state_dict"]["fp32_flat_groups"]
        flats[0] = flats[0].half()

    edit(optim(truth, 0), half)
    with pytest.raises(InconsistentCheckpoint, match=r"sub-groups of one dtype, found float16, float32"):
        lazyzero.open_checkpoint(truth.root)


@pytest.mark.parametrize("paddings", [[[0]], [[0, -1, 0, 0], [0, 0]], [["x", 0], [0, 0]]])
def test_alignment_paddings_that_cannot_be_are_counted(paddings: list[Any], tmp_path: Path) -> None:
    """Too few, negative, or no numbers: the group, how many there are, how many parameters."""
    truth = usual(tmp_path / "ckpt", stage=2)
    for rank in (0, 1):
        edit(optim(truth, rank), change("param_alignment_paddings", paddings))
    with pytest.raises(
        InconsistentCheckpoint, match=r"group 0 records [0-9]+ alignment paddings for [0-9]+ parameters"
    ):
        lazyzero.open_checkpoint(truth.root)


@pytest.mark.parametrize("paddings", [None, [0], ["a", "b"]])
def test_paddings_that_are_not_recorded_follow_from_the_version(paddings: object, tmp_path: Path) -> None:
    """Where the files cut their tails, nothing has to be known of them."""
    truth = usual(tmp_path / "ckpt", stage=2, world=3)
    for rank in range(3):
        edit(optim(truth, rank), change("group_paddings", paddings))
    assert_right(truth, tmp_path)


def test_ranks_with_other_groups_are_refused(tmp_path: Path) -> None:
    """A rank with one group more."""
    truth = usual(tmp_path / "ckpt", world=2)

    def grow(state: Any) -> None:
        flats = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        flats.append(flats[0].new_zeros(3))

    edit(optim(truth, 1), grow)
    with pytest.raises(InconsistentCheckpoint, match="groups"):
        lazyzero.open_checkpoint(truth.root)


def test_spans_read_as_people_write_them() -> None:
    """Runs are joined, single numbers stand alone, nothing is none."""
    assert spans([0, 1, 2, 4]) == "0-2, 4"
    assert spans([7]) == "7"
    assert spans([]) == "none"
