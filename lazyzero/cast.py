"""Casts that equal torch's bit for bit (NaNs stay NaNs, their payload may differ), and comparison of bits."""

from __future__ import annotations

import numpy as np


def cast(source: np.ndarray, into: np.ndarray) -> None:
    """Fills `into` with `source` in its dtype: round to nearest even, overflow to infinity, as `Tensor.to` does."""
    with np.errstate(over="ignore", invalid="ignore"):
        if source.dtype == np.float64 and into.dtype == np.float16:
            source = source.astype(np.float32)  # torch rounds twice here
        np.copyto(into, source, casting="unsafe")


def bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers of the same width."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= 8 else array.view(np.uint64)


def differing(a: np.ndarray, b: np.ndarray, *, exact: bool = False) -> np.ndarray:
    """Indices where two 1-D arrays of one dtype differ in their bits; two NaNs are the same unless `exact`."""
    where = np.flatnonzero(bits(a) != bits(b))
    if len(where) and a.dtype.kind not in "iub":
        width = 2 if a.dtype.itemsize > 8 else 1
        where = np.unique(where // width)
        if exact:
            return where
        both_nan = np.isnan(a[where]) & np.isnan(b[where])
        where = where[~both_nan]
    return where


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two 1-D arrays have the same dtype, length and bits; two NaNs are the same."""
    return a.dtype == b.dtype and a.shape == b.shape and not len(differing(a, b))
