"""What a pickle is turned into: plain containers, tensor references, and inert stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lazyzero.container.brief import brief
from lazyzero.container.source import Source
from lazyzero.container.zipdir import Member, data_offset
from lazyzero.dtypes import DType
from lazyzero.errors import BrokenArchive


class Storage:
    """One storage of an archive: `nbytes` bytes of `dtype` elements in `source`.

    The position of the data is looked up when first needed: in a zip archive it depends on a local header,
    and reading thousands of those for tensors nobody asks for would cost more than the conversion.
    """

    __slots__ = ("_offset", "dtype", "key", "member", "nbytes", "source")

    def __init__(self, source: Source, key: str, dtype: DType, nbytes: int, member: Member | None = None) -> None:
        self.source = source
        self.key = key
        self.dtype = dtype
        self.nbytes = nbytes
        self.member = member
        self._offset: int | None = None

    def place(self, offset: int) -> None:
        """Sets the byte offset of the data in the file (legacy archives, where it is known)."""
        self._offset = offset

    @property
    def offset(self) -> int:
        """Byte offset of the data in the source file."""
        if self._offset is None:
            if self.member is None:
                raise BrokenArchive(f"{self.source.path}: storage {brief(self.key)} has no data in the file")
            self._offset = data_offset(self.source, self.member)
        return self._offset

    def __repr__(self) -> str:
        return f"Storage({self.source.path!r}, {self.key!r}, {self.dtype}, {self.nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of a storage; `offset` and `stride` count elements of `dtype`. Nothing is read."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def contiguous(self) -> bool:
        """Whether the elements stand one after the other in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return size == 0 or 0 in self.shape
            expected *= size
        return True

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal exactly for references to the same elements in the same order."""
        return (id(self.storage), self.offset, self.shape, self.stride, self.dtype)


@dataclass(frozen=True, slots=True, repr=False)
class Global:
    """The name of a class or function that was referred to, and nothing more."""

    module: str
    name: str
    path: str = field(init=False, compare=False)  # one string, however many objects of the class there are

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", f"{self.module}.{self.name}")

    def __repr__(self) -> str:
        return f"<{self.path}>"


class Opaque:
    """An object that was not rebuilt: the name of its class, its arguments and its state, all inert."""

    __slots__ = ("args", "items", "kind", "state")

    def __init__(self, kind: str, args: Any = ()) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []

    def field(self, name: str) -> Any:
        """`name` out of a plain `__dict__` state, None where there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def __repr__(self) -> str:
        return f"<inert {self.kind}>"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A string too long to be of use to anyone here; `length` in bytes."""

    length: int


def as_key(key: Any) -> Any:
    """`key` as a dict key that a file cannot make expensive.

    Anybody can write down thousands of floats, tuples or large integers of one hash, and then every insertion compares
    with all the earlier ones. Text is hashed with a secret, small integers are their own hash; the rest become inert.
    """
    if isinstance(key, (str, bytes)) or key is None or (isinstance(key, int) and -_KEYS < key < _KEYS):
        return key
    return Opaque(f"key of type {type(key).__name__}")


_KEYS = 1 << 32
