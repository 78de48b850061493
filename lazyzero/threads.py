"""Shares work among threads in such a way that a signal, or the first error, ends all of it soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_GRACE = 0.3  # seconds that workers get to finish what they are at after a signal


class Queue(Generic[T]):
    """Hands items out in order, to any thread, until the end or until it is told to stop."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        """Ends it for everyone. Waits for nobody: whoever makes the items may be slow."""
        self._stopped = True


def share(work: Callable[[], None], count: int, stop: Callable[[], None]) -> None:
    """Runs `work` in `count` threads and raises the first error of any once all have ended; `stop` must make them end.

    What a signal raises here goes on after a moment even if a worker still waits for a read that hangs. Hence the threads
    are daemons, and what they may touch afterwards has to bear it.
    """
    if count <= 1:
        work()
        return
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            stop()

    threads = [threading.Thread(target=guarded, name=f"lazyzero-{index}", daemon=True) for index in range(count)]
    try:
        started = _start(threads)
        if not started:
            guarded()
        for thread in started:
            thread.join()
    except BaseException:
        stop()
        _wait(threads)
        raise
    if errors:
        raise errors[0]


def _start(threads: list[threading.Thread]) -> list[threading.Thread]:
    """Starts as many as the system allows."""
    started: list[threading.Thread] = []
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:  # "can't start new thread": those that run do all the work
            break
        started.append(thread)
    return started


def _wait(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + _GRACE
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
