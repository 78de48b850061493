"""Frozen parameters: from their fragments, from `module`, left out on request, or missing with their files named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lazyzero
from lazyzero.errors import InconsistentCheckpoint, MissingFiles
from lazyzero.export.progress import Silent
from tests import oracle
from tests.edit import edit
from tests.generator.simple import usual
from tests.generator.spec import Buffer, Param, Spec, Truth
from tests.generator.stages import write

pytestmark = pytest.mark.usefixtures("without_fsync")

PARAMS = (
    Param("a", (7, 3)),
    Param("base", (4, 5), kind="frozen", aliases=("base.again",)),
    Param("scale", (), kind="frozen"),
    Param("unused", (3,), kind="left out"),
)
TRAINED = {"a"}


class Started(Silent):
    """Notes whether writing has begun."""

    begun = False

    def start(self, total: int) -> None:
        self.begun = True


def frozen(root: Path, stage: int, world: int = 3, **more: Any) -> Truth:
    return write(
        Spec(stage=stage, world=world, params=PARAMS, buffers=(Buffer("pos", (5,)),), extra_state=True, **more), root
    )


def assert_output(want: dict[str, torch.Tensor], output: Path) -> None:
    assert oracle.faults(want, {}, output, format="safetensors", dtype=torch.float32) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exclude_frozen_leaves_what_was_trained(stage: int, tmp_path: Path) -> None:
    """At every stage: trained parameters, buffers and extra state; no frozen one, none of its aliases, none missing."""
    truth = frozen(tmp_path / "ckpt", stage)
    report = lazyzero.convert(truth.root, tmp_path / "out", exclude_frozen=True)
    kept = {name: value for name, value in truth.want.items() if name in {*TRAINED, "pos", "mod._extra_state"}}
    assert_output(kept, tmp_path / "out")
    assert report.missing == {}
    assert report.tensors == 3


@pytest.mark.parametrize("keep", [(0,), (0, 2)])
def test_frozen_weights_need_every_ranks_model_file(keep: tuple[int, ...], tmp_path: Path) -> None:
    """ZeRO-3 with only some model files: opening works, trained weights read, frozen ones fail naming the files."""
    truth = frozen(tmp_path / "ckpt", 3)
    for rank in range(3):
        if rank not in keep:
            (truth.tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    have = "0" if keep == (0,) else "0, 2"
    named = rf"have {have}; need 0-2; not found: zero_pp_rank_1_mp_rank_00_model_states\.pt"
    with lazyzero.open_checkpoint(truth.root) as checkpoint:
        assert oracle.same_bits(checkpoint["a"].torch(), truth.want["a"])
        assert checkpoint["base"].shape == (4, 5)
        for read in (checkpoint["base"].numpy, checkpoint["scale"].torch, checkpoint["base.again"].numpy):
            with pytest.raises(MissingFiles, match=named):
                read()
    shown = Started()
    with pytest.raises(MissingFiles, match=named + r".*--exclude-frozen"):
        lazyzero.convert(truth.root, tmp_path / "out", progress=shown)
    assert not shown.begun
    assert not (tmp_path / "out").exists()
    lazyzero.convert(truth.root, tmp_path / "out", exclude_frozen=True)
    kept = {name: truth.want[name] for name in ("a", "pos", "mod._extra_state")}
    assert_output(kept, tmp_path / "out")


def test_without_frozen_weights_rank_0s_model_file_is_enough(tmp_path: Path) -> None:
    """The other ranks' model files hold nothing that is needed."""
    params = (Param("a", (7, 3), aliases=("b",)), Param("c", (0,)))
    truth = write(Spec(stage=3, world=4, params=params), tmp_path / "ckpt")
    for rank in (1, 2, 3):
        (truth.tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    lazyzero.convert(truth.root, tmp_path / "out")
    assert oracle.faults(truth.want, {}, tmp_path / "out", format="safetensors", dtype=torch.float32) == []


def test_values_no_file_holds_are_listed_never_invented(tmp_path: Path) -> None:
    """ZeRO-3 saves a placeholder for what requires grad but has no optimizer: left out, in the report, with the reason."""
    truth = frozen(tmp_path / "ckpt", 3)
    report = lazyzero.convert(truth.root, tmp_path / "out")
    assert report.missing.keys() == {"unused"} == truth.missing
    assert "in no file" in report.missing["unused"]
    with lazyzero.open_checkpoint(truth.root) as checkpoint:
        assert "unused" not in checkpoint
        assert checkpoint.missing == report.missing


def test_fragments_that_do_not_make_a_whole_are_counted(tmp_path: Path) -> None:
    """A rank's piece of the wrong length, or none: parameter, rank, expected and found."""
    for number, change in enumerate((lambda piece: piece[:-1], lambda piece: None)):
        truth = frozen(tmp_path / str(number), 3)

        def apply(state: Any, change: Any = change) -> None:
            pieces = state["frozen_param_fragments"]
            pieces["base"] = change(pieces["base"])
            if pieces["base"] is None:
                del pieces["base"]

        edit(truth.tag / "zero_pp_rank_1_mp_rank_00_model_states.pt", apply)
        with pytest.raises(InconsistentCheckpoint, match=r"'base'.*7 elements.*rank 1.*(6|nothing)"):
            lazyzero.open_checkpoint(truth.root)


def test_frozen_weights_of_stage_1_come_from_module(tmp_path: Path) -> None:
    """Stage 1 records nothing of them; their values, in the training precision, are in `module`."""
    truth = usual(tmp_path / "ckpt", stage=1)
    with lazyzero.open_checkpoint(truth.root) as checkpoint:
        tensor = checkpoint["frozen.weight"]
        assert (str(tensor.dtype), tensor.role) == ("bfloat16", "module")
        assert oracle.same_bits(tensor.torch(), truth.want["frozen.weight"])
