"""Contents of several tensor-parallel ranks as one: every tensor's shards joined as a decision about its name says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lazyzero.cast import same
from lazyzero.errors import InconsistentCheckpoint
from lazyzero.gather import read as read_elements
from lazyzero.layout.concat import Slab, joined
from lazyzero.layout.contents import Check, Contents
from lazyzero.layout.tp_plan import Plan
from lazyzero.tensor import LazyTensor, Mean

Shards = Sequence[LazyTensor | None]  # by rank
Decide = Callable[[str, Shards], Plan | None]

_SAMPLE = 1024  # elements at either end by which copies are compared
_COMPARED = 64  # parameters whose copies are compared


def merge(ranks: Sequence[Contents], decide: Decide) -> Contents:
    """One Contents out of one for each tensor-parallel rank, in the order of the first.

    `decide` says how the shards of a name are put together; without an answer the name is left out. Reads samples of what all ranks should have alike.
    Raises InconsistentCheckpoint, and what `decide` raises.
    """
    first = ranks[0]
    stored = [{check.rebuilt.name: check.stored for check in rank.checks} for rank in ranks]
    merged = Merged(first.archives[0].path, {}, [], [], [])
    for name in _names(ranks):
        shards = [rank.entries.get(name) for rank in ranks]
        plan = decide(name, shards)
        if plan is not None:
            merged.add(name, plan, shards, [copies.get(name) for copies in stored])
    entries = merged.entries
    for alias, tensor in first.entries.items():
        owner = entries.get(tensor.tied_to or "")
        if owner is not None:
            entries[alias] = LazyTensor(alias, owner.shape, owner.data, owner.role, owner.name)
    missing = {name: why for rank in ranks for name, why in rank.missing.items() if name not in entries}
    return replace(
        first,
        layout=f"{first.layout}, {len(ranks)} tensor-parallel ranks",
        world_size=first.world_size * len(ranks),
        entries=entries,
        missing=missing,
        warnings=(*dict.fromkeys(text for rank in ranks for text in rank.warnings), *merged.told()),
        checks=tuple(merged.checks),
        archives=tuple(archive for rank in ranks for archive in rank.archives),
    )


@dataclass(slots=True)
class Merged:
    """What has been put together so far; `copies` are the pairs of what should be the same on two ranks."""

    path: str
    entries: dict[str, LazyTensor]
    checks: list[Check]
    copies: list[tuple[LazyTensor, LazyTensor]]
    rounded: list[str]

    def add(self, name: str, plan: Plan, shards: Shards, stored: Shards) -> None:
        """Joins one parameter, and the copies of it that training kept."""
        used = [shards[cut.rank] for cut in plan.cuts]
        if len({shard.dtype for shard in used if shard is not None}) > 1:
            # At stage 0 a master is known by its values, which can succeed on one rank and not on the other.
            shards = [kept if kept is not None else shard for kept, shard in zip(stored, shards, strict=True)]
            stored = [None] * len(shards)
            self.rounded.append(name)
        tensor = self.entries[name] = self._joined(name, plan, shards)
        whole = len(plan.cuts) == 1 and not plan.averaged
        if whole:
            one = shards[plan.cuts[0].rank]
            self.copies += [
                (one, other)
                for other in shards
                if one is not None and other is not None and other is not one and other.shape == one.shape
            ]
        if not plan.averaged and all(stored[cut.rank] is not None for cut in plan.cuts):
            self.checks.append(Check(tensor, self._joined(name, plan, stored)))

    def _joined(self, name: str, plan: Plan, shards: Shards) -> LazyTensor:
        slabs: list[Slab] = []
        role = ""
        for cut in plan.cuts:
            shard = shards[cut.rank]
            if shard is None or (slabs and shard.dtype != slabs[0].data.dtype):
                found = "nothing" if shard is None else f"{shard.dtype}, on another rank {slabs[0].data.dtype}"
                raise InconsistentCheckpoint(
                    f"{self.path}: {name!r}: expected a shard on tensor-parallel rank {cut.rank}, found {found}"
                )
            slabs.append(
                Slab(shard.data, shard.shape[plan.dim] // plan.blocks if shard.shape else 1, cut.start, cut.size)
            )
            role = role or shard.role
        if plan.averaged:
            return LazyTensor(name, plan.shape, Mean(tuple(slab.data for slab in slabs)), role)
        return joined(name, slabs, plan.shape, plan.dim, role)

    def told(self) -> list[str]:
        """What a user should know of it."""
        warnings = []
        chosen = self.copies[:: max(1, len(self.copies) // _COMPARED)]
        differing = [one.name for one, other in chosen if not _alike(one, other)]
        if differing:
            warnings.append(
                f"{len(differing)} of {len(chosen)} sampled parameters that all tensor-parallel ranks should have alike differ "
                f"between them ({differing[0]!r} first); the first rank's values are taken"
            )
        if self.rounded:
            warnings.append(
                f"{len(self.rounded)} tensors ({self.rounded[0]!r} first) have fp32 masters on some tensor-parallel ranks only; "
                "their values are the 16-bit ones"
            )
        return warnings


def alike(shards: Shards) -> bool:
    """Whether all ranks have the tensor, in one shape, and samples of the values agree."""
    first = shards[0]
    return first is not None and all(shard is not None and _alike(first, shard) for shard in shards[1:])


def _names(ranks: Sequence[Contents]) -> list[str]:
    names = {name: None for rank in ranks for name, tensor in rank.entries.items() if tensor.tied_to is None}
    aliases = {name for name, tensor in ranks[0].entries.items() if tensor.tied_to is not None}
    return [name for name in names if name not in aliases]


def _alike(one: LazyTensor, other: LazyTensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    spans = {(0, min(_SAMPLE, one.numel)), (max(0, one.numel - _SAMPLE), one.numel)}
    return all(same(read_elements(one, *span), read_elements(other, *span)) for span in spans)
