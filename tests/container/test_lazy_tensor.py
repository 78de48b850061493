"""LazyTensor behaves as the numpy array of its values does, and reads no more than it must."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyzero.container.archive import open_archive
from lazyzero.tensor import Chain, LazyTensor, Slice, Striped, View

Made = tuple[LazyTensor, np.ndarray]


def refs(path: Path, **tensors: torch.Tensor) -> dict[str, Any]:
    """The tensors, saved by torch and referred to."""
    torch.save(tensors, path / "a.pt")
    found: dict[str, Any] = open_archive(path / "a.pt").root
    return found


def contiguous(path: Path) -> Made:
    """One piece in a file."""
    values = torch.arange(4 * 3 * 5, dtype=torch.float32).reshape(4, 3, 5)
    return LazyTensor("t", (4, 3, 5), View(refs(path, t=values)["t"]), "module"), values.numpy()


def strided(path: Path) -> Made:
    """A transposed view."""
    values = torch.arange(4 * 3 * 5, dtype=torch.int64).reshape(5, 3, 4).permute(2, 1, 0)
    return LazyTensor("t", (4, 3, 5), View(refs(path, t=values)["t"]), "module"), values.numpy()


def chained(path: Path) -> Made:
    """As ZeRO-1/2: a run in the flats of three ranks, of which one is empty."""
    flat = torch.arange(80, dtype=torch.float32)
    found = refs(path, a=flat[:30].clone(), b=flat[30:30].clone(), c=flat[30:].clone())
    chain = Chain([found["a"], found["b"], found["c"]], found["a"].dtype)
    return LazyTensor("t", (4, 3, 5), Slice(chain, 10), "trainable"), flat[10:70].reshape(4, 3, 5).numpy()


def striped(path: Path) -> Made:
    """As ZeRO-3: a part on each of seven ranks, the last ones padded, in two sub-groups."""
    values, world = torch.arange(60, dtype=torch.float32), 7
    part = math.ceil(60 / world)
    padded = torch.cat([values, torch.full((part * world - 60,), -1.0)])
    pieces = {
        f"r{rank}{half}": padded[rank * part :][:part][at].clone()
        for rank in range(world)
        for half, at in enumerate((slice(0, 4), slice(4, None)))
    }
    found = refs(path, **pieces)
    chains = tuple(Chain([found[f"r{rank}0"], found[f"r{rank}1"]], found["r00"].dtype) for rank in range(world))
    return LazyTensor("t", (4, 3, 5), Striped(chains, 0, part), "trainable"), values.reshape(4, 3, 5).numpy()


LAYOUTS = [contiguous, strided, chained, striped]
INDICES: list[Any] = [
    0, 3, -1, -4, np.int64(2),
    slice(None), slice(1, 3), slice(3, 1), slice(None, None, 2), slice(None, None, -1), slice(None, None, -3),
    slice(3, None, -2), slice(0, 4, 3), slice(-2, None), slice(100, 200), slice(-100, 2), slice(2, 0, -1),
    ..., (), None,
    (1, 2), (1, 2, 3), (-1, -2, -3), (1, ...), (..., 1), (1, ..., 2), (slice(1, 3), 0), (slice(None), slice(None), 1),
    (slice(None, None, -1), slice(None, None, -2), slice(4, 0, -3)), (2, slice(None, None, -1)), (0, None), (None, 0),
    (slice(1, 3), ..., slice(None, None, 2)), (slice(1, 1),), (slice(3, None, -2), 1),
    True, False, [0, 2], np.array([3, 1]), np.array([True, False, True, False]), (np.array([0, 1]), np.array([2, 0])),
    ([0, 1], slice(None), [1, 2]), (1, slice(None), [0, 1]), (-1, [0, 1], 2), (slice(1, 3), [0, 1], 2),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_indexing_as_numpy(tmp_path: Path, layout: Any, index: Any) -> None:
    """Ints, slices of either sign, ellipsis, None, masks and lists give what they give on an array."""
    tensor, values = layout(tmp_path)
    found = tensor[index]
    assert found.dtype == values.dtype
    assert found.shape == values[index].shape
    assert np.array_equal(found, values[index])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "index", [4, -5, (0, 3), (0, 0, 0, 0), (0, 0, 0, ...), slice(None, None, 0), "a", 1.0], ids=repr
)
def test_indexing_errors_as_numpy(tmp_path: Path, layout: Any, index: Any) -> None:
    """What numpy refuses is refused with the same exception."""
    tensor, values = layout(tmp_path)
    try:
        expected = values[index]
    except (IndexError, TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            tensor[index]
    else:
        assert np.array_equal(tensor[index], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_slice_of_the_first_axis(tmp_path: Path, layout: Any) -> None:
    """All starts, stops and steps."""
    tensor, values = layout(tmp_path)
    for start in (None, *range(-5, 6)):
        for stop in (None, *range(-5, 6)):
            for step in (None, -5, -2, -1, 1, 2, 5):
                index = slice(start, stop, step)
                assert np.array_equal(tensor[index], values[index]), index


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensors(tmp_path: Path, layout: Any) -> None:
    """numpy(), torch(), np.asarray, chunks of any size: the same values."""
    tensor, values = layout(tmp_path)
    assert np.array_equal(tensor.numpy(), values)
    assert np.array_equal(np.asarray(tensor), values)
    assert np.array_equal(np.asarray(tensor, dtype=np.float64), values.astype(np.float64))
    assert np.array_equal(tensor.torch().numpy(), values)
    for size in (1, 8, 12, 100, 1 << 20):
        assert np.array_equal(np.concatenate([chunk.copy() for chunk in tensor.chunks(size)]), values.reshape(-1))
    assert (tensor.numel, tensor.ndim, len(tensor), tensor.nbytes) == (60, 3, 4, values.nbytes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_cannot_reach_the_file(tmp_path: Path, layout: Any) -> None:
    """Arrays are read-only; torch tensors can be written to, and the file stays as it is."""
    tensor, values = layout(tmp_path)
    before = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        tensor.numpy()[0, 0, 0] = 7
    loaded = tensor.torch()
    loaded += 1
    assert np.array_equal(loaded.numpy(), values + 1)
    assert np.array_equal(tensor.numpy(), values)
    assert (tmp_path / "a.pt").read_bytes() == before


def test_rows_read_only_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a large tensor reads one row, whatever ranks it lies on."""
    flat = torch.arange(1 << 20, dtype=torch.float32)
    found = refs(tmp_path, a=flat[:500_000].clone(), b=flat[500_000:].clone())
    tensor = LazyTensor("t", (1 << 14, 64), Slice(Chain([found["a"], found["b"]], found["a"].dtype), 0), "trainable")
    row = 500_000 // 64
    assert found["a"].storage.offset and found["b"].storage.offset  # looked up once
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(sum(map(len, views))) or preadv(fd, views, at))
    assert np.array_equal(tensor[row], flat[row * 64 : (row + 1) * 64].numpy())
    assert sum(read) <= 256


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1, 1)], ids=str)
def test_small_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Scalars and tensors without elements are read like any other."""
    values = torch.full(shape, 2.5)
    tensor = LazyTensor("t", shape, View(refs(tmp_path, t=values)["t"]), "module")
    assert tensor.numpy().shape == tensor.torch().shape == shape
    assert np.array_equal(tensor.numpy(), values.numpy())
    assert np.array_equal(tensor[...], values.numpy())
    assert sum(chunk.size for chunk in tensor.chunks()) == math.prod(shape)
    if shape:
        assert np.array_equal(tensor[:1], values[:1].numpy())
    else:
        with pytest.raises(TypeError):
            len(tensor)


def test_bfloat16_and_float8(tmp_path: Path) -> None:
    """Types numpy does not know come as ml_dtypes' and go to torch by name."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        values = torch.tensor([1.5, -2, 0.25]).to(dtype)
        tensor = LazyTensor("t", (3,), View(refs(tmp_path, t=values)["t"]), "module")
        assert str(tensor.numpy().dtype) == str(dtype).removeprefix("torch.") == str(tensor.dtype)
        assert tensor.numpy().astype(np.float32).tolist() == [1.5, -2, 0.25]
        assert tensor[1:].astype(np.float32).tolist() == [-2, 0.25]
        assert torch.equal(tensor.torch().float(), values.float())


def test_large_strided_views(tmp_path: Path) -> None:
    """A view whose rows lie megabytes apart is gathered from many small reads."""
    base = torch.arange(3 << 20, dtype=torch.int32).reshape(1024, 3072)
    for name, values in {
        "columns": base[:, 5:7],
        "transposed": base.T[::300],
        "corner": base[::100, ::1000],
        "expanded": base[0, :3].expand(4, 3),
    }.items():
        tensor = LazyTensor(name, tuple(values.shape), View(refs(tmp_path, t=values)["t"]), "module")
        assert np.array_equal(tensor.numpy(), values.numpy()), name
        assert np.array_equal(tensor[1:3], values[1:3].numpy()), name
        assert np.array_equal(tensor[-1], values[-1].numpy()), name
