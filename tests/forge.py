"""Writes `.pt` files byte by byte, honest ones and ones no honest program would write. Needs neither torch nor zipfile.

`pickled` turns a description of an object into a pickle, `Tensor` and `Call` standing for what torch pickles as
references to storages and as calls; `Raw` is put in as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

MAGIC = 0x1950A86A20F9469CFC6C
ITEMSIZES = {
    "FloatStorage": 4, "BFloat16Storage": 2, "HalfStorage": 2, "DoubleStorage": 8, "ByteStorage": 1, "CharStorage": 1,
    "BoolStorage": 1, "ShortStorage": 2, "IntStorage": 4, "LongStorage": 8, "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
}  # fmt: skip


# -- pickles -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raw:
    """Opcodes that leave one object on the stack."""

    code: bytes


@dataclass(frozen=True)
class Call:
    """`module.name(*args)`, with BUILD of `state` where there is one."""

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class Tensor:
    """A tensor as torch pickles it. `numel` counts the elements of its storage."""

    key: str
    shape: Any
    stride: Any = None
    offset: Any = 0
    numel: Any = None
    kind: str = "FloatStorage"
    more: tuple[Any, ...] = ()  # what the persistent id ends in: None in legacy archives

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage."""
        return self._numel * ITEMSIZES.get(self.kind, 1)

    @property
    def _numel(self) -> Any:
        if self.numel is not None:
            return self.numel
        count = 1
        for size in self.shape:
            count *= size
        return count

    def call(self) -> Call:
        """The call that rebuilds it."""
        stride = self.stride
        if stride is None:
            steps, step = [], 1
            for size in reversed(self.shape):
                steps.append(step)
                step *= size
            stride = tuple(reversed(steps))
        storage = Raw(
            _value(("storage", Raw(global_("torch", self.kind)), self.key, "cpu", self._numel, *self.more)) + b"Q"
        )
        hooks = Call("collections", "OrderedDict")
        return Call("torch._utils", "_rebuild_tensor_v2", (storage, self.offset, self.shape, stride, False, hooks))


def pickled(value: Any, protocol: int = 2) -> bytes:
    """A pickle of `value`; one of protocol 0 or 1 has no header."""
    head = b"\x80" + bytes([protocol]) if protocol >= 2 else b""
    return head + _value(value) + b"."


