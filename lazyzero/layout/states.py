"""The contents of `*_model_states.pt` and `*_optim_states.pt`, brought to one form over DeepSpeed's versions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lazyzero.container.archive import Archive, open_archive
from lazyzero.container.brief import brief
from lazyzero.container.objects import Opaque, TensorRef
from lazyzero.errors import InconsistentCheckpoint, UnsupportedLayout

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

_MOST_NAMES = 200_000  # more than twice what the model with the most experts has
_MOST_VALUES = 1_000_000  # in what DeepSpeed itself writes, each counted as often as it is met
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 48


@dataclass(frozen=True, slots=True)
class ModelStates:
    """One model file. `param_shapes` has a dict for each param group (ZeRO-3: sub-group), None where not recorded."""

    archive: Archive
    module: dict[str, TensorRef]
    buffers: frozenset[str] | None
    param_shapes: list[Shapes] | None
    frozen_shapes: Shapes
    frozen: dict[str, TensorRef]
    shared: dict[str, str]
    version: str | None
    root: dict[str, Any] = field(repr=False)
    unread: frozenset[str] = frozenset()  # names in `module` of tensors that are not plain: sparse, quantized

    @property
    def path(self) -> str:
        return self.archive.path


def read_model(path: str, *, without_module: bool = False) -> ModelStates:
    """Reads a model file's metadata. Raises BrokenArchive, InconsistentCheckpoint, UnsupportedLayout.

    `without_module` takes a pipeline's file, whose weights are elsewhere, as one with an empty `module`.
    """
    archive = open_archive(path)
    root = _dict(path, archive.root, "the file")
    require_finite(path, [root.get(key) for key in _WALKED])
    module = root.get("module")
    if module is None and without_module:
        module = {}
    if module is None:
        raise UnsupportedLayout(
            f"{path}: `module` is empty, as in pipeline checkpoints; that layout is not supported here"
        )
    buffers = root.get("buffer_names")
    saved = named(path, module, "module")
    return ModelStates(
        archive,
        {name: ref for name, ref in saved.items() if isinstance(ref, TensorRef)},
        frozenset(filter(_is_str, buffers)) if isinstance(buffers, (list, tuple)) else None,
        read_shapes(path, root.get("param_shapes")),
        _shapes(path, root.get("frozen_param_shapes") or {}, "frozen_param_shapes"),
        tensors(path, root.get("frozen_param_fragments") or {}, "frozen_param_fragments"),
        _shared(path, root.get("shared_params")),
        version_of(root),
        root,
        frozenset(name for name, value in saved.items() if _is_other_tensor(value)),
    )


def _is_other_tensor(value: Any) -> bool:
    return isinstance(value, Opaque) and (
        value.kind == "torch.Tensor" or value.kind.startswith("torch._utils._rebuild_")
    )


@dataclass(frozen=True, slots=True)
class OptimStates:
    """One rank's optimizer file: `state` is its `optimizer_state_dict`."""

    archive: Archive
    root: dict[str, Any] = field(repr=False)
    state: dict[str, Any] = field(repr=False)

    @property
    def path(self) -> str:
        return self.archive.path

    @property
    def stage(self) -> int | None:
        """The recorded `zero_stage` (2 for both 1 and 2 in 0.4.0-0.6.7); None in BF16_Optimizer's files."""
        return as_int(self.state.get("zero_stage"))

    @property
    def version(self) -> str | None:
        """DeepSpeed's version, where recorded."""
        return version_of(self.root) or version_of(self.state)

    def flats(self, key: str) -> list[TensorRef]:
        """The flat groups under `key`. Raises InconsistentCheckpoint unless they are 1-D tensors."""
        found = self.state.get(key)
        if not isinstance(found, list) or not all(isinstance(flat, TensorRef) for flat in found):
            raise InconsistentCheckpoint(f"{self.path}: expected a list of tensors in `{key}`, found {brief(found)}")
        for flat in found:
            if len(flat.shape) != 1 or not flat.contiguous:
                raise InconsistentCheckpoint(f"{self.path}: expected 1-D tensors in `{key}`, found {brief(flat.shape)}")
        return found


def read_optim(path: str) -> OptimStates:
    """Reads an optimizer file's metadata. Raises BrokenArchive or InconsistentCheckpoint."""
    archive = open_archive(path)
    root = _dict(path, archive.root, "the file")
    state = _dict(path, root.get("optimizer_state_dict"), "`optimizer_state_dict`")
    require_finite(path, [state, root.get("param_shapes")])
    return OptimStates(archive, root, state)


# Of a model file, besides `module`: what the layouts look through. The client state is left alone.
_WALKED = (
    "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "ds_config",
    "optimizer", "num_experts", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info",
)  # fmt: skip


_CONTAINERS = (dict, list, tuple, Opaque)


