"""The bounded window: gathers, casts and writes an output file a few MB at a time, however large its tensors are.

A window is a run of the output file. It may hold many small tensors or a part of a large one; what it needs from each
source file is read with few calls, so pieces of any size cost the same. Windows are independent of each other, hence the
result does not depend on how many workers share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import NamedTuple

import numpy as np

from lazyzero.cast import cast
from lazyzero.container.objects import Storage
from lazyzero.container.reader import announce, read_all
from lazyzero.dtypes import DType
from lazyzero.export.sink import Sink
from lazyzero.gather import wants
from lazyzero.tensor import LazyTensor
from lazyzero.threads import Queue, share

_MOST_ANNOUNCED = 64  # tensors of a window; many small ones are neighbours, which the kernel reads ahead by itself
_QUICK = 50e-6  # seconds of a read that costs more in the interpreter than in the kernel, on average in a window

Observe = Callable[[LazyTensor, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor's whole data at byte `offset` of an output file, in `dtype`."""

    tensor: LazyTensor
    dtype: DType
    offset: int


class Part(NamedTuple):
    """Elements [start, stop) of a segment, and their bytes before and after the cast."""

    segment: Segment
    start: int
    stop: int
    source_bytes: int
    output_bytes: int


def windows(segments: Iterable[Segment], size: int) -> Iterator[list[Part]]:
    """Cuts segments, given in file order, into windows of at most `size` bytes, on disk and in the output.

    A window never spans a gap between segments.
    """
    window: list[Part] = []
    room, end = size, -1
    for segment in segments:
        stored, output = segment.tensor.dtype.itemsize, segment.dtype.itemsize
        widest, numel = max(stored, output), segment.tensor.numel
        if window and (segment.offset != end or room < widest):
            yield window
            window, room = [], size
        start = 0
        while start < numel:
            stop = min(numel, start + max(1, room // widest))
            count = stop - start
            window.append(Part(segment, start, stop, count * stored, count * output))
            room -= count * widest
            start = stop
            if room < widest:
                yield window
                window, room = [], size
        end = segment.offset + numel * output
    if window:
        yield window


class Buffers:
    """One worker's memory: what is read, and what it becomes; allocated once, `size` bytes each."""

    def __init__(self, size: int, io: str = "pread", turn: Lock | None = None) -> None:
        self._io = io
        self._turn = turn or Lock()
        self._quick = False  # how the last window was read
        self._raw = np.empty(size + 64, np.uint8)
        self._out: np.ndarray | None = None
        self._size = size

    def fill(self, parts: Sequence[Part], *, release: bool, observe: Observe | None = None) -> memoryview:
        """Reads and casts a window; the bytes of the output, valid until the next call."""
        plain = all(part.segment.dtype == part.segment.tensor.dtype for part in parts)
        raws = self._read(parts, release=release, packed=plain)
        if observe is not None:
            for part, raw in zip(parts, raws, strict=True):
                observe(part.segment.tensor, raw.view(part.segment.tensor.dtype.numpy))
        total = sum(part.output_bytes for part in parts)
        if plain:
            return self._raw[:total].data
        if self._out is None:
            self._out = np.empty(self._size, np.uint8)
        at = 0
        for part, raw in zip(parts, raws, strict=True):
            target = self._out[at : at + part.output_bytes]
            if part.segment.dtype == part.segment.tensor.dtype:
                target[...] = raw
            else:
                _cast_bytes(raw.view(part.segment.tensor.dtype.numpy), target, part.segment.dtype)
            at += part.output_bytes
        return self._out[:total].data

    def _read(self, parts: Sequence[Part], *, release: bool, packed: bool) -> list[np.ndarray]:
        """Each part's bytes as stored: one after the other, or aligned for the cast."""
        places: list[np.ndarray] = []
        at = 0
        for part in parts:
            if not packed:
                at += -at % part.segment.tensor.dtype.itemsize
            if at + part.source_bytes > len(self._raw):  # many tiny tensors of mixed dtypes: the gaps add up
                self._raw = np.concatenate([self._raw, np.empty(at, np.uint8)])
                return self._read(parts, release=release, packed=packed)
            places.append(self._raw[at : at + part.source_bytes])
            at += part.source_bytes
        pairs = zip(parts, places, strict=True)
        found = (want for part, place in pairs for want in wants(part.segment.tensor, part.start, part.stop, place))
        # Over many small reads from the page cache two workers would fight for the interpreter, and both be slower; reads
        # that wait for a disk or a network should wait together.
        with self._turn if self._quick else nullcontext():
            began = perf_counter()
            reads = read_all(found, io=self._io, release=release)
            self._quick = perf_counter() - began < reads * _QUICK
        return places


def _cast_bytes(source: np.ndarray, target: np.ndarray, dtype: DType) -> None:
    """Casts into bytes that may stand at any address."""
    if target.ctypes.data % dtype.itemsize == 0:
        cast(source, target.view(dtype.numpy))
    else:
        aligned = np.empty(source.shape, dtype.numpy)
        cast(source, aligned)
        target[...] = aligned.view(np.uint8)


def pump(
    segments: Iterable[Segment],
    sink: Sink,
    *,
    window: int,
    workers: int = 1,
    io: str = "pread",
    release: bool = True,
    observe: Observe | None = None,
    wrote: Callable[[int], None] = lambda count: None,
) -> None:
    """Streams `segments` into `sink`; `wrote` is told the bytes of each window, from whichever worker wrote it.

    `window` is in bytes; each of `workers` threads holds at most two of them. The first error of any worker is raised
    once all have ended, what a signal raises without waiting long for them.
    """
    queue, turn = Queue(_with_next(windows(segments, window))), Lock()

    def work() -> None:
        buffers = Buffers(window, io, turn)
        announcing = True
        for parts, ahead in queue:
            if announcing and 0 < len(ahead) <= _MOST_ANNOUNCED:
                announcing = announce(place for part in ahead for place in ranges(part))
            data = buffers.fill(parts, release=release, observe=observe)
            sink.write(parts[0].segment.offset + parts[0].start * parts[0].segment.dtype.itemsize, data)
            wrote(len(data))

    share(work, 1 if sink.sequential else workers, queue.stop)


def _with_next(items: Iterator[list[Part]]) -> Iterator[tuple[list[Part], list[Part]]]:
    """Each window with the one after it, which the kernel can fetch meanwhile."""
    taken = next(items, None)
    while taken is not None:
        ahead = next(items, None)
        yield taken, ahead or []
        taken = ahead


def ranges(part: Part) -> Iterator[tuple[Storage, int, int]]:
    """The byte ranges (storage, start, bytes) a part will be read from, all but strided ones."""
    size = part.segment.tensor.dtype.itemsize
    for piece in part.segment.tensor.pieces(part.start, part.stop):
        if piece.shape is None:
            yield piece.storage, piece.start, piece.numel * size
