"""Casts are torch's, bit for bit; comparison is of bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyzero.cast import cast, differing, same
from lazyzero.dtypes import DTYPES

FLOATS = ["float64", "float32", "float16", "bfloat16"]
TARGETS = ["float32", "float16", "bfloat16"]


def ours(values: torch.Tensor, target: str) -> torch.Tensor:
    source = DTYPES[str(values.dtype).removeprefix("torch.")]
    into = np.empty(values.numel(), DTYPES[target].numpy)
    cast(values.view(torch.uint8).numpy().view(source.numpy), into)
    return torch.from_numpy(into.view(np.uint8)).view(getattr(torch, target))


def assert_equal(values: torch.Tensor, target: str) -> None:
    """Same bits as `Tensor.to`, and NaN where it has NaN."""
    got, want = ours(values, target), values.to(getattr(torch, target))
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(got[number].view(torch.uint8), want[number].view(torch.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_16_bit_value_casts_as_torch_does(source: str, target: str) -> None:
    """All 65536 bit patterns."""
    assert_equal(torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(getattr(torch, source)), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", FLOATS)
def test_edges_cast_as_torch_does(source: str, target: str) -> None:
    """Zeros, subnormals, halfway cases around every power of two, the largest values, and what overflows."""
    kind = getattr(torch, source)
    steps = torch.tensor([2.0**e for e in range(-160, 140)], dtype=torch.float64)
    near = [steps * (1 + k * 2.0**-n) for n in (7, 8, 9, 10, 11, 12, 23, 24, 25) for k in (-3, -1, 0, 1, 3)]
    limits = torch.tensor([0.0, torch.inf, torch.nan, 65504, 65519.99, 65520, 65536, 3.4028235e38, 3.3895e38, 1e308])
    values = torch.cat([*near, limits.double()])
    assert_equal(torch.cat([values, -values]).to(kind), target)


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32), source=st.sampled_from(FLOATS), target=st.sampled_from(TARGETS))
def test_any_bits_cast_as_torch_does(seed: int, source: str, target: str) -> None:
    """Random bit patterns of each floating type."""
    raw = np.random.default_rng(seed).integers(0, 256, 8 * 512, dtype=np.uint8)
    assert_equal(torch.from_numpy(raw).view(getattr(torch, source)), target)


def test_difference_is_of_bits_and_nans_are_alike() -> None:
    """-0.0 is not 0.0; any NaN is any other; the indices of what differs are given."""
    a = np.array([0.0, 1.0, np.nan, 4.0], np.float32)
    b = a.copy()
    b.view(np.uint32)[2] ^= 1
    assert same(a, b)
    b[0], b[3] = -0.0, 5.0
    assert list(differing(a, b)) == [0, 3]
    assert not same(a, a.astype(np.float64))
    assert not same(a, a[:3])


def test_wide_complex_numbers_differ_by_element() -> None:
    """A 16-byte element that differs in one half is one difference at its own index."""
    a = np.arange(4, dtype=np.complex128)
    b = a.copy()
    b[2] += 1j
    assert list(differing(a, b)) == [2]
    b[2] = complex(np.nan, 0)
    c = b.copy()
    c[2] = complex(np.nan, 1)
    assert same(b, c)
    assert same(np.array([1, 2]), np.array([1, 2]))
    assert not same(np.array([True]), np.array([False]))
