"""Which tensor goes into which file: decided from shapes and dtypes alone, without I/O, numpy or torch.

The split is huggingface_hub's greedy one, so shards have the names and borders that users of `save_pretrained` know: in
the given order, a tensor that does not fit opens the next shard, one larger than a shard gets a shard of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from lazyzero.dtypes import DType
from lazyzero.errors import InvalidRequest
from lazyzero.tensor import Placeholder

Format = Literal["safetensors", "bin"]
Tied = Literal["clone", "drop"]

STEMS: Final[dict[str, tuple[str, str]]] = {
    "safetensors": ("model", ".safetensors"),
    "bin": ("pytorch_model", ".bin"),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its entries in order, each name with the shape and dtype it will have there.

    `nbytes` counts stored tensor bytes. `dropped` maps aliases that are not written to their owner.
    """

    filename: str
    entries: tuple[tuple[str, Placeholder], ...]
    nbytes: int
    dropped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """All files of an export in the order they are written; `index` is None when there is one shard."""

    format: Format
    shards: tuple[Shard, ...]
    index: str | None
    total_size: int

    @property
    def weight_map(self) -> dict[str, str]:
        """name -> file."""
        return {name: shard.filename for shard in self.shards for name, _ in shard.entries}


def with_dtype(placeholder: Placeholder, dtype: DType | None) -> Placeholder:
    """The placeholder in the output dtype: floating types follow `dtype` (None keeps them), others stay."""
    if dtype is None or not placeholder.dtype.floating:
        return placeholder
    return Placeholder(placeholder.shape, dtype, placeholder.tied_to)


def make_plan(
    tensors: Mapping[str, Placeholder],
    *,
    format: Format = "safetensors",
    dtype: DType | None,
    max_shard_size: int | None,
    tied: Tied = "clone",
) -> Plan:
    """Plans the export of `tensors`, in their order; `max_shard_size` in bytes, None for one file.

    safetensors: a tied name is counted and written like any other (`clone`), or left to its owner (`drop`). bin: a
    tied group is one storage, counted once, and all its names stand in the owner's file. Raises InvalidRequest.
    """
    if format not in STEMS:
        raise InvalidRequest(f"format {format!r} is not one of {', '.join(STEMS)}")
    if tied not in ("clone", "drop"):
        raise InvalidRequest(f"tied {tied!r} is not one of clone, drop")
    if max_shard_size is not None and max_shard_size <= 0:
        raise InvalidRequest(f"a shard size of {max_shard_size} bytes must be above 0")
    entries = {name: with_dtype(placeholder, dtype) for name, placeholder in tensors.items()}
    followers = _followers(entries, once=format == "bin" or tied == "drop")
    following = {name for names in followers.values() for name in names}
    sizes = ((name, entry.nbytes) for name, entry in entries.items() if name not in following)
    groups = split(sizes, max_shard_size)
    drop = format != "bin" and tied == "drop"
    shards = tuple(
        _shard(shard_name(format, number, len(groups)), names, entries, followers, drop=drop)
        for number, names in enumerate(groups, start=1)
    )
    stem, suffix = STEMS[format]
    index = f"{stem}{suffix}.index.json" if len(shards) > 1 else None
    return Plan(format, shards, index, sum(shard.nbytes for shard in shards))


def _followers(entries: Mapping[str, Placeholder], *, once: bool) -> dict[str, list[str]]:
    """What goes into the file of another: tied names if they are stored `once`, and empty tensors with the first of them.

    huggingface_hub puts tensors of one storage into one file, and takes all empty ones to have the same.
    """
    followers: dict[str, list[str]] = {}
    empty: str | None = None
    for name, entry in entries.items():
        leader = empty if not entry.nbytes else entry.tied_to if once else None
        if leader in entries and leader is not None:
            followers.setdefault(leader, []).append(name)
        elif not entry.nbytes:
            empty = name
    return followers


def split(sizes: Iterable[tuple[str, int]], limit: int | None) -> list[list[str]]:
    """Groups names in order so that no group's bytes exceed `limit`, except for a tensor larger than it."""
    groups: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes:
        if limit is not None and size > limit:
            groups.append([name])
            continue
        if limit is not None and filled + size > limit:
            groups.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*groups, current] if current else groups


def shard_name(format: Format, number: int, count: int) -> str:
    """The file name of shard `number`, counted from 1."""
    stem, suffix = STEMS[format]
    return f"{stem}{suffix}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{suffix}"


def _shard(
    filename: str,
    names: list[str],
    entries: Mapping[str, Placeholder],
    followers: Mapping[str, list[str]],
    *,
    drop: bool,
) -> Shard:
    whole = [*names, *(follower for name in names for follower in followers.get(name, ()))]
    dropped = {name: entries[name].tied_to for name in whole if drop and entries[name].tied_to in entries}
    written = tuple((name, entries[name]) for name in whole if name not in dropped)
    nbytes = sum(entries[name].nbytes for name in names)
    return Shard(filename, written, nbytes, tuple((alias, str(owner)) for alias, owner in dropped.items()))