def require_finite(path: str, value: Any) -> None:
    """Refuses lists of lists of the same lists: a few kilobytes of pickle describe more than anybody can walk through.

    Each container is looked at once, and counted as often as it is met; one that holds itself is without end.
    """
    sizes: dict[int, int | None] = {}  # by identity; None while what is inside is being counted
    rest = [(value, False)]
    while rest:
        each, counted = rest.pop()
        inner = _inside(each)
        if counted:
            size = len(inner) + sum(sizes.get(id(one)) or 0 for one in inner)
            if size > _MOST_VALUES:
                raise _without_end(path)
            sizes[id(each)] = size
        elif id(each) not in sizes:
            if inner:
                sizes[id(each)] = None
                rest.append((each, True))
                rest.extend((one, False) for one in inner if isinstance(one, _CONTAINERS))
        elif sizes[id(each)] is None:
            raise _without_end(path)


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, Opaque):
        return (value.args, value.state, value.items)
    return value if isinstance(value, (list, tuple)) else ()


def _without_end(path: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(f"{path}: describes more than {_MOST_VALUES} values; the file is damaged")


def read_shapes(path: str, value: Any) -> list[Shapes] | None:
    """`param_shapes` as a list of dicts: it is a bare dict up to 0.5.3, absent without ZeRO."""
    if value is None:
        return None
    groups = value if isinstance(value, list) else [value]
    return [_shapes(path, group, "param_shapes") for group in groups]


def named(path: str, value: Any, what: str) -> dict[str, Any]:
    """A dict whose keys are names. Raises InconsistentCheckpoint."""
    found = _dict(path, value, f"`{what}`")
    if len(found) > _MOST_NAMES:
        raise InconsistentCheckpoint(
            f"{path}: `{what}` has {len(found)} entries, more than any model; the file is damaged"
        )
    for name in found:
        check_name(path, name)
    return found


def tensors(path: str, value: Any, what: str) -> dict[str, TensorRef]:
    """A dict of named tensors. Raises InconsistentCheckpoint."""
    found = named(path, value, what)
    for name, ref in found.items():
        if not isinstance(ref, TensorRef):
            raise InconsistentCheckpoint(f"{path}: {what}[{brief(name)}] is no plain tensor but {brief(ref)}")
    return found


def check_name(path: str, name: object) -> None:
    """Refuses names no model has: not text, control characters, lone surrogates, kilobytes.

    Slashes, spaces, and names that differ in case only are legal: names never become paths.
    """
    good = isinstance(name, str) and 0 < len(name) <= 1024 and name.isprintable() and name != "__metadata__"
    if not good:
        raise InconsistentCheckpoint(
            f"{path}: {brief(name, 60)} cannot be the name of a parameter; the file is damaged"
        )


def check_once(path: str, names: Mapping[str, object], more: Mapping[str, object]) -> None:
    """Refuses a parameter that two groups claim: the values of one of them would be lost."""
    twice = names.keys() & more.keys()
    if twice:
        raise InconsistentCheckpoint(f"{path}: parameter {brief(min(twice))} is in two groups; the file is damaged")


def as_int(value: Any) -> int | None:
    """An int of 64 bits, or the value of a pickled int enumeration (`ZeroStageEnum(3)`); None for anything else."""
    if isinstance(value, Opaque) and isinstance(value.args, tuple) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None


def version_of(root: Mapping[str, Any]) -> str | None:
    """The recorded `ds_version`."""
    version = root.get("ds_version")
    return version if isinstance(version, str) and len(version) <= 200 and version.isprintable() else None


def older(version: str | None, than: tuple[int, int, int]) -> bool:
    """Whether a recorded `ds_version` is before `than`; versions before 0.4.0 are not recorded."""
    if version is None:
        return True
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return numbers is not None and tuple(int(number or 0) for number in numbers.groups()) < than


def _shapes(path: str, value: Any, what: str) -> Shapes:
    shapes: Shapes = {}
    for name, shape in named(path, value, what).items():
        if not is_shape(shape):
            raise InconsistentCheckpoint(f"{path}: {what}[{brief(name)}] is no shape but {brief(shape)}")
        shapes[name] = tuple(shape)
    return shapes


def is_shape(value: Any) -> bool:
    """Whether a value can be the shape of a tensor that exists."""
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMENSIONS:
        return False
    count = 1
    for size in value:
        if type(size) is not int or not 0 <= size < _MOST_ELEMENTS:
            return False
        count *= size or 1
    return count < _MOST_ELEMENTS


def _shared(path: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    for name in (*named(path, value, "shared_params"), *value.values()):
        check_name(path, name)
    return dict(value)


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _dict(path: str, value: Any, what: str) -> dict[str, Any]:
    if value == "":
        raise UnsupportedLayout(
            f"{path}: an empty stand-in, as DeepSpeed's Nebula engine leaves it; the data are in Nebula's own storage "
            "(`persistent_storage_path`): load the checkpoint where it was trained and save it with `nebula` disabled"
        )
    if not isinstance(value, dict):
        raise InconsistentCheckpoint(
            f"{path}: expected a dict in {what}, found {type(value).__name__}; not DeepSpeed's"
        )
    return value
