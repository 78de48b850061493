"""The free self-check: at stages 0 to 2 the training copy in `module` must be what the rebuilt fp32 weights round to.

It catches wrong order, offsets, paddings and mixed-up files. A sample costs a few reads per tensor; the whole costs a
pass over the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lazyzero.cast import cast, same
from lazyzero.container.reader import Want, read_all
from lazyzero.errors import SelfCheckFailed
from lazyzero.gather import wants
from lazyzero.layout.contents import Check
from lazyzero.tensor import LazyTensor

_RUN = 64  # elements in one place of a sample
_PLACES = 4
_MOST_TENSORS = 512
_BATCH = 64  # tensors whose samples are read together: neighbours in a file become one read
_CHUNK = 1 << 18  # elements, for the whole
_NAMED = 8


def check(checks: Sequence[Check], *, full: bool = False) -> int:
    """Compares every pair, on a sample or in `full`; returns how many tensors were compared.

    Raises SelfCheckFailed with the names of the tensors that disagree.
    """
    chosen = checks if full else _evenly(checks, _MOST_TENSORS)
    wrong: list[str] = []
    for first in range(0, len(chosen), _BATCH):
        batch = chosen[first : first + _BATCH]
        wrong += _whole(batch) if full else _sampled(batch)
    if wrong:
        names = ", ".join(wrong[:_NAMED]) + (f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
        raise SelfCheckFailed(
            f"rebuilt weights disagree with the copy that training kept of them in `module`: {names}; "
            "the files are damaged, mixed up, or record another order than they have "
            "(if the copy was changed on purpose, go on with --no-self-check)"
        )
    return len(chosen)


def _evenly(checks: Sequence[Check], most: int) -> Sequence[Check]:
    if len(checks) <= most:
        return checks
    return [checks[index * len(checks) // most] for index in range(most)]


def _runs(numel: int) -> list[tuple[int, int]]:
    """A few short runs of elements over a tensor, its first and its last among them."""
    if numel <= _RUN * _PLACES:
        return [(0, numel)]
    step = (numel - _RUN) // (_PLACES - 1)
    return [(place * step, place * step + _RUN) for place in range(_PLACES - 1)] + [(numel - _RUN, numel)]


def _sampled(batch: Sequence[Check]) -> list[str]:
    rebuilt = [_place(pair.rebuilt) for pair in batch]
    stored = [_place(pair.stored) for pair in batch]
    read_all(want for raw, tensor in [*rebuilt, *stored] for want in _sample_wants(raw, tensor))
    return [
        pair.rebuilt.name
        for pair, (mine, _), (theirs, _) in zip(batch, rebuilt, stored, strict=True)
        if not _agree(pair, mine, theirs)
    ]


def _place(tensor: LazyTensor) -> tuple[np.ndarray, LazyTensor]:
    count = sum(stop - start for start, stop in _runs(tensor.numel))
    return np.empty(count * tensor.dtype.itemsize, np.uint8), tensor


def _sample_wants(raw: np.ndarray, tensor: LazyTensor) -> Iterator[Want]:
    at = 0
    for start, stop in _runs(tensor.numel):
        end = at + (stop - start) * tensor.dtype.itemsize
        yield from wants(tensor, start, stop, raw[at:end])
        at = end


def _whole(batch: Sequence[Check]) -> list[str]:
    wrong = []
    for pair in batch:
        size = _CHUNK * pair.rebuilt.dtype.itemsize
        theirs = pair.stored.chunks(_CHUNK * pair.stored.dtype.itemsize)
        if not all(
            _agree(pair, mine.view(np.uint8), other.view(np.uint8))
            for mine, other in zip(pair.rebuilt.chunks(size), theirs, strict=True)
        ):
            wrong.append(pair.rebuilt.name)
    return wrong


def _agree(pair: Check, mine: np.ndarray, theirs: np.ndarray) -> bool:
    values = mine.view(pair.rebuilt.dtype.numpy)
    rounded = np.empty(values.shape, pair.stored.dtype.numpy)
    cast(values, rounded)
    return same(rounded, theirs.view(pair.stored.dtype.numpy))
