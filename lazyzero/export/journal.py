"""The small file in an output directory that ties its finished shards to the plan and the sources they came from.

<output>/.lazyzero.json    written anew, whole, after each shard; kept when finished, so that the same command then
                           knows there is nothing to do
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lazyzero.container.archive import Archive
from lazyzero.errors import OutputRefused
from lazyzero.export.plan import Plan
from lazyzero.export.sink import write_small

NAME = ".lazyzero.json"
_VERSION = 1
_LARGEST = 64 << 20  # bytes
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Done:
    """A finished file: its size in bytes, its SHA-256 where that was asked for, and whether a consumer has had it."""

    nbytes: int
    sha256: str = ""
    handed: bool = False


@dataclass(frozen=True, slots=True)
class Journal:
    """`identity` is what the shards depend on; `done` maps finished files to what is known of them."""

    identity: dict[str, Any]
    done: dict[str, Done] = field(default_factory=dict)

    def with_done(self, filename: str, done: Done) -> Journal:
        """The journal with one more finished file."""
        return replace(self, done={**self.done, filename: done})

    def save(self, directory: Path) -> None:
        """Writes it whole and durable. Raises WriteError."""
        done = {name: [one.nbytes, one.sha256, one.handed] for name, one in self.done.items()}
        record = {"version": _VERSION, "identity": self.identity, "done": done}
        write_small(directory / NAME, json.dumps(record, indent=1).encode())


def identity_of(plan: Plan, settings: dict[str, object], archives: Iterable[Archive]) -> dict[str, Any]:
    """What a finished shard depends on: the settings, the plan, and every source's size, time and pickles.

    Sources are named from their common directory on: a universal checkpoint has hundreds of `fp32.pt`.
    """
    unique = {os.path.abspath(archive.path): archive for archive in archives}
    top = os.path.commonpath([os.path.dirname(path) for path in unique]) if unique else ""
    planned = hashlib.sha256(_described(plan).encode()).hexdigest()
    return {
        "settings": settings,
        "plan": planned,
        "sources": {os.path.relpath(path, top): _source(archive) for path, archive in sorted(unique.items())},
    }


def _described(plan: Plan) -> str:
    """The plan as text; a repr of ten thousand placeholders takes as long as converting them."""
    lines = [f"{plan.format} {plan.index} {plan.total_size}"]
    for shard in plan.shards:
        lines.append(f"{shard.filename} {shard.nbytes} {shard.dropped}")
        lines += [f"{name} {entry.shape} {entry.dtype.name} {entry.tied_to}" for name, entry in shard.entries]
    return "\n".join(lines)


def _source(archive: Archive) -> list[Any]:
    digest = hashlib.sha256()
    for offset, length in archive.pickles:
        for at in range(offset, offset + length, _BLOCK):
            digest.update(archive.source.read(at, min(_BLOCK, offset + length - at)))
    return [archive.source.size, archive.source.mtime_ns, digest.hexdigest()]


def load(directory: Path) -> Journal | None:
    """The journal in `directory`, None where there is none. Raises OutputRefused for one that cannot be read."""
    path = directory / NAME
    try:
        # O_NONBLOCK: a FIFO of that name must not hang us.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                raise ValueError(f"expected a file of at most {_LARGEST} bytes")
            return _parse(json.loads(file.read(_LARGEST)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise OutputRefused(
            f"{path}: is not a journal of this version ({type(error).__name__}: {error}); "
            "choose another place, or start anew with --overwrite"
        ) from None


def _parse(record: Any) -> Journal:
    if record["version"] != _VERSION:
        raise ValueError(f"version {record['version']!r:.40}, expected {_VERSION}")
    identity = {"settings": dict(record["identity"]["settings"]), "plan": str(record["identity"]["plan"])}
    sources = dict(record["identity"]["sources"])
    identity["sources"] = {name: [size, mtime, digest] for name, (size, mtime, digest) in sources.items()}
    done = {
        name: Done(int(nbytes), str(sha256), bool(handed))
        for name, (nbytes, sha256, handed) in dict(record["done"]).items()
    }
    return Journal(identity, done)


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two identities, in words."""
    found = []
    before, after = then["settings"], now["settings"]
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            found.append(f"{key} was {before.get(key)}, now {after.get(key)}")
    old, new = then["sources"], now["sources"]
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            found.append(f"source {name} is {'new' if name in new else 'gone'}")
        elif old[name] != new[name]:
            found.append(f"source {name} {_how(old[name], new[name])}")
    if not found and then["plan"] != now["plan"]:
        found.append("other tensors, or the same in other shards")
    return found


def _how(old: list[Any], new: list[Any]) -> str:
    if old[0] != new[0]:
        return f"had {old[0]} bytes, now {new[0]}"
    return "has other metadata" if old[2] != new[2] else "was written anew"
