"""The lower half of the pickle machine: stack, memo, constants and strings, and the account of what a file may take.

What a file may ask for is bounded by what it costs here, not by what it says: so many bytes of memory and so many steps
for all pickles of a file. A step is the time of a simple opcode; every tensor under a name allows for some more. Strings beyond 64 KiB are skipped unread and long runs of plain numbers are cut, so that a large client
state costs time but no memory.
"""

from __future__ import annotations

import re
import struct
from sys import getsizeof
from typing import Any, Final

from lazyzero.container.brief import brief
from lazyzero.container.objects import Skipped
from lazyzero.container.tape import Tape
from lazyzero.errors import BrokenArchive, LazyZeroError, UnsafeArchive

ROOM: Final = 128 << 20  # bytes of objects, in the estimates of the constants below
MOST_STEPS: Final = 1_500_000
STEPS_PER_TENSOR: Final = 60  # some 90 are what a parameter takes: its tensor, its name, its shape
MOST_TENSORS: Final = 90_000  # that allow for more
LONGEST_STRING: Final = 64 << 10  # bytes; a longer one is skipped
LONGEST_NAME: Final = 512  # bytes of a module's or a class's name
LONGEST_NUMBERS: Final = 65_536  # entries of a list of plain numbers that are kept
DEEPEST_STACK: Final = 200_000

# What CPython takes for each, in bytes, with what its allocator adds.
NUMBER: Final = 32
SLOT: Final = 9  # an entry of a list or a tuple
PAIR: Final = 64  # an entry of a dict
OBJECT: Final = 72  # an empty container, or a small object of ours
INERT: Final = 144  # an Opaque and its list

NUMBERS: Final = (int, float, bool, type(None))
_LONGS = rb"|".join(rb"\x8a\x%02x.{%d}" % (size, size) for size in range(1, 10))
# The items of one batch of a list, as Python's picklers write them: numbers up to the APPENDS.
_NUMBER_RUN = re.compile(rb"(?:K.|M..|J.{4}|G.{8}|[N\x88\x89]|" + _LONGS + rb")+(?=e)", re.DOTALL)
_RUN_BYTES = 16 << 10  # of 1000 such items
_BYTES_PER_STEP = 64  # of a run passed over, which take the time of one opcode


class Mark:
    """What MARK leaves on the stack."""

    __slots__ = ()


MARK: Final = Mark()


