"""Ties, one kind after the other: who owns, who is an alias, and what is no tie at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lazyzero
from tests import oracle
from tests.edit import edit
from tests.generator.simple import module_only
from tests.generator.spec import Buffer, Param, Spec
from tests.generator.stages import write

pytestmark = pytest.mark.usefixtures("without_fsync")


def opened(root: Path) -> lazyzero.Checkpoint:
    with lazyzero.open_checkpoint(root) as checkpoint:
        return checkpoint


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_pair_a_triple_and_a_buffer(stage: int, tmp_path: Path) -> None:
    """Owners are the names the weights were rebuilt under; every alias names its owner and has its values."""
    params = (Param("a", (3, 4), aliases=("a2",)), Param("b", (5,), aliases=("b2", "b3"), owner=1), Param("c", (5,)))
    spec = Spec(stage=stage, world=2, params=params, buffers=(Buffer("p", (4,), aliases=("p2",)),))
    truth = write(spec, tmp_path / "ckpt")
    checkpoint = opened(truth.root)
    owner = "b2" if stage else "b"  # stage 0 has no other names than the module's
    rest = {"b", "b2", "b3"} - {owner}
    assert checkpoint.tied == {"a2": "a", "p2": "p", **dict.fromkeys(rest, owner)}
    for name, value in truth.want.items():
        assert oracle.same_bits(checkpoint[name].torch(), value)


@pytest.mark.parametrize("release", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_two_parameters_of_nothing_are_two(stage: int, release: int, tmp_path: Path) -> None:
    """Zero-sized views at one offset of one flat look alike to DeepSpeed's data_ptr; they are not tied."""
    params = (Param("a", (0, 4)), Param("b", (0, 4)), Param("w", (3,)))
    truth = write(Spec(stage=stage, world=2, params=params, release=release), tmp_path / "ckpt")

    def collide(state: Any) -> None:
        flat = torch.zeros(8, dtype=torch.bfloat16)
        state["module"]["a"] = flat[2:2].view(0, 4)
        state["module"]["b"] = flat[2:2].view(0, 4)
        state["shared_params"] = {"b": "a"}

    edit(truth.tag / "mp_rank_00_model_states.pt", collide)
    checkpoint = opened(truth.root)
    assert checkpoint.tied == {}
    assert checkpoint["a"].shape == checkpoint["b"].shape == (0, 4)


def test_views_that_only_overlap_are_no_ties(tmp_path: Path) -> None:
    """One storage, but another offset, shape, stride or dtype: each has its own values."""
    flat = torch.arange(12, dtype=torch.float32)
    tensors = {
        "whole": flat,
        "same": flat,
        "head": flat[:6],
        "tail": flat[6:],
        "grid": flat.view(3, 4),
        "turned": flat.view(3, 4).t(),
        "square": flat[:9].view(3, 3),
        "square.t": flat[:9].view(3, 3).t(),
    }
    checkpoint = opened(module_only(tmp_path / "ckpt", tensors))
    assert checkpoint.tied == {"same": "whole"}
    for name, value in tensors.items():
        assert oracle.same_bits(checkpoint[name].torch(), value)


def shared(root: Path, shared_params: dict[str, str], *, drop: tuple[str, ...] = ()) -> lazyzero.Checkpoint:
    """A ZeRO-3 checkpoint of a (tied to b) and w, with `shared_params` put in, and names taken out of `module`."""
    params = (Param("a", (3, 4), aliases=("b",)), Param("w", (5,)))
    truth = write(Spec(stage=3, world=2, params=params), root)

    def change(state: Any) -> None:
        state["shared_params"] = shared_params
        for name in drop:
            del state["module"][name]

    edit(truth.tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", change)
    return opened(truth.root)


def test_names_that_only_shared_params_knows(tmp_path: Path) -> None:
    """Aliases that are not in `module`, through chains of any order, end at what has the values."""
    checkpoint = shared(tmp_path / "1", {"b": "a", "c": "b", "d": "c"})
    assert checkpoint.tied == {"b": "a", "c": "a", "d": "a"}
    checkpoint = shared(tmp_path / "2", {"d": "c", "c": "b", "b": "a"}, drop=("b",))
    assert checkpoint.tied == {"b": "a", "c": "a", "d": "a"}
    checkpoint = shared(tmp_path / "3", {"c": "b"})  # b's owner is known from the storages alone
    assert checkpoint.tied == {"b": "a", "c": "a"}


def test_an_owner_without_values_takes_its_aliass(tmp_path: Path) -> None:
    """DeepSpeed can name an owner that nothing was saved under."""
    checkpoint = shared(tmp_path / "ckpt", {"w": "gone"})
    assert checkpoint.tied == {"b": "a", "gone": "w"}


def test_circles_and_strangers_do_no_harm(tmp_path: Path) -> None:
    """Names that lead in a circle, to themselves, or nowhere, are listed as missing; the rest is right."""
    checkpoint = shared(tmp_path / "ckpt", {"x": "y", "y": "x", "z": "z", "lost": "nowhere"})
    assert checkpoint.tied == {"b": "a"}
    assert set(checkpoint.missing) >= {"lost", "x", "z"}
    assert set(checkpoint) == {"a", "b", "w"}


def test_a_tie_with_a_frozen_owner(tmp_path: Path) -> None:
    """Owner among the fragments, alias in the module."""
    params = (Param("w", (5,)), Param("f", (4, 3), kind="frozen", aliases=("g",), owner=1))
    for stage in (1, 2, 3):
        truth = write(Spec(stage=stage, world=2, params=params), tmp_path / str(stage))
        checkpoint = opened(truth.root)
        assert len(checkpoint.tied) == 1
        assert {*checkpoint.tied, *checkpoint.tied.values()} == {"f", "g"}
        for name in ("f", "g"):
            assert oracle.same_bits(checkpoint[name].torch(), truth.want[name])
