"""Tensors without elements, and where huggingface_hub puts them."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st

from lazyzero.dtypes import FLOAT32
from lazyzero.export.plan import STEMS, Format, Plan, make_plan
from lazyzero.tensor import Placeholder

SHAPES = st.sampled_from([(0,), (0, 3), (2, 0), (), (5,), (9,), (4, 4), (40,)])


def names(plan: Plan) -> dict[str, list[str]]:
    """The names in each file, in order."""
    return {shard.filename: [name for name, _ in shard.entries] for shard in plan.shards}


@pytest.mark.parametrize("format", ["safetensors", "bin"])
@given(shapes=st.lists(SHAPES, min_size=1, max_size=9), limit=st.sampled_from([16, 40, 64, 100]))
def test_all_of_them_go_where_the_first_one_went(format: Format, shapes: list[tuple[int, ...]], limit: int) -> None:
    """Files, names in order, and the total are those of huggingface_hub's split, which takes them for one storage."""
    tensors = {f"t{number}": torch.empty(shape) for number, shape in enumerate(shapes)}
    stem, suffix = STEMS[format]
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=f"{stem}{{suffix}}{suffix}", max_shard_size=limit
    )
    placeholders = {name: Placeholder(tuple(tensor.shape), FLOAT32) for name, tensor in tensors.items()}
    plan = make_plan(placeholders, format=format, dtype=None, max_shard_size=limit)
    assert names(plan) == split.filename_to_tensors
    assert plan.total_size == split.metadata["total_size"]


def test_a_tied_one_is_dropped_with_the_rest() -> None:
    """`drop` leaves out aliases only: an empty tensor of its own is moved, not lost."""
    tensors = {
        "a": Placeholder((0,), FLOAT32),
        "b": Placeholder((4,), FLOAT32),
        "c": Placeholder((0, 2), FLOAT32),
        "a2": Placeholder((0,), FLOAT32, "a"),
        "b2": Placeholder((4,), FLOAT32, "b"),
    }
    plan = make_plan(tensors, dtype=None, max_shard_size=16, tied="drop")
    assert names(plan) == {"model.safetensors": ["a", "b", "c"]}
    assert dict(plan.shards[0].dropped) == {"a2": "a", "b2": "b"}
