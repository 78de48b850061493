"""The allow-list: which globals of a pickle mean something, and what is built in their place.

A builder is a value of ours, not the named function: calling it makes tensor references or plain containers and
nothing else. Names not listed resolve to an inert `Global`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lazyzero.container.objects import Global, Opaque, Storage, TensorRef
from lazyzero.dtypes import DTYPES, STORAGE_CLASSES, DType
from lazyzero.errors import UnsafeArchive

_MOST_DIMENSIONS = 64
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class Builder:
    """A global that is understood: `build` takes the pickled argument tuple."""

    path: str
    build: Callable[[tuple[Any, ...]], Any]


def resolve(module: str, name: str) -> Builder | Global | DType:
    """What `module.name` in a pickle stands for here."""
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    return _BUILDERS.get((module, name)) or Global(module, name)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None, *rest: Any
) -> Any:
    """torch._utils._rebuild_tensor_v2, and _v3 whose seventh argument is the dtype."""
    if isinstance(storage, Opaque):
        return Opaque("torch.Tensor", (storage,))
    if not isinstance(storage, Storage):
        raise UnsafeArchive("a tensor is built from something that is no storage")
    dtype = rest[0] if rest and isinstance(rest[0], DType) else storage.dtype
    shape, steps = _counts(size, "size"), _counts(stride, "stride")
    if not (isinstance(offset, int) and 0 <= offset < _LARGEST) or len(shape) != len(steps):
        raise UnsafeArchive("a tensor has an impossible offset, or more strides than dimensions")
    last = offset
    if 0 not in shape:
        last += sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
    if last * dtype.itemsize > storage.nbytes:
        raise UnsafeArchive(
            f"a tensor of shape {list(shape)[:8]} at offset {offset} reaches past its storage of {storage.nbytes} bytes"
        )
    ref = TensorRef(storage, offset, shape, steps, dtype)
    if ref.numel >= _LARGEST:
        raise UnsafeArchive(f"a tensor of shape {list(shape)[:8]} has more elements than any memory")
    return ref


def _counts(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMENSIONS:
        raise UnsafeArchive(f"a tensor's {what} is not a short tuple")
    for item in value:
        if type(item) is not int or not 0 <= item < _LARGEST:
            raise UnsafeArchive(f"a tensor's {what} holds {item!r:.40}, which is no count")
    return tuple(value)


def _from_type(func: Any, new_type: Any, args: Any, state: Any = None) -> Any:
    """torch._tensor._rebuild_from_type_v2: the inner call decides, subclass and state are dropped."""
    if isinstance(func, Builder) and func.build is not _BUILD_FROM_TYPE and isinstance(args, tuple):
        return func.build(args)
    return Opaque(func.path if isinstance(func, Global) else "torch.Tensor", (args,))


def _first(*args: Any) -> Any:
    """torch._utils._rebuild_parameter: the tensor itself."""
    return args[0]


def _mapping(*args: Any) -> dict[Any, Any]:
    """collections.OrderedDict(): empty, or from a list of pairs as protocol 0 and old Pythons wrote it."""
    pairs = args[0] if args else []
    return {pair[0]: pair[1] for pair in pairs if isinstance(pair, (list, tuple)) and isinstance(pair[0], (str, int))}


def _sequence(*args: Any) -> list[Any]:
    return list(args[0]) if args and isinstance(args[0], (list, tuple)) else []


def _size(*args: Any) -> tuple[Any, ...]:
    return tuple(args[0]) if args and isinstance(args[0], (list, tuple)) else ()


def _spread(function: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    return lambda args: function(*args)


_BUILD_FROM_TYPE = _spread(_from_type)


def _builders() -> dict[tuple[str, str], Builder | DType]:
    rows: list[tuple[str, str, Callable[[tuple[Any, ...]], Any]]] = [
        ("torch._utils", "_rebuild_tensor", _spread(_tensor)),
        ("torch._utils", "_rebuild_tensor_v2", _spread(_tensor)),
        ("torch._utils", "_rebuild_tensor_v3", _spread(_tensor)),
        ("torch._utils", "_rebuild_parameter", _spread(_first)),
        ("torch._utils", "_rebuild_parameter_with_state", _spread(_first)),
        ("torch._tensor", "_rebuild_from_type_v2", _BUILD_FROM_TYPE),
        ("torch.nn.parameter", "Parameter", _spread(_first)),
        ("collections", "OrderedDict", _spread(_mapping)),
        ("collections", "defaultdict", lambda args: {}),
        ("torch", "Size", _spread(_size)),
        ("builtins", "set", _spread(_sequence)),
        ("__builtin__", "set", _spread(_sequence)),
        ("builtins", "frozenset", _spread(_sequence)),
        ("__builtin__", "frozenset", _spread(_sequence)),
    ]
    return {(module, name): Builder(f"{module}.{name}", build) for module, name, build in rows}


@dataclass(frozen=True, slots=True)
class StorageClass:
    """torch.FloatStorage and its like: the element type a persistent id names."""

    dtype: DType


_BUILDERS: Final[dict[tuple[str, str], Any]] = {
    **_builders(),
    **{("torch", name): StorageClass(dtype) for name, dtype in STORAGE_CLASSES.items()},
    **{("torch.storage", name): StorageClass(dtype) for name, dtype in STORAGE_CLASSES.items()},
}
