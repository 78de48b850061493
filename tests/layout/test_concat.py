"""Tensors put together from tensors: every run of elements comes from the right place, whatever the dimension."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import save, values

from lazyzero.container.archive import open_archive
from lazyzero.gather import read
from lazyzero.layout.concat import Slab, joined
from lazyzero.tensor import LazyTensor, Mean, View


def _stored(path: Path, tensors: list[torch.Tensor]) -> list[LazyTensor]:
    save({str(index): tensor for index, tensor in enumerate(tensors)}, path)
    return [LazyTensor(name, ref.shape, View(ref), "trainable") for name, ref in open_archive(path).root.items()]


@st.composite
def _cuts(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int, list[tuple[int, int, int]]]:
    """Shards that differ along one dimension, and slabs (shard, start, size) of them."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    extents = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    slabs = []
    for _ in range(draw(st.integers(1, 5))):
        shard = draw(st.integers(0, len(extents) - 1))
        start = draw(st.integers(0, extents[shard]))
        slabs.append((shard, start, draw(st.integers(0, extents[shard] - start))))
    return [(*shape[:dim], extent, *shape[dim + 1 :]) for extent in extents], dim, slabs


@given(_cuts(), st.data())
def test_any_run_is_that_of_torch_cat(
    tmp_path_factory: pytest.TempPathFactory,
    made: tuple[list[tuple[int, ...]], int, list[tuple[int, int, int]]],
    data: st.DataObject,
) -> None:
    """Elements [start, stop) of the joined tensor are those of torch's narrow and cat, bit for bit."""
    shapes, dim, cuts = made
    tensors = [values(seed, *shape) for seed, shape in enumerate(shapes)]
    lazy = _stored(tmp_path_factory.mktemp("concat") / "shards.pt", tensors)
    slabs = [Slab(lazy[shard].data, shapes[shard][dim], start, size) for shard, start, size in cuts]
    want = torch.cat([tensors[shard].narrow(dim, start, size) for shard, start, size in cuts], dim)
    whole = joined("t", slabs, tuple(want.shape), dim, "trainable")
    start = data.draw(st.integers(0, want.numel()))
    stop = data.draw(st.integers(start, want.numel()))
    assert read(whole, start, stop).tolist() == want.reshape(-1)[start:stop].tolist()
    assert torch.equal(whole.torch(), want)


def test_pieces_of_one_rank_are_neighbours(tmp_path: Path) -> None:
    """Columns joined from two ranks are a piece for each row and rank, and no element is in two of them."""
    lazy = _stored(tmp_path / "shards.pt", [values(1, 4, 3), values(2, 4, 2)])
    whole = joined("t", [Slab(t.data, t.shape[1], 0, t.shape[1]) for t in lazy], (4, 5), 1, "trainable")
    pieces = list(whole.pieces())
    assert [piece.numel for piece in pieces] == [3, 2] * 4
    first = [piece.start for piece in pieces[::2]]
    assert first == [row * 3 * 4 for row in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mean_is_torchs(tmp_path: Path, dtype: torch.dtype) -> None:
    """An averaged tensor equals sum(copies) / len(copies) in its own dtype, read whole, by chunks or by rows."""
    copies = [values(seed, 5, 3).to(dtype) for seed in range(3)]
    lazy = _stored(tmp_path / "copies.pt", copies)
    mean = LazyTensor("t", (5, 3), Mean(tuple(copy.data for copy in lazy)), "trainable")
    want = sum(copies[1:], start=copies[0]) / len(copies)
    assert torch.equal(mean.torch(), want)
    by_chunks = [x for chunk in mean.chunks(4 * want.element_size()) for x in chunk.astype("float32").tolist()]
    assert by_chunks == want.float().reshape(-1).tolist()
    assert mean[2:4].astype("float32").tolist() == want[2:4].float().tolist()
    assert sum(piece.numel for piece in mean.pieces()) == 3 * math.prod(mean.shape)
