"""Tensor-parallel checkpoints as DeepSpeed lays them out, made of each rank's given shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from made import Named, cut, flat, save


def stage0(directory: Path, shards: Sequence[Named], info: Mapping[str, Any] | None = None, **root: Any) -> None:
    """One model file for each tensor-parallel rank; fp32 training keeps no masters."""
    for rank, module in enumerate(shards):
        save(_model(dict(module), len(shards), info, root), directory / f"mp_rank_{rank:02d}_model_states.pt")


def stage1(directory: Path, shards: Sequence[Named], world: int, info: Mapping[str, Any] | None = None) -> None:
    """One group of bf16 parameters, partitioned over `world` ranks below each tensor-parallel one."""
    for mp, tensors in enumerate(shards):
        shapes = [{name: tensor.shape for name, tensor in tensors.items()}]
        module = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        save(
            _model(module, len(shards), info, {"param_shapes": shapes}),
            directory / f"mp_rank_{mp:02d}_model_states.pt",
        )
        vector = flat(tensors)
        padded = torch.cat([vector, torch.zeros(-len(vector) % world)])
        for dp, part in enumerate(padded.view(world, -1)):
            last = len(padded) - len(vector) if dp == world - 1 else 0
            state = {
                "zero_stage": 1, "partition_count": [world], "group_paddings": [last],
                "single_partition_of_fp32_groups": [part[: len(part) - last].clone()],
            }  # fmt: skip
            name = f"bf16_zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
            save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, directory / name)


def stage3(directory: Path, shards: Sequence[Named], world: int, info: Mapping[str, Any] | None = None) -> None:
    """One sub-group, each parameter cut over `world` ranks below each tensor-parallel one."""
    for mp, tensors in enumerate(shards):
        shapes = [{name: tensor.shape for name, tensor in tensors.items()}]
        empty = {name: torch.empty(0, dtype=torch.bfloat16) for name in tensors}
        for dp in range(world):
            save(
                _model(empty, len(shards), info, {"param_shapes": shapes}),
                directory / f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt",
            )
            state = {
                "zero_stage": 3, "partition_count": world, "optimizer_state_dict": {},
                "fp32_flat_groups": [torch.cat([cut(tensor, world)[dp] for tensor in tensors.values()])],
            }  # fmt: skip
            name = f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
            save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, directory / name)


def _model(module: Named, ranks: int, info: Mapping[str, Any] | None, root: Mapping[str, Any]) -> dict[str, Any]:
    told = {"universal_checkpoint_info": dict(info)} if info is not None else {}
    return {
        "module": module, "buffer_names": [], "mp_world_size": ranks, "shared_params": {}, "ds_version": "0.19.8",
        **told, **root,
    }  # fmt: skip
