"""Planning: which tensor goes into which file, decided on sizes alone."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory, split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st

from lazyzero.dtypes import BFLOAT16, DTYPES, FLOAT32
from lazyzero.errors import InvalidRequest
from lazyzero.export.plan import make_plan, split
from lazyzero.tensor import Placeholder

BYTE = DTYPES["uint8"]


def shards(sizes: list[int], limit: int | None) -> list[list[int]]:
    """The sizes of each shard's tensors."""
    named = [(str(number), size) for number, size in enumerate(sizes)]
    return [[sizes[int(name)] for name in group] for group in split(named, limit)]


def test_split_reads_like_a_sentence() -> None:
    """In order; what does not fit opens a shard; what is too large for any has one of its own; an exact fit fits."""
    assert shards([6, 6, 2, 6, 2, 2], 10) == [[6], [6, 2], [6, 2, 2]]
    assert shards([5, 5, 5], 10) == [[5, 5], [5]]
    assert shards([1, 2, 3], 6) == [[1, 2, 3]]
    assert shards([11, 1], 10) == [[11], [1]]
    assert shards([1, 11, 1], 10) == [[11], [1, 1]]
    assert shards([1, 2, 3], None) == [[1, 2, 3]]
    assert shards([0, 0], 1) == [[0, 0]]
    assert shards([2, 0, 2], 2) == [[2, 0], [2]]
    assert shards([], 10) == []


def bytes_of(sizes: dict[str, int], tied: dict[str, str] | None = None) -> dict[str, Placeholder]:
    """Placeholders of so many bytes."""
    return {name: Placeholder((size,), BYTE, (tied or {}).get(name)) for name, size in sizes.items()}


def files(plan: object) -> dict[str, list[str]]:
    return {shard.filename: [name for name, _ in shard.entries] for shard in plan.shards}  # type: ignore[attr-defined]


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=24)


@given(sizes=SIZES, limit=st.integers(1, 100))
def test_borders_and_names_are_huggingface_hubs(sizes: list[int], limit: int) -> None:
    """Untied: files, their tensors in order, the map and the total equal huggingface_hub's for any sizes and limit."""
    tensors = {f"t{number}": size for number, size in enumerate(sizes)}
    theirs = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None if size else "no storage, as torch's split takes all empty tensors to have",
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    ours = make_plan(bytes_of(tensors), dtype=None, max_shard_size=limit)
    assert files(ours) == theirs.filename_to_tensors
    assert ours.weight_map == theirs.tensor_to_filename
    assert ours.total_size == sum(sizes)
    assert (ours.index is not None) == theirs.is_sharded
    if theirs.is_sharded:
        assert theirs.metadata == {"total_size": ours.total_size}


@st.composite
def tied_sizes(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes by name, and aliases of some of them at the end, as a checkpoint lists them."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=16))
    tensors = {f"t{number}": size for number, size in enumerate(sizes)}
    owners = draw(st.lists(st.sampled_from(list(tensors)), max_size=8))
    tied = {f"alias{number}": owner for number, owner in enumerate(owners)}
    return {**tensors, **{alias: tensors[owner] for alias, owner in tied.items()}}, tied


@given(case=tied_sizes(), limit=st.integers(1, 100))
def test_tied_names_share_a_file_as_in_huggingface_hub(case: tuple[dict[str, int], dict[str, str]], limit: int) -> None:
    """.bin: a tied group counts once and stands in one file, whose names and borders are huggingface_hub's."""
    sizes, tied = case
    owners = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items() if name not in tied}
    state = {name: owners[tied.get(name, name)] for name in sizes}
    theirs = split_torch_state_dict_into_shards(
        state, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=limit
    )
    ours = make_plan(bytes_of(sizes, tied), format="bin", dtype=None, max_shard_size=limit)
    assert ours.weight_map == theirs.tensor_to_filename
    assert {file: sorted(names) for file, names in files(ours).items()} == {
        file: sorted(names) for file, names in theirs.filename_to_tensors.items()
    }
    assert ours.total_size == sum(tensor.nbytes for tensor in owners.values())


@given(case=tied_sizes(), limit=st.integers(1, 100))
def test_clones_are_counted_and_drops_are_not(case: tuple[dict[str, int], dict[str, str]], limit: int) -> None:
    """safetensors: `clone` plans every name like any other, `drop` plans owners alone and records the aliases."""
    sizes, tied = case
    clone = make_plan(bytes_of(sizes, tied), dtype=None, max_shard_size=limit)
    assert files(clone) == files(make_plan(bytes_of(sizes), dtype=None, max_shard_size=limit))
    drop = make_plan(bytes_of(sizes, tied), dtype=None, max_shard_size=limit, tied="drop")
    owners = {name: size for name, size in sizes.items() if name not in tied}
    assert files(drop) == files(make_plan(bytes_of(owners), dtype=None, max_shard_size=limit))
    assert {alias: owner for shard in drop.shards for alias, owner in shard.dropped} == tied
    for shard in drop.shards:
        assert {owner for _, owner in shard.dropped} <= {name for name, _ in shard.entries}


def test_sizes_count_in_the_output_dtype() -> None:
    """Four float32 fill a 16-byte shard, eight bfloat16 do; integers count as they are."""
    four = {name: Placeholder((4,), FLOAT32) for name in "abcd"}
    whole = {**four, "n": Placeholder((4,), DTYPES["int64"])}
    assert list(files(make_plan(four, dtype=FLOAT32, max_shard_size=16)).values()) == [["a"], ["b"], ["c"], ["d"]]
    assert list(files(make_plan(four, dtype=BFLOAT16, max_shard_size=16)).values()) == [["a", "b"], ["c", "d"]]
    plan = make_plan(whole, dtype=BFLOAT16, max_shard_size=None)
    assert plan.total_size == 4 * 4 * 2 + 4 * 8
    assert dict(plan.shards[0].entries)["n"].dtype is DTYPES["int64"]


def test_one_file_has_no_number_and_no_index() -> None:
    """`none`, or a limit nothing exceeds, gives the plain name; more files are numbered from 1 in five digits."""
    two = bytes_of({"a": 3, "b": 3})
    one = make_plan(two, dtype=None, max_shard_size=None)
    assert ([shard.filename for shard in one.shards], one.index) == (["model.safetensors"], None)
    bin_plan = make_plan(two, dtype=None, max_shard_size=4, format="bin")
    assert [shard.filename for shard in bin_plan.shards] == [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ]
    assert bin_plan.index == "pytorch_model.bin.index.json"
    assert make_plan(two, dtype=None, max_shard_size=4).index == "model.safetensors.index.json"


def test_an_alias_without_its_owner_is_a_tensor_like_any_other() -> None:
    """A filter that drops the owner does not drop the value."""
    lonely = {"alias": Placeholder((3,), BYTE, "gone"), "b": Placeholder((3,), BYTE)}
    for options in ({"format": "bin"}, {"tied": "drop"}):
        plan = make_plan(lonely, dtype=None, max_shard_size=None, **options)  # type: ignore[arg-type]
        assert plan.total_size == 6
        assert [name for name, _ in plan.shards[0].entries] == ["alias", "b"]


def test_what_cannot_be_planned_is_refused_by_name() -> None:
    """A format, a tie rule, or a size that does not exist."""
    tensors = bytes_of({"a": 1})
    for wrong, named in (
        ({"format": "onnx"}, "onnx"),
        ({"tied": "keep"}, "keep"),
        ({"max_shard_size": 0}, "0 bytes"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            make_plan(tensors, **{"dtype": None, "max_shard_size": 4, **wrong})  # type: ignore[arg-type]
