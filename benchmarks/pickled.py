"""Writes what torch pickles, protocol 2, without torch: plain values, calls of named globals, tensors in storages."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

Content = Callable[[], Iterable["bytes | memoryview | int"]]
"""The bytes of a storage in order; an int is a hole of so many zero bytes."""

_BATCH: Final = 1000  # items in one SETITEMS, as Python's own pickler batches them
_STORAGE: Final = {4: "FloatStorage", 2: "BFloat16Storage"}


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by name; nothing of it is imported."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """`function(*args)`, then items set on the result, then its state; `new` is how objects without __reduce__ go."""

    function: Global
    args: tuple[object, ...] = ()
    items: Mapping[str, object] = field(default_factory=dict)
    state: object = None
    new: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """`numel` elements of 4 bytes (fp32) or 2 (bf16). Identity counts: the same object is one storage in the file."""

    itemsize: int
    numel: int
    content: Content

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Tensor:
    """A contiguous view of a storage, `offset` in elements. `attributes` are those of a tensor that has any."""

    storage: Storage
    shape: tuple[int, ...]
    offset: int = 0
    requires_grad: bool = False
    attributes: Mapping[str, object] | None = None


def ordered(items: Mapping[str, object], state: object = None) -> Call:
    """A collections.OrderedDict."""
    return Call(_ORDERED, (), items, state)


def size(shape: tuple[int, ...]) -> Call:
    """A torch.Size."""
    return Call(Global("torch", "Size"), (shape,))


_ORDERED: Final = Global("collections", "OrderedDict")
_REBUILD: Final = Global("torch._utils", "_rebuild_tensor_v2")
_FROM_TYPE: Final = Global("torch._tensor", "_rebuild_from_type_v2")
_TENSOR: Final = Global("torch", "Tensor")


class Pickler:
    """Pickles one object; `storages` lists what it refers to, each storage's key being its place in the list."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[object, int] = {}  # constants that repeat in every tensor
        self._count = 0
        self._keys: dict[int, int] = {}
        self.storages: list[Storage] = []

    def dump(self, value: object) -> bytes:
        """The pickle of `value`."""
        self._save(value)
        return bytes(self._out) + b"."

    def _put(self) -> int:
        index = self._count
        self._count += 1
        self._out += b"q" + bytes((index,)) if index < 256 else b"r" + struct.pack("<I", index)
        return index

    def _once(self, constant: Global | str) -> None:
        index = self._memo.get(constant)
        if index is None:
            self._memo[constant] = self._text(constant) if isinstance(constant, str) else self._global(constant)
        else:
            self._out += b"h" + bytes((index,)) if index < 256 else b"j" + struct.pack("<I", index)

    def _text(self, text: str) -> int:
        raw = text.encode()
        self._out += b"X" + struct.pack("<I", len(raw)) + raw
        return self._put()

    def _global(self, value: Global) -> int:
        self._out += f"c{value.module}\n{value.name}\n".encode()
        return self._put()

    def _save(self, value: object) -> None:
        match value:
            case None:
                self._out += b"N"
            case bool():
                self._out += b"\x88" if value else b"\x89"
            case int():
                self._int(value)
            case float():
                self._out += b"G" + struct.pack(">d", value)
            case str():
                self._text(value)
            case tuple():
                self._tuple(value)
            case list():
                self._list(value)
            case Mapping():
                self._out += b"}"
                self._put()
                self._items(value)
            case Call():
                self._call(value)
            case Tensor():
                self._tensor(value)
            case _:
                raise TypeError(f"no way to pickle {type(value).__name__}")

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._out += b"K" + bytes((value,))
        elif 0 <= value < 1 << 16:
            self._out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._out += b"\x8a" + bytes((len(raw),)) + raw

    def _tuple(self, values: tuple[object, ...]) -> None:
        if not values:
            self._out += b")"
            return
        if len(values) > 3:
            self._out += b"("
        for value in values:
            self._save(value)
        self._out += {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(values), b"t")
        self._put()

    def _list(self, values: list[object]) -> None:
        self._out += b"]"
        self._put()
        if values:
            self._out += b"("
            for value in values:
                self._save(value)
            self._out += b"e"

    def _items(self, items: Mapping[str, object]) -> None:
        rest = iter(items.items())
        while batch := list(islice(rest, _BATCH)):
            self._out += b"("
            for key, value in batch:
                self._save(key)
                self._save(value)
            self._out += b"u"

    def _call(self, call: Call) -> None:
        self._once(call.function)
        self._tuple(call.args)
        self._out += b"\x81" if call.new else b"R"
        self._put()
        self._items(call.items)
        if call.state is not None:
            self._save(call.state)
            self._out += b"b"

    def _tensor(self, tensor: Tensor) -> None:
        if tensor.attributes is None:
            self._once(_REBUILD)
            self._rebuild_arguments(tensor)
        else:
            self._once(_FROM_TYPE)
            self._out += b"("
            self._once(_REBUILD)
            self._once(_TENSOR)
            self._rebuild_arguments(tensor)
            self._save(tensor.attributes)
            self._out += b"t"
            self._put()
        self._out += b"R"
        self._put()

    def _rebuild_arguments(self, tensor: Tensor) -> None:
        strides: list[int] = []
        step = 1
        for length in reversed(tensor.shape):
            strides.insert(0, step)
            step *= max(length, 1)
        self._out += b"("
        self._persistent(tensor.storage)
        for value in (tensor.offset, tensor.shape, tuple(strides), tensor.requires_grad, ordered({})):
            self._save(value)
        self._out += b"t"
        self._put()

    def _persistent(self, storage: Storage) -> None:
        key = self._keys.get(id(storage))
        if key is None:
            key = self._keys[id(storage)] = len(self.storages)
            self.storages.append(storage)
        self._out += b"("
        self._once("storage")
        self._once(Global("torch", _STORAGE[storage.itemsize]))
        self._save(str(key))
        self._once("cpu")
        self._save(storage.numel)
        self._out += b"t"
        self._put()
        self._out += b"Q"
