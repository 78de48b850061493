"""Classes that a DeepSpeed checkpoint's pickle refers to and that nobody who reads it has.

While `importable()` lasts they can be found under the names DeepSpeed and a user's training script give them, so that
torch can pickle them; afterwards their modules do not exist.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any


class ZeroStageEnum(IntEnum):
    """DeepSpeed's, from 0.7.0 on."""

    __module__ = "deepspeed.runtime.zero.config"
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    """An object with a plain __dict__."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


class fragment_address:  # noqa: N801 - its name in the files
    """Where a parameter lies in a rank's flat, as DeepSpeed notes it."""

    __module__ = "deepspeed.utils.tensor_fragment"

    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


class Callback:
    """A user's class with slots, a __setstate__ that must never run, and a cycle."""

    __module__ = "my_project.train"

    def __init__(self, payload: Any) -> None:
        self.payload = payload
        self.me = self

    def __getstate__(self) -> dict[str, Any]:
        return {"payload": self.payload, "me": self.me}

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a pickle was executed")


class Reduced:
    """A user's class that rebuilds itself by a call."""

    __module__ = "my_project.train"

    def __reduce__(self) -> tuple[Any, ...]:
        return boom, ("nothing may call this",)


def boom(why: str) -> None:
    """Must stay a name."""
    raise AssertionError(why)


boom.__module__ = "my_project.train"

_CLASSES = (ZeroStageEnum, LossScaler, fragment_address, Callback, Reduced, boom)


@contextmanager
def importable() -> Iterator[None]:
    """Makes the classes above importable under their names for pickling."""
    made: dict[str, types.ModuleType] = {}
    for thing in _CLASSES:
        parts = thing.__module__.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            made.setdefault(name, types.ModuleType(name))
        setattr(made[thing.__module__], thing.__name__, thing)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