def global_(module: str, name: str) -> bytes:
    """The GLOBAL opcode."""
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str | bytes) -> bytes:
    """The BINUNICODE opcode."""
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    """The shortest opcode for an int that Python's pickler knows."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw))) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value.code
    if isinstance(value, Tensor):
        return _value(value.call())
    if isinstance(value, Call):
        code = global_(value.module, value.name) + _value(value.args) + b"R"
        return code if value.state is None else code + _value(value.state) + b"b"
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, Mapping):
        return b"}(" + b"".join(_value(item) for pair in value.items() for item in pair) + b"u"
    items = b"".join(map(_value, value))
    return b"(" + items + b"t" if isinstance(value, tuple) else b"](" + items + b"e"


def storages_of(value: Any) -> dict[str, bytes]:
    """Storages full of zeros for every tensor in `value`, as large as the largest claim that is not absurd."""
    found: dict[str, bytes] = {}
    if isinstance(value, Tensor):
        if isinstance(value.nbytes, int) and 0 <= value.nbytes < 1 << 24:
            found[value.key] = bytes(value.nbytes)
    elif isinstance(value, Mapping):
        for item in value.values():
            found.update(storages_of(item))
    elif isinstance(value, (list, tuple)):
        for item in value:
            found.update(storages_of(item))
    return found


# -- containers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A member of a zip archive, and what its headers say of it where that is not the truth."""

    name: str | bytes
    data: bytes = b""
    size: int | None = None  # both sizes in the directory
    packed: int | None = None
    header: int | None = None  # where the directory says it is
    method: int = 0
    flags: int = 0
    extra: bytes | None = None  # of the directory's entry
    local_extra: bytes = b""
    local_method: int | None = None
    magic: bytes = b"PK\x03\x04"

    @property
    def raw_name(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else self.name.encode()


@dataclass(frozen=True)
class Zip:
    """A zip archive. `zip64` puts every size and offset into 64-bit fields, `descriptors` the sizes behind the data."""

    parts: Sequence[Part]
    zip64: bool = False
    descriptors: bool = False
    comment: bytes = b""
    trailing: bytes = b""
    lies: Mapping[str, int] = field(default_factory=dict)  # count, start, size, disk, locator

    def write(self) -> bytes:
        out, directory = bytearray(), bytearray()
        for part in self.parts:
            at = len(out)
            out += self._member(part)
            directory += self._entry(part, at)
        start = len(out)
        return bytes(out + directory + self._end(start, len(directory))) + self.comment + self.trailing

    def _member(self, part: Part) -> bytes:
        flags = part.flags | (8 if self.descriptors else 0)
        crc, told = (0, 0) if self.descriptors else (crc32(part.data), len(part.data))
        method = part.method if part.local_method is None else part.local_method
        head = struct.pack(
            "<4s5H3L2H", part.magic, 20, flags, method, 0, 0, crc, told, told, len(part.raw_name), len(part.local_extra)
        )
        ends = struct.pack("<4s3L", b"PK\x07\x08", crc32(part.data), len(part.data), len(part.data))
        return head + part.raw_name + part.local_extra + part.data + (ends if self.descriptors else b"")

    def _entry(self, part: Part, at: int) -> bytes:
        size = len(part.data) if part.size is None else part.size
        packed = size if part.packed is None else part.packed
        header = at if part.header is None else part.header
        fields, extra = [packed, size], b""
        if self.zip64 or max(size, packed, header) >= 0xFFFFFFFF:
            extra = struct.pack("<2H3Q", 1, 24, size, packed, header)
            fields, header = [0xFFFFFFFF] * 2, 0xFFFFFFFF
        if part.extra is not None:
            extra = part.extra
        head = struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 45, 20, part.flags | (8 if self.descriptors else 0), part.method, 0, 0,
            crc32(part.data), *fields, len(part.raw_name), len(extra), 0, 0, 0, 0, header,
        )  # fmt: skip
        return head + part.raw_name + extra

    def _end(self, start: int, size: int) -> bytes:
        count = self.lies.get("count", len(self.parts))
        at, disk = self.lies.get("start", start), self.lies.get("disk", 0)
        told = self.lies.get("size", size)
        if not self.zip64:
            return struct.pack("<4s4H2LH", b"PK\x05\x06", disk, disk, count, count, told, at, len(self.comment))
        locator = self.lies.get("locator", start + size)
        return (
            struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, told, at)
            + struct.pack("<4sLQL", b"PK\x06\x07", 0, locator, 1)
            + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, len(self.comment))
        )


def parts(pickle: bytes, storages: Mapping[str, bytes] | None = None, root: str = "archive") -> list[Part]:
    """The members torch writes."""
    found = [Part(f"{root}/data.pkl", pickle), Part(f"{root}/byteorder", b"little")]
    found += [Part(f"{root}/data/{key}", data) for key, data in (storages or {}).items()]
    return [*found, Part(f"{root}/version", b"3\n")]


def archive(value: Any, **changes: Any) -> bytes:
    """A zip archive of `value` as torch writes one; `changes` are Zip's fields."""
    return replace(Zip(parts(pickled(value), storages_of(value))), **changes).write()


def legacy(value: Any, storages: Sequence[tuple[str, int, bytes]] = (), **changes: Any) -> bytes:
    """The legacy container; `storages` are key, number of elements, data. `changes`: magic, protocol, system, keys."""
    head = (
        changes.get("magic", MAGIC),
        changes.get("protocol", 1001),
        changes.get("system", {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}),
    )
    keys = changes.get("keys", [key for key, _, _ in storages])
    tail = b"".join(struct.pack("<q", count) + data for _, count, data in storages)
    return b"".join(map(pickled, head)) + pickled(_with_ends(value)) + pickled(keys) + tail


def _with_ends(value: Any) -> Any:
    if isinstance(value, Tensor):
        return replace(value, more=value.more or (None,))
    if isinstance(value, dict):
        return {key: _with_ends(item) for key, item in value.items()}
    return [_with_ends(item) for item in value] if isinstance(value, list) else value


def write(path: Path, data: bytes) -> Path:
    """Writes a file, directories included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
