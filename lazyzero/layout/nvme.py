"""ZeRO-3 whose optimizer is offloaded to NVMe (0.13.0 on): the flats of most sub-groups lie in swap files.

offloaded_tensors/rank<NN>/<first>_<last>.tensor.swp            a sub-group's masters, raw, from byte 0 on; the length is
                                                                rounded up to the alignment of asynchronous I/O
offloaded_tensors/rank<NN>/exp_avg-<first>_<last>.tensor.swp    its moments

`first` and `last` are the numbers DeepSpeed gave to the first and the last parameter of the sub-group; the checkpoint
does not say which number is whose. Numbers are given in the module's order, or, where modules are partitioned as they
are constructed (`zero.Init`), with every module's own parameters after those of its children. In the pickle the flats of
such sub-groups are empty; those below 1 MiB stay there. Ranks are global, or local with `use_node_local_storage`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lazyzero.container.archive import Archive
from lazyzero.container.objects import Storage, TensorRef
from lazyzero.container.source import Source
from lazyzero.dtypes import DType
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, ReadError, UnsupportedLayout
from lazyzero.layout import moments, zero3
from lazyzero.layout.contents import Contents
from lazyzero.layout.discover import FileSet
from lazyzero.layout.found import Found
from lazyzero.layout.states import ModelStates, OptimStates, Shapes, as_int, older
from lazyzero.layout.support import Support

MOMENTS = True
_SWAP_FILE = re.compile(r"([0-9]+)_([0-9]+)\.tensor\.swp")
_ALIGNMENT = 1024  # bytes, times `aio.intra_op_parallelism`
_MOST_SWAPPED = 4096  # sub-groups
_DEEPEST = 64  # modules inside modules

Id = tuple[int, int]  # of the first and the last parameter of a sub-group


@dataclass(frozen=True, slots=True)
class _Swapped:
    """A sub-group whose flat is in swap files: its place, its parameters, its share of bytes on every rank."""

    index: int
    names: tuple[str, ...]
    numel: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


SUPPORT = (
    Support(
        "optimizer offloaded to NVMe",
        "0.13.0 to 0.19.8",
        "swap files, matched to sub-groups by size and number; ambiguous ones are refused",
        "a real file of 0.19.8, and made ones",
    ),
)


def matches(found: Found) -> bool:
    """Whether ZeRO-3's optimizer files come with swap files, or with flats so empty that they should."""
    if not zero3.matches(found):
        return False
    first = found.optimizer.ranks[0]
    emptied = not older(first.version, (0, 13, 0)) and any(not flat.numel for flat in first.flats(zero3.FLATS))
    return found.files.offloaded or emptied


def read(found: Found) -> Contents:
    """The contents of such a checkpoint; swap files are looked at, not read.

    Raises MissingFiles for a rank without its directory, InconsistentCheckpoint where files do not fit the sub-groups.
    """
    model, groups = zero3.sub_groups(found)
    ranks = found.optimizer.ranks
    swapped = _swapped(ranks, groups)
    folders = _folders(found.files, len(ranks)) if swapped else {}
    listings = [_listing(folders[rank]) for rank in range(len(ranks))] if swapped else []
    ids = _match(found, model, swapped, listings)
    flats: list[list[TensorRef]] = []
    files: list[Archive] = []
    for rank, states in enumerate(ranks):
        own = list(states.flats(zero3.FLATS) if found.state is None else moments.zero3_flats(states, found.state))
        for group in swapped:
            ref = _swap_file(folders[rank], ids[group.index], group, found.state)
            own[group.index] = ref
            files.append(Archive(ref.storage.source, None, ()))
        flats.append(own)
    contents = zero3.deliver(found, model, groups, flats, tuple(files))
    return replace(contents, layout="ZeRO-3, optimizer on NVMe") if swapped else contents


