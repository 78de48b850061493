"""Names masters by their values: an fp32 master, rounded, is the 16-bit copy that training kept in `module`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import numpy as np

from lazyzero.cast import cast, same
from lazyzero.dtypes import DType
from lazyzero.gather import read as read_elements
from lazyzero.tensor import Chain, LazyTensor, Slice

SAMPLE = 4096  # elements compared before a whole tensor is
_MOST_COMPARED = 20_000


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


class Effort:
    """How many tensors may still be compared: where thousands are alike, nothing is learned from comparing all with all."""

    __slots__ = ("left",)

    def __init__(self, left: int = _MOST_COMPARED) -> None:
        self.left = left

    def spend(self, count: int) -> bool:
        """Whether so many more may be compared."""
        self.left -= count
        return self.left >= 0


class Pool:
    """Tensors that masters may belong to, found by what their first element is."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self.tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel}
        self._starts: dict[DType, dict[bytes, list[str]]] = {}
        for name, tensor in self.tensors.items():
            start = _key(read_elements(tensor, 0, 1))
            self._starts.setdefault(tensor.dtype, {}).setdefault(start, []).append(name)

    def fitting(self, chain: Chain, at: int, effort: Effort, without: Container[str] = ()) -> list[str]:
        """The names whose values are the masters from element `at` on; whole tensors are read if several start so.

        Empty when there is no effort left.
        """
        names = [name for name in self._starting(chain, at) if name not in without]
        if not effort.spend(1 + len(names)):
            return []
        close = [name for name in names if rounds_to(chain, at, self.tensors[name])]
        if len(close) < 2:
            return close
        if not effort.spend(len(close)):
            return []
        return [name for name in close if rounds_to(chain, at, self.tensors[name], whole=True)]

    def _starting(self, chain: Chain, at: int) -> Iterator[str]:
        if at >= chain.total:
            return
        first = read_elements(LazyTensor("", (1,), Slice(chain, at), "trainable"), 0, 1)
        for dtype, starts in self._starts.items():
            rounded = np.empty(1, dtype.numpy)
            cast(first, rounded)
            yield from starts.get(_key(rounded), ())


def _key(element: np.ndarray) -> bytes:
    return b"NaN" if element[0] != element[0] else element.tobytes()


def walk(chain: Chain, pool: Pool, effort: Effort) -> tuple[dict[str, int], int]:
    """Names the parameters along a flat vector: name -> offset, and how far it got.

    Where several of one size fit, none is named and the walk goes on behind them; where none fits, or their sizes
    differ, it stops.
    """
    found: dict[str, int] = {}
    at = 0
    while at < chain.total:
        names = pool.fitting(chain, at, effort, found)
        sizes = {pool.tensors[name].numel for name in names}
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
