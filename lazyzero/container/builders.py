"""The allow-list: which globals of a pickle mean something, and what is built in their place.

A builder is a value of ours, not the named function: calling it makes tensor references or plain containers and
nothing else. Names not listed resolve to an inert `Global`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lazyzero.container.brief import brief
from lazyzero.container.objects import Global, Opaque, Storage, TensorRef, as_key
from lazyzero.dtypes import DTYPES, STORAGE_CLASSES, DType
from lazyzero.errors import UnsafeArchive

_MOST_DIMENSIONS = 64
_LARGEST = 1 << 62
_MOST_EXPANDED = 1 << 30  # bytes of a tensor that repeats the elements of a smaller storage


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
    """torch._utils._rebuild_tensor_v2 (`rest`: metadata), and _v3 (`rest`: dtype, metadata)."""
    if isinstance(storage, Opaque):
        return Opaque("torch.Tensor", (storage,))
    if not isinstance(storage, Storage):
        raise UnsafeArchive("a tensor is built from something that is no storage")
    dtype = storage.dtype
    for more in rest:
        if isinstance(more, DType):
            dtype = more
        elif isinstance(more, Global) or (isinstance(more, dict) and any(more.values())):
            # An element type not known here, or bits that change the values: conjugated, negated.
            return Opaque("torch.Tensor", (storage, more))
    shape, steps = _counts(size, "size"), _counts(stride, "stride")
    if not (type(offset) is int and 0 <= offset < _LARGEST) or len(shape) != len(steps):
        raise UnsafeArchive("a tensor has an impossible offset, or more strides than dimensions")
    ref = TensorRef(storage, offset, shape, steps, dtype)
    _check_extent(ref)
    return ref


def _check_extent(ref: TensorRef) -> None:
    """Refuses a view that leaves its storage, or that makes far more of it than there is (strides of zero)."""
    last = ref.offset
    if 0 not in ref.shape:
        last += sum((n - 1) * step for n, step in zip(ref.shape, ref.stride, strict=True)) + 1
    if last * ref.dtype.itemsize > ref.storage.nbytes:
        raise UnsafeArchive(
            f"a tensor of shape {brief(ref.shape)} at offset {ref.offset} reaches past its storage of {ref.storage.nbytes} bytes"
        )
    nbytes = ref.numel * ref.dtype.itemsize
    if nbytes > max(ref.storage.nbytes, _MOST_EXPANDED):
        raise UnsafeArchive(
            f"a tensor of shape {brief(ref.shape)} claims {nbytes} bytes, its storage holds {ref.storage.nbytes}"
        )


def _counts(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMENSIONS:
        raise UnsafeArchive(f"a tensor's {what} is not a short tuple")
    for item in value:
        if type(item) is not int or not 0 <= item < _LARGEST:
            raise UnsafeArchive(f"a tensor's {what} holds {brief(item)}, which is no count")
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
    pairs = args[0] if args and isinstance(args[0], (list, tuple)) else []
    return {as_key(pair[0]): pair[1] for pair in pairs if isinstance(pair, (list, tuple)) and len(pair) == 2}


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
