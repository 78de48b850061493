"""A pickle machine that builds data and runs nothing.

Every opcode of protocols 0 to 5 is understood, but the only callables are the few builders of `builders.py`, which
make tensor references and plain containers. REDUCE, NEWOBJ, OBJ, INST or BUILD of anything else leaves an `Opaque` with the
name, the arguments and the state. Nothing is imported, no attribute of any object is looked up by a name from the file.

What a file may ask for is bounded: stack depth, number of objects, integer and string sizes. Strings beyond 64 KiB
are skipped unread, long runs of plain numbers are cut, so that a large client state costs time but no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

from lazyzero.container.builders import Builder, resolve
from lazyzero.container.objects import Global, Opaque, Skipped, Storage
from lazyzero.container.tape import Tape
from lazyzero.errors import BrokenArchive, LazyZeroError, UnsafeArchive

PersistentLoad = Callable[[Any], Storage | Opaque]

_LONGEST_STRING: Final = 64 << 10  # bytes; a longer one is skipped
_DEEPEST_STACK: Final = 200_000
_BUDGET: Final = 1_200_000  # objects that take memory: containers, strings, tensors
_LONGEST_NUMBERS: Final = 65_536  # entries of a list of plain numbers that are kept
_MOST_OPCODES: Final = 20_000_000
_SCALARS = (int, float, bool, str, bytes, type(None))
_NUMBERS = (int, float, bool, type(None))
_STOP = object()


class _Mark:
    __slots__ = ()


_MARK = _Mark()


class Unpickler:
    """Reads one pickle from `tape`; `persistent_load` turns a persistent id (a tuple) into a Storage."""

    def __init__(self, tape: Tape, persistent_load: PersistentLoad) -> None:
        self._tape = tape
        self._persistent_load = persistent_load
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._budget = _BUDGET

    def load(self) -> Any:
        """The pickled object. Raises BrokenArchive (damaged) or UnsafeArchive (beyond the limits)."""
        byte, table, stack = self._tape.byte, _TABLE, self._stack
        try:
            for _ in range(_MOST_OPCODES):
                handler = table[byte()]
                if handler is None:
                    raise self._broken("an unknown opcode")
                if handler(self) is _STOP:
                    return stack.pop()
                if len(stack) > _DEEPEST_STACK:
                    raise self._unsafe("nests deeper than any checkpoint does")
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
            raise self._broken(f"{type(error).__name__}: {error}") from None
        raise self._unsafe(f"holds more than {_MOST_OPCODES} opcodes")

    # -- helpers ---------------------------------------------------------------------------------------------

    def _broken(self, what: str) -> LazyZeroError:
        path = self._tape.source.path
        return BrokenArchive(f"{path}: the pickle is damaged at byte {self._tape.position} ({what[:120]})")

    def _unsafe(self, what: str) -> LazyZeroError:
        return UnsafeArchive(f"{self._tape.source.path}: the pickle {what}; refused")

    def _charge(self, count: int = 1) -> None:
        self._budget -= count
        if self._budget < 0:
            raise self._unsafe(f"holds more than {_BUDGET} objects")

    def _push(self, value: Any) -> None:
        self._charge()
        self._stack.append(value)

    def _pop_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while not isinstance(stack[at], _Mark):
            at -= 1
            if at < 0:
                raise self._broken("no mark on the stack")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def _uint(self, size: int) -> int:
        return int.from_bytes(self._tape.take(size), "little")

    # -- constants -------------------------------------------------------------------------------------------

    def _proto(self) -> None:
        if self._tape.byte() > 5:
            raise self._broken("a pickle protocol newer than 5")

    def _frame(self) -> None:
        self._tape.take(8)

    def _mark(self) -> None:
        self._stack.append(_MARK)

    def _stop(self) -> object:
        if len(self._stack) != 1 or isinstance(self._stack[0], _Mark):
            raise self._broken("unbalanced stack at the end")
        return _STOP

    def _pop(self) -> None:
        self._stack.pop()

    def _dup(self) -> None:
        self._stack.append(self._stack[-1])

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _binint(self) -> None:
        self._stack.append(int.from_bytes(self._tape.take(4), "little", signed=True))

    def _binint1(self) -> None:
        self._stack.append(self._tape.byte())

    def _binint2(self) -> None:
        self._stack.append(self._uint(2))

    def _int(self) -> None:
        text = self._tape.line()
        self._stack.append({b"00": False, b"01": True}[text] if text in (b"00", b"01") else self._decimal(text))

    def _long(self) -> None:
        self._stack.append(self._decimal(self._tape.line().rstrip(b"L")))

    def _decimal(self, text: bytes) -> int:
        if len(text) > 4000:  # quadratic to parse
            raise self._unsafe("holds an integer of thousands of digits")
        return int(text)

    def _long1(self) -> None:
        self._stack.append(int.from_bytes(self._tape.take(self._tape.byte()), "little", signed=True))

    def _long4(self) -> None:
        self._stack.append(int.from_bytes(self._short(self._uint(4)), "little", signed=True))

    def _short(self, size: int) -> bytes:
        if size > _LONGEST_STRING:
            raise self._unsafe(f"holds an integer of {size} bytes")
        return self._tape.take(size)

    def _float(self) -> None:
        self._stack.append(float(self._tape.line()))

    def _binfloat(self) -> None:
        self._stack.append(struct.unpack(">d", self._tape.take(8))[0])

    # -- strings ---------------------------------------------------------------------------------------------

    def _text(self, size: int) -> None:
        if size > _LONGEST_STRING:
            self._tape.skip(size)
            self._push(Skipped(size))
        else:
            self._push(self._tape.take(size).decode("utf-8", "surrogatepass"))

    def _bytes(self, size: int) -> None:
        if size > _LONGEST_STRING:
            self._tape.skip(size)
            self._push(Skipped(size))
        else:
            self._push(self._tape.take(size))

    def _string(self) -> None:
        line = self._tape.line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self._broken("a string without quotes")
        self._push(line[1:-1].decode("latin-1"))

    def _unicode(self) -> None:
        self._push(self._tape.line().decode("raw-unicode-escape"))

    def _binstring(self) -> None:
        # Python 2's str: text in every checkpoint that has it.
        size = int.from_bytes(self._tape.take(4), "little", signed=True)
        if size < 0:
            raise self._broken("a string of negative length")
        self._latin(size)

    def _latin(self, size: int) -> None:
        self._bytes(size)
        if isinstance(self._stack[-1], bytes):
            self._stack[-1] = self._stack[-1].decode("latin-1")

    # -- containers ------------------------------------------------------------------------------------------

    def _empty_list(self) -> None:
        self._push([])

    def _empty_dict(self) -> None:
        self._push({})

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _empty_set(self) -> None:
        self._push([])  # sets are kept as lists: their elements need not be hashable

    def _list(self) -> None:
        self._push(self._pop_mark())

    def _tuple(self) -> None:
        self._push(tuple(self._pop_mark()))

    def _tuple_of(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise self._broken("a tuple of more than there is")
        items = tuple(stack[-count:])
        del stack[-count:]
        self._push(items)

    def _dict(self) -> None:
        items = self._pop_mark()
        self._push({})
        self._update(self._stack[-1], items)

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Opaque):
            target = target.items
        if not isinstance(target, list):
            raise self._broken("an append to something that is no list")
        if len(target) >= _LONGEST_NUMBERS and all(isinstance(item, _NUMBERS) for item in items):
            return
        target.extend(items)

    def _setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update(self._stack[-1], [key, value])

    def _setitems(self) -> None:
        items = self._pop_mark()
        self._update(self._stack[-1], items)

    def _update(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise self._broken("a key without a value")
        pairs = zip(items[::2], items[1::2], strict=True)
        self._charge(len(items) // 2)
        if isinstance(target, Opaque):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update((_as_key(key), value) for key, value in pairs)
        else:
            raise self._broken("an item set on something that is no dict")

    # -- memo ------------------------------------------------------------------------------------------------

    def _put(self, index: int) -> None:
        if index not in self._memo:
            self._charge()
        self._memo[index] = self._stack[-1]

    def _memoize(self) -> None:
        self._charge()
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    # -- objects ---------------------------------------------------------------------------------------------

    def _global(self) -> None:
        module, name = self._tape.line().decode(), self._tape.line().decode()
        self._push(resolve(module, name))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise self._broken("a global whose name is no string")
        self._push(resolve(module, name))

    def _ext(self, code: int) -> None:
        self._push(Global("copyreg", f"extension {code}"))

    def _reduce(self) -> None:
        args, target = self._stack.pop(), self._stack.pop()
        self._call(target, args)

    def _call(self, target: Any, args: Any) -> None:
        if not isinstance(args, tuple):
            raise self._broken("a call without an argument tuple")
        if isinstance(target, Builder):
            try:
                self._push(target.build(args))
            except BrokenArchive as error:  # the builder does not know the file
                raise type(error)(f"{self._tape.source.path}: {error}") from None
        else:
            self._push(Opaque(_name_of(target), args))

    def _newobj(self) -> None:
        self._reduce()

    def _newobj_ex(self) -> None:
        keywords, args, target = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._push(Opaque(_name_of(target), (args, keywords)))

    def _inst(self) -> None:
        module, name = self._tape.line().decode(), self._tape.line().decode()
        self._push(Opaque(_name_of(resolve(module, name)), tuple(self._pop_mark())))

    def _obj(self) -> None:
        target, *args = self._pop_mark()
        self._push(Opaque(_name_of(target), tuple(args)))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Opaque):
            target.state = state  # dicts (OrderedDict's _metadata) and everything else lose theirs

    def _persid(self) -> None:
        raise self._unsafe("refers to a storage by a line of text, as torch never does")

    def _binpersid(self) -> None:
        self._push(self._persistent_load(self._stack.pop()))

    def _next_buffer(self) -> None:
        raise self._unsafe("refers to out-of-band buffers")


def _as_key(key: Any) -> Any:
    """A dict key that cannot be made expensive: nested tuples would be hashed again and again."""
    if isinstance(key, _SCALARS):
        return key
    if isinstance(key, tuple) and len(key) < 16 and all(isinstance(item, _SCALARS) for item in key):
        return key
    return Opaque(f"key of type {type(key).__name__}")


def _name_of(target: Any) -> str:
    if isinstance(target, (Global, Builder)):
        return target.path
    return type(target).__name__


def _sized(method: str, size: int) -> Callable[[Unpickler], None]:
    """A handler for opcodes whose argument is a length or an index of `size` bytes."""

    def handler(machine: Unpickler) -> None:
        getattr(machine, method)(machine._uint(size))

    return handler


def _fixed(method: str, value: int) -> Callable[[Unpickler], None]:
    def handler(machine: Unpickler) -> None:
        getattr(machine, method)(value)

    return handler


def _decimal_index(method: str) -> Callable[[Unpickler], None]:
    def handler(machine: Unpickler) -> None:
        getattr(machine, method)(machine._decimal(machine._tape.line()))

    return handler


def _table(rows: Iterable[tuple[bytes, Callable[[Unpickler], Any]]]) -> list[Callable[[Unpickler], Any] | None]:
    table: list[Callable[[Unpickler], Any] | None] = [None] * 256
    for opcode, handler in rows:
        table[opcode[0]] = handler
    return table


U = Unpickler
_TABLE: Final = _table(
    [
        (b"\x80", U._proto), (b"\x95", U._frame), (b"(", U._mark), (b".", U._stop), (b"0", U._pop), (b"2", U._dup),
        (b"1", lambda machine: machine._pop_mark() and None),
        (b"N", U._none), (b"\x88", U._true), (b"\x89", U._false),
        (b"J", U._binint), (b"K", U._binint1), (b"M", U._binint2), (b"I", U._int), (b"L", U._long),
        (b"\x8a", U._long1), (b"\x8b", U._long4), (b"F", U._float), (b"G", U._binfloat),
        (b"X", _sized("_text", 4)), (b"\x8c", _sized("_text", 1)), (b"\x8d", _sized("_text", 8)),
        (b"B", _sized("_bytes", 4)), (b"C", _sized("_bytes", 1)), (b"\x8e", _sized("_bytes", 8)),
        (b"\x96", _sized("_bytes", 8)), (b"S", U._string), (b"V", U._unicode),
        (b"T", U._binstring), (b"U", _sized("_latin", 1)),
        (b"]", U._empty_list), (b"}", U._empty_dict), (b")", U._empty_tuple), (b"\x8f", U._empty_set),
        (b"l", U._list), (b"t", U._tuple), (b"d", U._dict), (b"\x91", U._list),
        (b"\x85", _fixed("_tuple_of", 1)), (b"\x86", _fixed("_tuple_of", 2)), (b"\x87", _fixed("_tuple_of", 3)),
        (b"a", U._append), (b"e", U._appends), (b"\x90", U._appends), (b"s", U._setitem), (b"u", U._setitems),
        (b"p", _decimal_index("_put")), (b"q", _sized("_put", 1)), (b"r", _sized("_put", 4)), (b"\x94", U._memoize),
        (b"g", _decimal_index("_get")), (b"h", _sized("_get", 1)), (b"j", _sized("_get", 4)),
        (b"c", U._global), (b"\x93", U._stack_global), (b"i", U._inst), (b"o", U._obj),
        (b"\x82", _sized("_ext", 1)), (b"\x83", _sized("_ext", 2)), (b"\x84", _sized("_ext", 4)),
        (b"R", U._reduce), (b"\x81", U._newobj), (b"\x92", U._newobj_ex), (b"b", U._build),
        (b"P", U._persid), (b"Q", U._binpersid), (b"\x97", U._next_buffer), (b"\x98", lambda machine: None),
    ]
)  # fmt: skip
