"""How much memory the window may take: the rest of a promise about the whole process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from lazyzero.errors import InvalidRequest
from lazyzero.export.units import show_size
from lazyzero.memory import status

DEFAULT: Final = 64 << 20  # bytes, for the whole process
LEAST_WINDOW: Final = 256 << 10
MOST_WINDOW: Final = 4 << 20
_BUFFERS: Final = 2  # a worker holds what it read and what it became
_SLACK: Final = 5 << 20  # thread stacks, the allocator's reserves, objects made on the way


@dataclass(frozen=True, slots=True)
class Budget:
    """`window` in bytes, for each of `workers`."""

    window: int
    workers: int

    def peak(self, nbytes: int, *, cast: bool) -> int:
        """What writing `nbytes` will have taken at its highest, about, in bytes, given what the process holds now."""
        used = min(self.workers * self.window, nbytes)  # a window that is never filled takes no memory
        return _held() + used * (_BUFFERS if cast else 1) + _SLACK // 2


def allot(max_memory: int | None, workers: int | None, *, torch: bool, resident: int | None = None) -> Budget:
    """Windows and workers that keep the process within `max_memory` bytes.

    None stands for the default, 64 MiB or what torch takes and 64 MiB on top, and is kept where it can be. `resident`
    is what the process holds now. Raises InvalidRequest when an amount that was asked for cannot do, with the least
    that would.
    """
    held = _held() if resident is None else resident
    count = workers or min(2, os.cpu_count() or 1)
    room = (max_memory or DEFAULT + (held if torch else 0)) - held - _SLACK
    if workers is None and room < count * _BUFFERS * LEAST_WINDOW:
        count = 1
    window = room // (count * _BUFFERS)
    if window < LEAST_WINDOW and max_memory is not None:
        least = held + _SLACK + (workers or 1) * _BUFFERS * LEAST_WINDOW
        raise InvalidRequest(
            f"--max-memory {show_size(max_memory)} cannot work: the process holds {show_size(held)} already; "
            f"the least that would do here is {-(-least // 1_000_000)}MB"
        )
    window = min(max(window, LEAST_WINDOW), MOST_WINDOW)
    return Budget(window - window % 4096, count)


def _held() -> int:
    return status().get("VmRSS", 40 << 20)
