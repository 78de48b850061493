"""Reads many small byte ranges with few calls: what is adjacent in a file is read at once, into its several places.

Two ways give the same bytes. `pread` copies explicitly: a page fault costs a round trip on network file systems. `mmap`
has the kernel copy out of a short mapping, for hosts where that is faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Final, NamedTuple, TypeVar

from lazyzero.container.mapped import copy_out
from lazyzero.container.objects import Storage
from lazyzero.container.source import POOL, Source, advise

T = TypeVar("T")

_MOST_ANNOUNCED: Final = 64  # files; a call for each of more costs more than it gains


class Want(NamedTuple):
    """Bytes [start, start + nbytes) of a storage are wanted in `into`, which has as many. A tuple, as millions are made."""

    storage: Storage
    start: int
    nbytes: int
    into: memoryview


def read_all(wants: Iterable[Want], *, io: str = "pread", release: bool = False) -> int:
    """Fills every want; with `release` the pages read leave the page cache. Returns the number of reads it took.

    A ZeRO-3 window of a few MB touches every rank, a few KB each, and consecutive parameters are neighbours on each
    rank: sorted by place, most of the reads of a window become one per file.
    """
    copy, reads = READERS[io], 0
    for source, places in _by_source(wants).items():
        for offset, _, views in _runs(places):
            copy(source, offset, views, release)
            reads += 1
    return reads


def announce(ranges: Iterable[tuple[Storage, int, int]]) -> bool:
    """Has the kernel fetch byte ranges (storage, start, bytes) that will be read soon; False if it is not worth it."""
    found = _by_source((storage, start, nbytes, None) for storage, start, nbytes in ranges)
    if len(found) > _MOST_ANNOUNCED:
        return False
    for source, places in found.items():
        with POOL.lease(source) as fd:
            for offset, nbytes, _ in _runs(places):
                advise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
    return True


def _by_source(ranges: Iterable[tuple[Storage, int, int, T]]) -> dict[Source, list[tuple[int, int, T]]]:
    """(file offset, bytes, item) of every range that is not empty, in file order, by file."""
    found: dict[Source, list[tuple[int, int, T]]] = {}
    for storage, start, nbytes, item in ranges:
        if nbytes:
            found.setdefault(storage.source, []).append((storage.offset + start, nbytes, item))
    for places in found.values():
        places.sort(key=itemgetter(0))
    return found


def _runs(places: list[tuple[int, int, T]]) -> Iterator[tuple[int, int, list[T]]]:
    """Adjacent ranges joined: (offset, bytes, items in order)."""
    start, end, items = places[0][0], places[0][0], list[T]()
    for offset, nbytes, item in places:
        if offset != end:
            yield start, end - start, items
            start, items = offset, []
        items.append(item)
        end = offset + nbytes
    yield start, end - start, items


def _pread(source: Source, offset: int, views: list[memoryview], release: bool) -> None:
    source.read_into(views, offset, release=release)


def _mmap(source: Source, offset: int, views: list[memoryview], release: bool) -> None:
    if not copy_out(source, offset, views):
        _pread(source, offset, views, release)
    elif release:
        lease = POOL.lease(source)
        with lease:
            lease.forget(offset, offset + sum(map(len, views)))


READERS: Final[dict[str, Callable[[Source, int, list[memoryview], bool], None]]] = {"pread": _pread, "mmap": _mmap}
