"""Names masters by their values: an fp32 master, rounded, is the 16-bit copy that training kept in `module`."""

from __future__ import annotations

import numpy as np

from lazyzero.cast import cast, same
from lazyzero.gather import read as read_elements
from lazyzero.tensor import Chain, LazyTensor, Slice

SAMPLE = 4096  # elements compared before a whole tensor is


def rounds_to(chain: Chain, at: int, tensor: LazyTensor, *, whole: bool = False) -> bool:
    """Whether the masters from element `at` on, rounded, are the tensor; without `whole` its first elements decide."""
    if at + tensor.numel > chain.total:
        return False
    master = LazyTensor(tensor.name, (tensor.numel,), Slice(chain, at), tensor.role)
    count = tensor.numel if whole else min(SAMPLE, tensor.numel)
    for start in range(0, count, SAMPLE):
        stop = min(start + SAMPLE, count)
        rounded = np.empty(stop - start, tensor.dtype.numpy)
        cast(read_elements(master, start, stop), rounded)
        if not same(rounded, read_elements(tensor, start, stop)):
            return False
    return True


def fitting(chain: Chain, at: int, pool: dict[str, LazyTensor]) -> list[str]:
    """The names in `pool` whose values are the masters from element `at` on; whole tensors are read if several start so."""
    close = [name for name, tensor in pool.items() if rounds_to(chain, at, tensor)]
    if len(close) < 2:
        return close
    return [name for name in close if rounds_to(chain, at, pool[name], whole=True)]


def walk(chain: Chain, pool: dict[str, LazyTensor]) -> tuple[dict[str, int], int]:
    """Names the parameters along a flat vector: name -> offset, and how far it got.

    Where several of one size fit, none is named and the walk goes on behind them; where none fits, or their sizes
    differ, it stops.
    """
    found: dict[str, int] = {}
    at = 0
    while at < chain.total:
        names = fitting(chain, at, {name: tensor for name, tensor in pool.items() if name not in found})
        sizes = {pool[name].numel for name in names}
        if len(sizes) != 1:
            break
        if len(names) == 1:
            found[names[0]] = at
        at += sizes.pop()
    return found, at


def round_alike(rebuilt: LazyTensor, stored: LazyTensor) -> bool:
    """Whether the first elements of a tensor, rounded, are those of another of the same shape."""
    if rebuilt.shape != stored.shape:
        return False
    count = min(SAMPLE, stored.numel)
    rounded = np.empty(count, stored.dtype.numpy)
    cast(read_elements(rebuilt, 0, count), rounded)
    return same(rounded, read_elements(stored, 0, count))