class Machine:
    """The state of an unpickler and the opcodes that make constants."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._byte, self._take = tape.byte, tape.take
        self._stack: list[Any] = []
        self._memo: list[Any] = []  # picklers count from 0 on
        self._sparse: dict[int, Any] = {}  # the memo of those who do not
        self._room = ROOM
        self._steps = MOST_STEPS
        self._tensors = MOST_TENSORS

    # -- the account -----------------------------------------------------------------------------------------

    def broken(self, what: str) -> LazyZeroError:
        """The error for a pickle that makes no sense."""
        path = self._tape.source.path
        return BrokenArchive(f"{path}: the pickle is damaged at byte {self._tape.position} ({what[:160]})")

    def unsafe(self, what: str) -> LazyZeroError:
        """The error for a pickle that asks for too much."""
        return UnsafeArchive(f"{self._tape.source.path}: the pickle {what}; refused")

    def charge(self, nbytes: int) -> None:
        """Takes memory from what is left. Raises UnsafeArchive when there is none."""
        self._room -= nbytes
        if self._room < 0:
            raise self.unsafe(f"describes objects of more than {ROOM >> 20} MiB")

    def walk(self, steps: int) -> None:
        """Takes time from what is left, and looks at the depth of the stack. Raises UnsafeArchive."""
        self._steps -= steps
        if self._steps + STEPS_PER_TENSOR * (MOST_TENSORS - max(self._tensors, 0)) < 0:
            raise self.unsafe("takes more steps than any checkpoint does")
        if len(self._stack) > DEEPEST_STACK:
            raise self.unsafe("nests deeper than any checkpoint does")

    def push(self, value: Any, nbytes: int) -> None:
        """Puts a value that takes memory on the stack."""
        self._room -= nbytes
        if self._room < 0:
            self.charge(0)
        self._stack.append(value)

    def pop_mark(self) -> list[Any]:
        """Takes everything above the topmost mark, and the mark."""
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise self.broken("no mark on the stack")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def uint(self, size: int) -> int:
        """An unsigned integer of `size` bytes."""
        return int.from_bytes(self._take(size), "little")

    # -- numbers ---------------------------------------------------------------------------------------------

    def _proto(self) -> None:
        if self._byte() > 5:
            raise self.broken("a pickle protocol newer than 5")

    def _frame(self) -> None:
        self._take(8)

    def _mark(self) -> None:
        stack = self._stack
        if stack:
            top = stack[-1]
            if type(top) is list and len(top) >= LONGEST_NUMBERS and isinstance(top[-1], NUMBERS):
                self.walk(self._tape.pass_over(_NUMBER_RUN, _RUN_BYTES) // _BYTES_PER_STEP)
        stack.append(MARK)

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
        self.push(int.from_bytes(self._take(4), "little", signed=True), NUMBER)

    def _binint1(self) -> None:
        self._stack.append(self._byte())

    def _binint2(self) -> None:
        self.push(int.from_bytes(self._take(2), "little"), NUMBER)

    def _int(self) -> None:
        text = self._tape.line()
        if text in (b"00", b"01"):
            self._stack.append(text == b"01")
        else:
            self._integer(self.decimal(text))

    def _long(self) -> None:
        self._integer(self.decimal(self._tape.line().rstrip(b"L")))

    def decimal(self, text: bytes) -> int:
        """An integer out of its digits."""
        if len(text) > 1000:  # quadratic to parse
            raise self.unsafe("holds an integer of thousands of digits")
        self._steps -= len(text) // 32
        return int(text)

    def _long1(self) -> None:
        self._integer(int.from_bytes(self._take(self._byte()), "little", signed=True))

    def _long4(self) -> None:
        size = self.uint(4)
        if size > LONGEST_STRING:
            raise self.unsafe(f"holds an integer of {size} bytes")
        self._integer(int.from_bytes(self._take(size), "little", signed=True))

    def _integer(self, value: int) -> None:
        self._steps -= 1
        self.push(value, getsizeof(value))

    def _float(self) -> None:
        self.push(float(self._tape.line()), NUMBER)

    def _binfloat(self) -> None:
        self.push(struct.unpack(">d", self._take(8))[0], NUMBER)

    # -- strings ---------------------------------------------------------------------------------------------

    def _text(self, size: int) -> None:
        if size > LONGEST_STRING:
            self._skip(size)
        else:
            self._steps -= 3
            text = self._take(size).decode("utf-8", "surrogatepass")
            self.push(text, getsizeof(text))

    def _bytes(self, size: int) -> None:
        if size > LONGEST_STRING:
            self._skip(size)
        else:
            self.push(self._take(size), 64 + size)

    def _skip(self, size: int) -> None:
        self._tape.skip(size)
        self.push(Skipped(size), OBJECT)

    def _string(self) -> None:
        line = self._tape.line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise self.broken("a string without quotes")
        self._latin_text(line[1:-1])

    def _unicode(self) -> None:
        text = self._tape.line().decode("raw-unicode-escape")
        self.push(text, getsizeof(text))

    def _binstring(self) -> None:
        size = int.from_bytes(self._take(4), "little", signed=True)
        if size < 0:
            raise self.broken("a string of negative length")
        self._latin(size)

    def _latin(self, size: int) -> None:
        # Python 2's str: text in every checkpoint that has it.
        if size > LONGEST_STRING:
            self._skip(size)
        else:
            self._latin_text(self._take(size))

    def _latin_text(self, raw: bytes) -> None:
        text = raw.decode("latin-1")
        self.push(text, getsizeof(text))

    def name(self, raw: str | bytes) -> str:
        """A module's or a class's name. Raises UnsafeArchive for one that is too long."""
        if len(raw) > LONGEST_NAME:
            raise self.unsafe(f"refers to a class by a name of {len(raw)} characters: {brief(raw[:40])}")
        self._steps -= 2
        return raw if isinstance(raw, str) else raw.decode()

    # -- memo ------------------------------------------------------------------------------------------------

    def _put(self, index: int) -> None:
        memo = self._memo
        if index == len(memo):
            self._room -= SLOT
            memo.append(self._stack[-1])
        elif 0 <= index < len(memo):
            memo[index] = self._stack[-1]
        else:
            self.charge(2 * PAIR)
            self._sparse[index] = self._stack[-1]

    def _binput(self) -> None:
        self._put(self._byte())

    def _memoize(self) -> None:
        self._put(len(self._memo) + len(self._sparse))

    def _get(self, index: int) -> None:
        memo = self._memo
        self._stack.append(memo[index] if 0 <= index < len(memo) else self._sparse[index])

    def _binget(self) -> None:
        self._get(self._byte())
