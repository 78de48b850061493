"""Checkpoints as DeepSpeed lays them out, made of given tensors; and the comparison with a real case's ground truth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from lazyzero import Checkpoint

DATA = Path(__file__).parents[1] / "data"

Named = Mapping[str, torch.Tensor]


def values(seed: int, *shape: int) -> torch.Tensor:
    """Reproducible fp32 values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def save(value: Any, path: Path) -> None:
    """torch.save, with directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def flat(tensors: Named, total: int | None = None, fill: float = 0.0) -> torch.Tensor:
    """The tensors one after the other, filled up to `total` elements."""
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    return torch.cat([joined, torch.full(((total or len(joined)) - len(joined),), fill)])


def views_of(flats: Sequence[Named], padding: int = 0) -> dict[str, torch.Tensor]:
    """The fp16 parameters as DeepSpeed leaves them in the module: views of one flat, padded buffer for each group."""
    module = {}
    for tensors in flats:
        buffer = torch.cat([flat(tensors), torch.zeros(padding)]).half()
        at = 0
        for name, tensor in tensors.items():
            module[name] = buffer[at : at + tensor.numel()].view(tensor.shape)
            at += tensor.numel()
    return module


def cut(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    """A ZeRO-3 parameter's piece on each rank, the last ones padded."""
    part = -(-tensor.numel() // world)
    padded = torch.cat([tensor.reshape(-1), torch.full((part * world - tensor.numel(),), 77.0)])
    return list(padded.view(world, part))


def zero3(directory: Path, groups: Sequence[Named], world: int, order: Sequence[str], **extra: Any) -> list[list[Any]]:
    """Writes a ZeRO-3 tag directory with the given sub-groups; `order` is the module's. Returns each rank's flats."""
    shapes = [{name: tensor.shape for name, tensor in group.items()} for group in groups]
    every = []
    for rank in range(world):
        flats = [torch.cat([cut(tensor, world)[rank] for tensor in group.values()]) for group in groups]
        every.append(flats)
        model = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in order},
            "buffer_names": [], "param_shapes": shapes, "frozen_param_shapes": {}, "frozen_param_fragments": {},
            "shared_params": {}, "ds_version": "0.19.8", **extra,
        }  # fmt: skip
        save(model, directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optim_zero3(directory, rank, world, flats)
    return every


def optim_zero3(directory: Path, rank: int, world: int, flats: Sequence[torch.Tensor], **states: Any) -> None:
    """Writes one rank's ZeRO-3 optimizer file; `states` are the moments of each sub-group."""
    inner = {"state": {i: {key: s[i] for key, s in states.items()} for i in range(len(flats))}, "param_groups": []}
    state = {
        "zero_stage": 3, "partition_count": world, "fp32_flat_groups": list(flats), "optimizer_state_dict": inner,
    }  # fmt: skip
    save(
        {"optimizer_state_dict": state, "ds_version": "0.19.8"},
        directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
    )


def zero2(
    directory: Path, groups: Sequence[Sequence[torch.Tensor]], module: Named, *, version: str | None = None,
    shapes: Any = None, model: Mapping[str, Any] | None = None, **state: Any,
) -> None:  # fmt: skip
    """Writes a ZeRO-2 tag directory: `groups` has each group's flats by rank, `shapes` goes to the optimizer files."""
    told = {} if version is None else {"ds_version": version}
    save({"module": dict(module), **told, **(model or {})}, directory / "mp_rank_00_model_states.pt")
    for rank in range(len(groups[0])):
        mine = {
            "single_partition_of_fp32_groups": [flats[rank] for flats in groups],
            "zero_stage": 2, "partition_count": len(groups[0]), "base_optimizer_state": [], **state,
        }  # fmt: skip
        root: dict[str, Any] = {"optimizer_state_dict": mine, **told}
        if shapes is not None:
            root["param_shapes"] = shapes
        save(root, directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def same(tensor: Any, expected: torch.Tensor) -> bool:
    """Whether a LazyTensor has exactly the expected dtype, shape and bits."""
    mine = tensor.torch()
    return (
        mine.dtype == expected.dtype
        and mine.shape == expected.shape
        and np.array_equal(bits(mine), bits(expected.contiguous()))
    )


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def assert_tensors(checkpoint: Checkpoint, expected: Named) -> None:
    """The checkpoint holds exactly these names, bit for bit."""
    assert set(checkpoint) == set(expected)
    wrong = [name for name, tensor in expected.items() if not same(checkpoint[name], tensor)]
    assert not wrong


def assert_truth(checkpoint: Checkpoint, case: str) -> None:
    """The checkpoint equals a real case's ground truth: names, ties, dtypes, bits."""
    facts, truth = facts_of(case), load_file(DATA / case / "expected.safetensors")
    absent = set(facts["absent"])
    expected = {name: tensor for name, tensor in truth.items() if name not in absent}
    tied = {alias: owner for alias, owner in facts["tied"].items() if owner not in absent}
    expected.update((alias, truth[owner]) for alias, owner in tied.items())
    assert_tensors(checkpoint, expected)
    assert checkpoint.tied == tied


def facts_of(case: str) -> dict[str, Any]:
    """A real case's case.json."""
    facts: dict[str, Any] = json.loads((DATA / case / "case.json").read_text())
    return facts
