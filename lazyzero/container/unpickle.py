"""A pickle machine that builds data and runs nothing.

Every opcode of protocols 0 to 5 is understood, but the only callables are the few builders of `builders.py`, which
make tensor references and plain containers. REDUCE, NEWOBJ, OBJ, INST or BUILD of anything else leaves an `Opaque` with the
name, the arguments and the state. Nothing is imported, no attribute of any object is looked up by a name from the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

from lazyzero.container.brief import brief
from lazyzero.container.builders import Builder, resolve
from lazyzero.container.machine import INERT, LONGEST_NUMBERS, MARK, NUMBERS, OBJECT, PAIR, SLOT, Machine
from lazyzero.container.objects import Global, Opaque, Storage, TensorRef, as_key
from lazyzero.container.tape import Tape
from lazyzero.errors import BrokenArchive

PersistentLoad = Callable[[Any], Storage | Opaque]
Handler = Callable[["Unpickler"], Any]

_BLOCK: Final = 1024  # opcodes between two looks at the account


class Unpickler(Machine):
    """Reads the pickles on `tape`; `persistent_load` turns a persistent id (a tuple) into a Storage.

    The pickles of one file are read by one Unpickler: they share its limits.
    """

    def __init__(self, tape: Tape, persistent_load: PersistentLoad) -> None:
        super().__init__(tape)
        self._persistent_load = persistent_load

    def load(self) -> Any:
        """The next object. Raises BrokenArchive (damaged) or UnsafeArchive (beyond the limits)."""
        byte, table = self._tape.byte, _TABLE
        self._stack.clear()
        self._memo.clear()
        self._sparse.clear()
        steps = range(_BLOCK)
        try:
            while True:
                self.walk(_BLOCK)
                for _ in steps:
                    if table[byte()](self):
                        return self._stack.pop()
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
            raise self.broken(f"{type(error).__name__}: {error}") from None

    def _unknown(self) -> None:
        raise self.broken("an unknown opcode")

    def _stop(self) -> bool:
        if len(self._stack) != 1 or self._stack[0] is MARK:
            raise self.broken("unbalanced stack at the end")
        return True

    # -- containers ------------------------------------------------------------------------------------------

    def _empty_list(self) -> None:
        self.push([], OBJECT)  # sets, too, are kept as lists: their elements need not be hashable

    def _empty_dict(self) -> None:
        self.push({}, OBJECT)

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _list(self) -> None:
        items = self.pop_mark()
        self.push(items, OBJECT + SLOT * len(items))

    def _tuple(self) -> None:
        items = self.pop_mark()
        self.push(tuple(items), OBJECT + SLOT * len(items))

    def _tuple_of(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise self.broken("a tuple of more than there is")
        items = tuple(stack[-count:])
        del stack[-count:]
        self.push(items, OBJECT + SLOT * count)

    def _dict(self) -> None:
        items = self.pop_mark()
        self.push({}, OBJECT)
        self._update(self._stack[-1], items)

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Opaque):
            target = target.items
        if not isinstance(target, list):
            raise self.broken("an append to something that is no list")
        if len(target) >= LONGEST_NUMBERS and all(isinstance(item, NUMBERS) for item in items):
            return
        self.charge(SLOT * len(items))
        target.extend(items)

    def _setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update(self._stack[-1], [key, value])

    def _setitems(self) -> None:
        items = self.pop_mark()
        self._update(self._stack[-1], items)

    def _update(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise self.broken("a key without a value")
        count = len(items) // 2
        self._steps -= 2
        self.charge(PAIR * count)
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, Opaque):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            for key, value in pairs:
                if type(key) is not str:
                    key = as_key(key)
                    self.charge(INERT)
                elif type(value) is TensorRef:
                    self._tensors -= 1
                target[key] = value
        else:
            raise self.broken("an item set on something that is no dict")

    # -- objects ---------------------------------------------------------------------------------------------

    def _global(self) -> None:
        module, name = self.name(self._tape.line()), self.name(self._tape.line())
        self.push(resolve(module, name), 4 * OBJECT + 2 * (len(module) + len(name)))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise self.broken("a global whose name is no string")
        self.push(resolve(self.name(module), self.name(name)), 2 * OBJECT + 4 * (len(module) + len(name)))

    def _ext(self, code: int) -> None:
        self._steps -= 4
        self.push(Global("copyreg", f"extension {code}"), 4 * OBJECT)

    def _reduce(self) -> None:
        args, target = self._stack.pop(), self._stack.pop()
        if not isinstance(args, tuple):
            raise self.broken("a call without an argument tuple")
        self._steps -= 2
        if isinstance(target, Builder):
            value = self._built(target, args)
            cost = _cost(value)
            self._steps -= cost >> 3
            self.push(value, cost)
        else:
            self.push(Opaque(_name_of(target), args), INERT)

    def _built(self, target: Builder, args: tuple[Any, ...]) -> Any:
        length = _length(args)
        if length > 64:
            self.walk(length >> 1)
        try:
            return target.build(args)
        except BrokenArchive as error:  # the builder does not know the file
            raise type(error)(f"{self._tape.source.path}: {error}") from None
        except (TypeError, IndexError):
            raise self.broken(f"{target.path} is called with {brief(args)}, which are not its arguments") from None

    def _newobj_ex(self) -> None:
        keywords, args, target = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self.push(Opaque(_name_of(target), (args, keywords)), INERT + OBJECT)

    def _inst(self) -> None:
        module, name = self.name(self._tape.line()), self.name(self._tape.line())
        self._inert(resolve(module, name), self.pop_mark())

    def _obj(self) -> None:
        target, *args = self.pop_mark()
        self._inert(target, args)

    def _inert(self, target: Any, args: list[Any]) -> None:
        kind = _name_of(target)
        self._steps -= 2
        self.push(Opaque(kind, tuple(args)), INERT + OBJECT + SLOT * len(args) + 2 * len(kind))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Opaque):
            target.state = state  # dicts (OrderedDict's _metadata) and everything else lose theirs

    def _persid(self) -> None:
        raise self.unsafe("refers to a storage by a line of text, as torch never does")

    def _binpersid(self) -> None:
        self.push(self._persistent_load(self._stack.pop()), INERT)

    def _next_buffer(self) -> None:
        raise self.unsafe("refers to out-of-band buffers")


def _length(args: tuple[Any, ...]) -> int:
    """How many items a builder may have to look at; the same long list can be given to it again and again."""
    total = len(args)
    for arg in args[:4]:
        if isinstance(arg, (list, tuple)):
            total += len(arg)
            if isinstance(arg, tuple):  # the arguments of the call inside a call
                total += sum(len(inner) for inner in arg[:4] if isinstance(inner, (list, tuple)))
    return total


def _cost(value: Any) -> int:
    """What a builder's result takes; it may be a copy of its argument."""
    if isinstance(value, TensorRef):
        return OBJECT + 2 * SLOT * len(value.shape)
    if isinstance(value, dict):
        return OBJECT + (PAIR + INERT) * len(value)
    if isinstance(value, (list, tuple)):
        return OBJECT + SLOT * len(value)
    return INERT


