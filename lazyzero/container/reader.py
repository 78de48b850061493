"""Reads many small byte ranges with few calls: what is adjacent in a file is read at once, into its several places."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from lazyzero.container.objects import Storage
from lazyzero.container.source import POOL, Source


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes [start, start + len(into)) of a storage are wanted in `into`."""

    storage: Storage
    start: int
    into: memoryview


def read_all(wants: Iterable[Want], *, release: bool = False) -> int:
    """Fills every want; with `release` the pages read leave the page cache. Returns the number of bytes read.

    A ZeRO-3 window of a few MB touches every rank, a few KB each, and consecutive parameters are neighbours on each
    rank: sorted by place, most of the reads of a window become one per file.
    """
    by_source: dict[Source, list[tuple[int, memoryview]]] = {}
    total = 0
    for want in wants:
        if len(want.into):
            by_source.setdefault(want.storage.source, []).append((want.storage.offset + want.start, want.into))
            total += len(want.into)
    for source, places in by_source.items():
        places.sort(key=lambda place: place[0])
        for offset, views in _runs(places):
            source.read_into(views, offset)
            if release:
                forget(source, offset, sum(map(len, views)))
    return total


def _runs(places: list[tuple[int, memoryview]]) -> Iterable[tuple[int, list[memoryview]]]:
    start, end, views = places[0][0], places[0][0], list[memoryview]()
    for offset, view in places:
        if offset != end:
            yield start, views
            start, views = offset, []
        views.append(view)
        end = offset + len(view)
    yield start, views


def forget(source: Source, offset: int, nbytes: int) -> None:
    """Lets the pages of a byte range leave the page cache; a hint, so refusals do not matter."""
    with POOL.lease(source) as fd:
        try:
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError:
            return
