"""Small ZeRO checkpoints, honest until told otherwise: their files' contents by name, or written. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.forge import Tensor, Zip, parts, pickled, storages_of, write

VERSION = "0.19.8"
TAG = "global_step3"
WITHOUT = object()  # a change that takes a key away

Changes = Mapping[str, Any]


def archive(value: Any) -> bytes:
    """A zip archive of `value`, its storages full of zeros."""
    return Zip(parts(pickled(value), storages_of(value))).write()


def changed(honest: dict[str, Any], changes: Changes | None) -> dict[str, Any]:
    """The dict with some keys replaced, added or taken away."""
    merged = {**honest, **(changes or {})}
    return {key: value for key, value in merged.items() if value is not WITHOUT}


def zero2_files(
    *,
    world: int = 2,
    model: Changes | None = None,
    optim: Changes | None = None,
    rank1: Changes | None = None,
    top1: Changes | None = None,
) -> dict[str, Any]:
    """A ZeRO-2 checkpoint of one 2x3 weight, a bias of 2 and a buffer; `rank1` changes the state of rank 1 alone."""
    states = {
        "module": {
            "w": Tensor("0", (2, 3), kind="BFloat16Storage"),
            "b": Tensor("1", (2,), kind="BFloat16Storage"),
            "buffer": Tensor("2", (4,)),
        },
        "buffer_names": ["buffer"],
        "param_shapes": [{"w": (2, 3), "b": (2,)}],
        "shared_params": {},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "ds_version": VERSION,
        "ds_config": {"bf16": {"enabled": True}},
        "global_steps": 3,
    }
    files = {"mp_rank_00_model_states.pt": changed(states, model)}
    for rank in range(world):
        state = {
            "zero_stage": 2,
            "partition_count": [world],
            "group_paddings": [0],
            "single_partition_of_fp32_groups": [Tensor("0", (8 // world,))],
            "base_optimizer_state": {"state": {0: {"step": 3}}, "param_groups": [{"params": [0]}]},
            "loss_scaler": None,
        }
        state = changed(changed(state, optim), rank1 if rank == 1 else None)
        top = {"optimizer_state_dict": state, "ds_version": VERSION, "ds_config": {}}
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = changed(top, top1 if rank == 1 else None)
    return files


def zero3_files(
    *,
    world: int = 2,
    model: Changes | None = None,
    optim: Changes | None = None,
    rank1: Changes | None = None,
    model1: Changes | None = None,
) -> dict[str, Any]:
    """A ZeRO-3 checkpoint of a 3x3 weight, a bias of 3 and a frozen vector of 5."""
    files = {}
    for rank in range(world):
        states = {
            "module": {
                "w": Tensor("0", (0,), kind="BFloat16Storage"),
                "b": Tensor("1", (0,), kind="BFloat16Storage"),
                "f": Tensor("2", (0,), kind="BFloat16Storage"),
            },
            "buffer_names": [],
            "param_shapes": [{"w": (3, 3)}, {"b": (3,)}],
            "shared_params": {},
            "frozen_param_shapes": {"f": (5,)},
            "frozen_param_fragments": {"f": Tensor("3", (-(-5 // world),), kind="BFloat16Storage")},
            "ds_version": VERSION,
            "ds_config": {"bf16": {"enabled": True}},
            "global_steps": 3,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        files[name] = changed(changed(states, model), model1 if rank == 1 else None)
        state = {
            "zero_stage": 3,
            "partition_count": world,
            "fp32_flat_groups": [Tensor("0", (-(-9 // world),)), Tensor("1", (-(-3 // world),))],
            "optimizer_state_dict": {"state": {0: {"step": Tensor("2", ())}}, "param_groups": []},
        }
        state = changed(changed(state, optim), rank1 if rank == 1 else None)
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": state,
            "ds_version": VERSION,
        }
    return files


def stage0_files(*, model: Changes | None = None) -> dict[str, Any]:
    """A checkpoint without ZeRO: the weights are `module`, and fp32 masters without names lie beside them."""
    states = {
        "module": {"w": Tensor("0", (2, 3), kind="HalfStorage"), "b": Tensor("1", (2,), kind="HalfStorage")},
        "buffer_names": [],
        "param_shapes": None,
        "optimizer": {"fp32_groups_flat": [Tensor("2", (8,))]},
        "ds_version": VERSION,
    }
    return {"mp_rank_00_model_states.pt": changed(states, model)}


LAYOUTS: dict[str, Callable[..., dict[str, Any]]] = {
    "zero2": zero2_files,
    "zero3": zero3_files,
    "stage0": stage0_files,
}


def zero2(root: Path, **changes: Any) -> Path:
    """A ZeRO-2 checkpoint in `root`."""
    return _written(root, zero2_files(**changes))


def zero3(root: Path, **changes: Any) -> Path:
    """A ZeRO-3 checkpoint in `root`."""
    return _written(root, zero3_files(**changes))


def stage0(root: Path, **changes: Any) -> Path:
    """A checkpoint without ZeRO in `root`."""
    return _written(root, stage0_files(**changes))


def _written(root: Path, files: dict[str, Any]) -> Path:
    for name, value in files.items():
        write(root / TAG / name, archive(value))
    write(root / "latest", TAG.encode())
    return root
