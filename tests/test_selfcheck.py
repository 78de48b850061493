"""The checkpoint's own 16-bit copy must be what the rebuilt weights round to; a mismatch stops before any byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lazyzero
from lazyzero.errors import OutputRefused, SelfCheckFailed
from lazyzero.selfcheck import check
from lazyzero.verify import verify
from tests import oracle
from tests.edit import edit
from tests.generator.simple import usual
from tests.generator.spec import Param, Spec, Truth
from tests.generator.stages import write

pytestmark = pytest.mark.usefixtures("without_fsync")


def swapped(root: Path, stage: int) -> Truth:
    """Two parameters of one shape recorded in each other's place, as DeepSpeed 0.4.0 to 0.4.3 did."""
    params = (Param("a", (6, 5)), Param("b", (6, 5)), Param("c", (4,)))
    truth = write(Spec(stage=stage, world=3, params=params), root)

    def swap(state: Any) -> None:
        names = {"a": "b", "b": "a", "c": "c"}
        state["param_shapes"] = [{names[name]: shape for name, shape in state["param_shapes"][0].items()}]

    edit(truth.tag / "mp_rank_00_model_states.pt", swap)
    return truth


@pytest.mark.parametrize("stage", [1, 2])
def test_swapped_parameters_stop_the_conversion(stage: int, tmp_path: Path) -> None:
    """The message names both, and only them, and the way on; nothing is written."""
    truth = swapped(tmp_path / "ckpt", stage)
    with pytest.raises(SelfCheckFailed, match=r"`module`: (a, b|b, a); .*--no-self-check"):
        lazyzero.convert(truth.root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_the_self_check_it_goes_on(tmp_path: Path) -> None:
    """Who changed the 16-bit copy on purpose gets the fp32 weights under the names the files give them."""
    truth = swapped(tmp_path / "ckpt", 2)
    report = lazyzero.convert(truth.root, tmp_path / "out", self_check=False)
    assert report.checked == 0
    want = {"a": truth.want["b"], "b": truth.want["a"], "c": truth.want["c"]}
    assert oracle.faults(want, {}, tmp_path / "out", format="safetensors", dtype=torch.float32) == []
    assert verify(truth.root, tmp_path / "out", self_check=False).ok
    with pytest.raises(SelfCheckFailed):
        verify(truth.root, tmp_path / "out")


def test_a_stream_is_checked_likewise(tmp_path: Path) -> None:
    """It stops before its first file; told not to check, and to replace what is there, it goes on."""
    truth = swapped(tmp_path / "ckpt", 2)
    with pytest.raises(SelfCheckFailed):
        next(lazyzero.stream(truth.root, tmp_path / "out"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"of an earlier run")
    with pytest.raises(OutputRefused):
        next(lazyzero.stream(truth.root, tmp_path / "out", self_check=False))
    (finished,) = lazyzero.stream(truth.root, tmp_path / "out", self_check=False, overwrite=True)
    want = {"a": truth.want["b"], "b": truth.want["a"], "c": truth.want["c"]}
    assert oracle.faults(want, {}, finished.path.parent, format="safetensors", dtype=torch.float32) == []


@pytest.mark.parametrize("element", [0, 500, 999])
def test_the_full_check_sees_every_element(element: int, tmp_path: Path) -> None:
    """One changed value anywhere is found by verify; the sample looks at the ends and a few places between."""
    truth = write(Spec(stage=1, world=2, params=(Param("w", (1000,)),)), tmp_path / "ckpt")

    def change(state: Any) -> None:
        state["module"]["w"][element] += 1000

    edit(truth.tag / "mp_rank_00_model_states.pt", change)
    with lazyzero.open_checkpoint(truth.root) as checkpoint:
        with pytest.raises(SelfCheckFailed, match="w"):
            check(checkpoint.checks, full=True)
        if element != 500:
            with pytest.raises(SelfCheckFailed, match="w"):
                check(checkpoint.checks)


def test_a_large_model_is_sampled(tmp_path: Path) -> None:
    """At most 512 tensors, evenly over the model, the report says how many; the full check takes them all."""
    params = tuple(Param(f"p{number}", (2,)) for number in range(700))
    truth = write(Spec(stage=2, world=1, params=params), tmp_path / "ckpt")
    assert lazyzero.convert(truth.root, tmp_path / "out").checked == 512
    result = verify(truth.root, tmp_path / "out")
    assert (result.checked, result.ok) == (700, True)


def test_many_wrong_tensors_are_counted_not_listed(tmp_path: Path) -> None:
    """Eight names and how many more."""
    params = tuple(Param(f"p{number}", (2,)) for number in range(12))
    truth = write(Spec(stage=2, world=1, params=params), tmp_path / "ckpt")
    edit(
        truth.tag / "mp_rank_00_model_states.pt", lambda state: [t.add_(99) for t in state["module"].values()] and None
    )
    with pytest.raises(SelfCheckFailed, match="and 4 more"):
        lazyzero.convert(truth.root, tmp_path / "out")


def test_one_changed_bit_in_a_partition_is_found(tmp_path: Path) -> None:
    """A flipped high bit in a rank's file disagrees with `module`."""
    truth = usual(tmp_path / "ckpt", stage=1, world=2)
    path = next(truth.tag.glob("*rank_1_*optim*"))

    def flip(state: Any) -> None:
        state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].view(torch.int32)[-1] ^= 1 << 30

    edit(path, flip)
    with pytest.raises(SelfCheckFailed, match=r"layer\.weight|embed\.weight"):
        lazyzero.convert(truth.root, tmp_path / "out")