def _swapped(ranks: tuple[OptimStates, ...], groups: list[Shapes]) -> list[_Swapped]:
    """The sub-groups with elements whose flat is empty in the pickle, the same ones on every rank."""
    every = [rank.flats(zero3.FLATS) for rank in ranks]
    for rank, flats in zip(ranks, every, strict=True):
        if len(flats) != len(groups):
            raise InconsistentCheckpoint(f"{rank.path}: expected {len(groups)} sub-groups, found {len(flats)}")
    dtypes = [flat.dtype for flat in every[0] if flat.numel] + [flat.dtype for flat in every[0]]
    found = []
    for index, group in enumerate(groups):
        numel = sum(-(-math.prod(shape) // len(ranks)) for shape in group.values())
        empty = [rank.path for rank, flats in zip(ranks, every, strict=True) if not flats[index].numel]
        if numel and empty:
            if len(empty) != len(ranks):
                raise InconsistentCheckpoint(f"{empty[0]}: sub-group {index} was swapped out here, on other ranks not")
            found.append(_Swapped(index, tuple(group), numel, dtypes[0]))
    if len(found) > _MOST_SWAPPED:
        raise UnsupportedLayout(
            f"{ranks[0].path}: {len(found)} sub-groups were swapped out, more than can be told apart; "
            "load the checkpoint with DeepSpeed and save it without NVMe offload"
        )
    return found


def _folders(files: FileSet, world: int) -> dict[int, str]:
    """Every rank's directory of swap files. Raises MissingFiles naming the ranks."""
    folders: dict[int, str] = {}
    for directory in (files.directory, *files.also):
        here = {
            dp
            for ranks in files.optim.values()
            for (dp, _), path in ranks.items()
            if os.path.dirname(path) == directory
        }
        folders.update(_by_rank(os.path.join(directory, "offloaded_tensors"), sorted(here)))
    missing = [rank for rank in range(world) if rank not in folders]
    if missing:
        raise MissingFiles(
            f"{files.directory}: the optimizer was offloaded to NVMe and offloaded_tensors/rank{missing[0]:02d} is not here "
            f"({len(missing)} of {world} ranks); copy it from the node that wrote it, or name its directory with --also"
        )
    return folders


def _by_rank(parent: str, ranks: list[int]) -> dict[int, str]:
    """The directories under `parent` by global rank; a node's own storage counts its ranks from 0."""
    if not os.path.isdir(parent):
        return {}
    names = {int(match[1]): match[0] for name in _names(parent) if (match := re.fullmatch(r"rank([0-9]+)", name))}
    if not set(ranks) <= set(names) and sorted(names) == list(range(len(ranks))):
        return {rank: os.path.join(parent, names[local]) for local, rank in enumerate(ranks)}
    return {rank: os.path.join(parent, name) for rank, name in names.items()}


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ReadError(f"{folder}: cannot be listed: {error.strerror}") from None


def _listing(folder: str) -> dict[Id, int]:
    """The swap files of masters in a rank's directory: numbers -> size in bytes."""
    found: dict[Id, int] = {}
    for name in _names(folder):
        if match := _SWAP_FILE.fullmatch(name):
            found[int(match[1]), int(match[2])] = Source.open(os.path.join(folder, name)).size
    return found


def _match(found: Found, model: ModelStates, swapped: list[_Swapped], listings: list[dict[Id, int]]) -> dict[int, Id]:
    """Which numbers are which sub-group's: by size where that decides, else by the order in which numbers are given."""
    if not swapped:
        return {}
    where = found.files.directory
    ids = sorted(listings[0])
    for rank, listing in enumerate(listings):
        if sorted(listing) != ids or len(ids) != len(swapped):
            raise InconsistentCheckpoint(
                f"{where}: expected {len(swapped)} swap files of masters, the same for each rank; rank {rank} has "
                f"{len(listing)} in offloaded_tensors; copy them again from the node that wrote them"
            )
    alignment = _alignment(model)
    fits = {group.index: {i for i in ids if _fits(group, i, listings, alignment)} for group in swapped}
    certain = _certain(fits)
    rest = [group for group in swapped if group.index not in certain]
    free = [identity for identity in ids if identity not in certain.values()]
    answers: list[dict[int, Id]] = []
    for keys in (_module_order(model), _construction_order(model)):
        answer = _in_order(rest, free, keys)
        if answer is not None and answer not in answers and all(answer[index] in fits[index] for index in answer):
            answers.append(answer)
    if len(answers) != 1:
        raise UnsupportedLayout(
            f"{where}: {len(answers) or 'no'} ways to assign {len(ids)} swap files to sub-groups fit by size and order; "
            "load the checkpoint with DeepSpeed and save it without NVMe offload"
        )
    return certain | answers[0]


def _certain(fits: dict[int, set[Id]]) -> dict[int, Id]:
    """What sizes decide: a sub-group with one file that fits has it, and no other can."""
    certain: dict[int, Id] = {}
    left = {index: set(choice) for index, choice in fits.items()}
    wanted: dict[Id, set[int]] = {}
    for index, choice in fits.items():
        for identity in choice:
            wanted.setdefault(identity, set()).add(index)
    single = [index for index, choice in left.items() if len(choice) == 1]
    while single:
        index = single.pop()
        if index in certain or not left[index]:
            continue
        certain[index] = identity = next(iter(left[index]))
        for other in wanted[identity] - {index}:
            left[other].discard(identity)
            if len(left[other]) == 1:
                single.append(other)
    return certain


def _fits(group: _Swapped, identity: Id, listings: list[dict[Id, int]], alignment: int) -> bool:
    single = identity[0] == identity[1]
    return single == (len(group.names) == 1) and all(
        0 <= listing[identity] - group.nbytes < alignment for listing in listings
    )


def _alignment(model: ModelStates) -> int:
    """What file lengths are rounded up to, in bytes; generous where the configuration is not recorded."""
    config: Any = model.root.get("ds_config")
    if not isinstance(config, Mapping):
        return _ALIGNMENT * 64
    aio = config.get("aio")
    threads = as_int(aio.get("intra_op_parallelism")) if isinstance(aio, Mapping) else 1
    return _ALIGNMENT * max(threads or 1, 1)


Keys = dict[str, tuple[tuple[int, int], ...]]


def _module_order(model: ModelStates) -> Keys:
    return {name: ((0, index),) for index, name in enumerate(model.module)}


def _construction_order(model: ModelStates) -> Keys:
    """Every module's own parameters after those of its children."""
    seen: dict[tuple[int, str], int] = {}  # (the parent's number, name in it) -> number
    keys: Keys = {}
    for name in model.module:
        parts = name.split(".", _DEEPEST)
        at, numbers = -1, []
        for part in parts:
            at = seen.setdefault((at, part), len(seen))
            numbers.append(at)
        keys[name] = tuple((int(depth == len(parts)), number) for depth, number in enumerate(numbers, 1))
    return keys


def _in_order(swapped: list[_Swapped], ids: list[Id], keys: Keys) -> dict[int, Id] | None:
    """The assignment under which numbers rise as keys do, for the first and last parameters of all sub-groups."""
    if not all(group.names[0] in keys and group.names[-1] in keys for group in swapped):
        return None
    ordered = sorted(swapped, key=lambda group: keys[group.names[0]])
    answer = {group.index: identity for group, identity in zip(ordered, ids, strict=True)}
    ends = sorted((keys[group.names[end]], answer[group.index][end]) for group in ordered for end in (0, -1))
    rising = all((a[0] < b[0]) == (a[1] < b[1]) and a[1] <= b[1] for a, b in pairwise(ends))
    return answer if rising else None


def _swap_file(folder: str, identity: Id, group: _Swapped, state: str | None) -> TensorRef:
    """A sub-group's flat in its swap file. Raises MissingFiles, InconsistentCheckpoint."""
    prefix = f"{state}-" if state else ""
    path = os.path.join(folder, f"{prefix}{identity[0]}_{identity[1]}.tensor.swp")
    if not os.path.exists(path):
        raise MissingFiles(f"{path}: not found; copy it from the node that wrote it")
    source = Source.open(path)
    if source.size < group.nbytes:
        raise InconsistentCheckpoint(
            f"{path}: expected {group.nbytes} bytes for sub-group {group.index}, found {source.size}; copy it again"
        )
    storage = Storage(source, os.path.basename(path), group.dtype, group.nbytes)
    storage.place(0)
    return TensorRef(storage, 0, (group.numel,), (1,), group.dtype)
