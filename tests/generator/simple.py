"""Checkpoints for when only the tensors matter, or only the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.generator.spec import Buffer, Param, Spec, Truth
from tests.generator.stages import write


def module_only(root: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A stage-0 checkpoint whose entries are exactly these tensors, as stored."""
    tag = root / "global_step1"
    tag.mkdir(parents=True)
    state = {"module": dict(tensors), "buffer_names": [], "ds_version": "0.19.8", "optimizer": None}
    torch.save(state, tag / "mp_rank_00_model_states.pt")
    (root / "latest").write_text("global_step1")
    return root


def usual(root: Path, *, stage: int = 2, world: int = 2, **more: object) -> Truth:
    """A small model with a tied pair, a frozen parameter, a buffer and two groups."""
    params = (
        Param("embed.weight", (40, 8), aliases=("head.weight",)),
        Param("layer.weight", (16, 8)),
        Param("layer.bias", (16,), group=1),
        Param("norm.weight", (), group=1),
        Param("frozen.weight", (5, 7), kind="frozen"),
    )
    buffers = (Buffer("pos", (9,)), Buffer("steps", (3,), "int64"))
    spec = Spec(stage=stage, world=world, params=params, buffers=buffers, groups=2)
    return write(Spec(**{**spec.__dict__, **more}), root)  # type: ignore[arg-type]
