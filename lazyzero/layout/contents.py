"""What every layout delivers, and the rules all of them share: ties, buffers, leftovers, missing names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lazyzero.container.archive import Archive
from lazyzero.container.objects import TensorRef
from lazyzero.layout.states import ModelStates
from lazyzero.tensor import LazyTensor, View

_NOT_PLAIN = "it is no plain tensor but sparse, quantized, or of an element type not read here"


@dataclass(frozen=True, slots=True)
class Check:
    """A rebuilt tensor and the copy that training kept of it: cast(rebuilt) must equal `stored` bit for bit."""

    rebuilt: LazyTensor
    stored: LazyTensor


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint understood: `entries` in DeepSpeed's order (buffers, frozen, trainable, others, aliases)."""

    layout: str
    stage: int
    world_size: int
    version: str | None
    entries: dict[str, LazyTensor]
    missing: dict[str, str] = field(default_factory=dict)  # name -> why no file holds its data
    warnings: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    archives: tuple[Archive, ...] = ()


def without_frozen(contents: Contents) -> Contents:
    """The contents less every parameter that was not trained, and less its aliases.

    Those are the frozen ones and, as stage 1 records nothing of them, all that only `module` holds; modules' extra state
    is no parameter and stays. Stage 0 does not say what was trained: nothing is left out there, but a warning given.
    """
    if contents.stage == 0:
        told = "stage 0 does not record which parameters were trained; the frozen ones are not left out"
        return replace(contents, warnings=(*contents.warnings, told))
    kept = {
        name: tensor
        for name, tensor in contents.entries.items()
        if tensor.role in ("trainable", "buffer") or name.endswith("_extra_state")
    }
    return replace(contents, entries=kept, missing={})


@dataclass(frozen=True, slots=True)
class Assembly:
    """Entries by name, and the names nothing was found for."""

    entries: dict[str, LazyTensor]
    missing: dict[str, str]


def assemble(
    model: ModelStates,
    trainable: dict[str, LazyTensor],
    frozen: dict[str, LazyTensor],
    *,
    partitioned: bool,
    why_missing: str,
) -> Assembly:
    """Joins the rebuilt parameters with what `module` holds.

    `partitioned` says that `module` has placeholders in place of parameters (ZeRO-3). Ties are the groups of names that
    are one storage in the pickle of `module`, which is exact at every version, joined with `shared_params`.
    """
    stored = {name: ref for name, ref in model.module.items() if not (partitioned and is_placeholder(model, name, ref))}
    buffers = [name for name in stored if model.buffers is not None and name in model.buffers]
    entries: dict[str, LazyTensor] = {}
    for name in buffers:
        if name not in trainable and name not in frozen:
            entries[name] = view(name, stored[name], "buffer")
    entries.update(frozen)
    entries.update(trainable)
    for name, ref in stored.items():
        if name not in entries:
            entries[name] = view(name, ref, "module")
    aliases = _tie(model, entries, frozenset(trainable) | frozenset(frozen), partitioned=partitioned)
    entries = _aliases_last(entries, aliases)
    known = [*model.module, *(name for shapes in model.param_shapes or () for name in shapes), *model.frozen_shapes]
    missing = {name: why_missing for name in known if name not in entries}
    missing.update({name: why_missing for name in model.shared if name not in entries})
    missing.update({name: _NOT_PLAIN for name in model.unread if name not in entries})
    return Assembly(entries, missing)


def _aliases_last(entries: dict[str, LazyTensor], aliases: dict[str, str]) -> dict[str, LazyTensor]:
    """The entries in DeepSpeed's order: aliases behind all others, except that a shared buffer stays among the buffers."""
    placed: dict[str, LazyTensor] = {}
    for name, tensor in entries.items():
        owner = aliases.get(name)
        if owner is None:
            placed[name] = tensor
        elif owner in placed and tensor.role == "buffer":
            placed[name] = replace(placed[owner], name=name, tied_to=owner)
    for name, owner in aliases.items():
        if name not in placed:
            placed[name] = replace(placed[owner], name=name, tied_to=owner)
    return placed


def view(name: str, ref: TensorRef, role: str) -> LazyTensor:
    """An entry that is one whole pickled tensor."""
    return LazyTensor(name, ref.shape, View(ref), role)


def is_placeholder(model: ModelStates, name: str, ref: TensorRef) -> bool:
    """Under ZeRO-3 a parameter is saved as Size([0]), before 0.6 as Size([1]), whatever its shape; buffers are whole."""
    if (model.buffers is not None and name in model.buffers) or name.endswith("_extra_state"):
        return False
    return ref.shape in ((0,), (1,))


def _tie(
    model: ModelStates, entries: dict[str, LazyTensor], rebuilt: frozenset[str], *, partitioned: bool
) -> dict[str, str]:
    """alias -> owner. An owner is the name under which the data was rebuilt, else the first one saved."""
    aliases: dict[str, str] = {}
    for names in _identical(model.module, partitioned=partitioned):
        owners = [name for name in names if name in rebuilt] or [name for name in names if name in entries]
        if owners:
            aliases.update({name: owners[0] for name in names if name != owners[0] and name not in rebuilt})
    for alias, owner in _ends_of_chains(model.shared).items():
        if alias in model.module and owner in model.module:
            continue  # the storages have decided, and they know better (zero-sized parameters collide here)
        if alias not in entries and alias not in aliases:
            owner = aliases.get(owner, owner)
            if owner in entries and owner != alias:
                aliases[alias] = owner
        elif owner not in entries and owner not in aliases and alias in entries:
            aliases[owner] = alias
    return aliases


def _identical(module: dict[str, TensorRef], *, partitioned: bool) -> Iterable[list[str]]:
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, ref in module.items():
        # Zero-sized tensors may be views of one flat buffer at one offset without being one parameter; a ZeRO-3
        # placeholder has a storage of its own.
        if ref.numel or partitioned:
            groups.setdefault(ref.identity, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _ends_of_chains(shared: dict[str, str]) -> dict[str, str]:
    """alias -> the owner at the end of its chain; each chain is walked once, and a circle ends where it closes."""
    ends: dict[str, str] = {}
    for alias in shared:
        chain: dict[str, None] = {}
        name = alias
        while name in shared and name not in chain and name not in ends:
            chain[name] = None
            name = shared[name]
        end = ends.get(name, name)
        ends.update(dict.fromkeys(chain, end))
    return ends