def _name_of(target: Any) -> str:
    if isinstance(target, (Global, Builder)):
        return target.path
    return type(target).__name__


def _sized(method: Callable[[Any, int], None], size: int) -> Handler:
    """A handler for opcodes whose argument is a length or an index of `size` bytes."""
    if size == 1:
        return lambda machine: method(machine, machine._byte())
    number = int.from_bytes  # as `uint` does, a call less: three in ten opcodes come by here
    return lambda machine: method(machine, number(machine._take(size), "little"))


def _fixed(method: Callable[[Any, int], None], value: int) -> Handler:
    return lambda machine: method(machine, value)


def _decimal(method: Callable[[Any, int], None]) -> Handler:
    return lambda machine: method(machine, machine.decimal(machine._tape.line()))


def _table(rows: Iterable[tuple[bytes, Handler]]) -> list[Handler]:
    table: list[Handler] = [U._unknown] * 256
    for opcode, handler in rows:
        table[opcode[0]] = handler
    return table


U = Unpickler
_TABLE: Final = _table(
    [
        (b"\x80", U._proto), (b"\x95", U._frame), (b"(", U._mark), (b".", U._stop), (b"0", U._pop), (b"2", U._dup),
        (b"1", lambda machine: machine.pop_mark() and None),
        (b"N", U._none), (b"\x88", U._true), (b"\x89", U._false),
        (b"J", U._binint), (b"K", U._binint1), (b"M", U._binint2), (b"I", U._int), (b"L", U._long),
        (b"\x8a", U._long1), (b"\x8b", U._long4), (b"F", U._float), (b"G", U._binfloat),
        (b"X", _sized(U._text, 4)), (b"\x8c", _sized(U._text, 1)), (b"\x8d", _sized(U._text, 8)),
        (b"B", _sized(U._bytes, 4)), (b"C", _sized(U._bytes, 1)), (b"\x8e", _sized(U._bytes, 8)),
        (b"\x96", _sized(U._bytes, 8)), (b"S", U._string), (b"V", U._unicode),
        (b"T", U._binstring), (b"U", _sized(U._latin, 1)),
        (b"]", U._empty_list), (b"}", U._empty_dict), (b")", U._empty_tuple), (b"\x8f", U._empty_list),
        (b"l", U._list), (b"t", U._tuple), (b"d", U._dict), (b"\x91", U._list),
        (b"\x85", _fixed(U._tuple_of, 1)), (b"\x86", _fixed(U._tuple_of, 2)), (b"\x87", _fixed(U._tuple_of, 3)),
        (b"a", U._append), (b"e", U._appends), (b"\x90", U._appends), (b"s", U._setitem), (b"u", U._setitems),
        (b"p", _decimal(U._put)), (b"q", U._binput), (b"r", _sized(U._put, 4)), (b"\x94", U._memoize),
        (b"g", _decimal(U._get)), (b"h", U._binget), (b"j", _sized(U._get, 4)),
        (b"c", U._global), (b"\x93", U._stack_global), (b"i", U._inst), (b"o", U._obj),
        (b"\x82", _sized(U._ext, 1)), (b"\x83", _sized(U._ext, 2)), (b"\x84", _sized(U._ext, 4)),
        (b"R", U._reduce), (b"\x81", U._reduce), (b"\x92", U._newobj_ex), (b"b", U._build),
        (b"P", U._persid), (b"Q", U._binpersid), (b"\x97", U._next_buffer), (b"\x98", lambda machine: None),
    ]
)  # fmt: skip
