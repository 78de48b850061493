"""The pickle machine: plain data comes out as pickle.loads gives it, everything else as something inert."""

from __future__ import annotations

import collections
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyzero.container.machine import LONGEST_NAME, LONGEST_NUMBERS, LONGEST_STRING
from lazyzero.container.objects import Global, Opaque, Skipped
from lazyzero.container.source import Source
from lazyzero.container.tape import Tape
from lazyzero.container.unpickle import Unpickler
from lazyzero.errors import BrokenArchive, UnsafeArchive
from tests.forge import text

KEYS = st.one_of(
    st.text(max_size=20), st.binary(max_size=20), st.integers(-(1 << 31), 1 << 31), st.none(), st.booleans()
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 200), 1 << 200), st.floats(allow_nan=False),
    st.text(), st.binary(),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.lists(inner, max_size=5).map(tuple), st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=20,
)


def load(path: Path, data: bytes, persistent_load: Any = None) -> Any:
    """The object a pickle gives here."""
    path.write_bytes(data)
    source = Source.open(path)
    return Unpickler(
        Tape(source, 0, source.size), persistent_load or (lambda identity: Opaque("storage", identity))
    ).load()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, written anew for each example."""
    return tmp_path_factory.mktemp("pickles") / "a.pkl"


@pytest.mark.parametrize("protocol", range(6))
@given(value=VALUES)
@settings(max_examples=60)
def test_plain_data_as_pickle_gives_it(path: Path, protocol: int, value: Any) -> None:
    """Numbers, text, bytes, lists, tuples and dicts are the same objects at every protocol."""
    if protocol < 3 and _holds_bytes(value):
        return  # Python writes bytes as a call of _codecs.encode there
    assert load(path, pickle.dumps(value, protocol)) == value


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_bytes, [*value, *value.values()]))
    return isinstance(value, bytes) or (isinstance(value, (list, tuple)) and any(map(_holds_bytes, value)))


@given(data=st.binary(max_size=200))
@settings(max_examples=300)
def test_arbitrary_bytes(path: Path, data: bytes) -> None:
    """Bytes that are no pickle end in BrokenArchive, whatever they are."""
    try:
        load(path, data)
    except BrokenArchive as error:
        assert str(path) in str(error)


def test_shared_and_circular_objects(path: Path) -> None:
    """What was one object is one object, circles included."""
    row: list[Any] = [1]
    ring: dict[str, Any] = {"rows": [row, row]}
    ring["self"] = ring
    for protocol in range(6):
        found = load(path, pickle.dumps(ring, protocol))
        assert found["rows"][0] is found["rows"][1]
        assert found["self"] is found


def test_containers_that_are_understood(path: Path) -> None:
    """OrderedDict and defaultdict are dicts, sets are lists."""
    value = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, x=[1]),
        "set": {1, 2},
        "frozen": frozenset({"a"}),
    }
    for protocol in range(6):
        found = load(path, pickle.dumps(value, protocol))
        assert list(found["ordered"].items()) == [("b", 1), ("a", 2)]
        assert found["default"] == {"x": [1]}
        assert sorted(found["set"]) == [1, 2]
        assert found["frozen"] == ["a"]


class Odd:
    """A class with state."""

    def __init__(self) -> None:
        self.step = 3


class Reduced:
    """A class that is rebuilt by a call with keyword arguments, items and state."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (Odd, (1, "two"), {"step": 4}, iter([5, 6]), iter([("k", "v")]))


def test_other_classes_are_inert(path: Path) -> None:
    """An object of any other class is its name, its arguments, its state and its items."""
    for protocol in range(6):
        found = load(path, pickle.dumps(Odd(), protocol))
        assert isinstance(found, Opaque)
        assert found.kind in (f"{__name__}.Odd", "copyreg._reconstructor", "copy_reg._reconstructor")
        assert found.field("step") == 3
        assert found.field("other") is None
        found = load(path, pickle.dumps(Reduced(), protocol))
        assert isinstance(found, Opaque)
        assert found.kind == f"{__name__}.Odd"
        assert found.args == (1, "two")
        assert found.field("step") == 4
        assert found.items == [5, 6, ("k", "v")]


def test_globals_are_names(path: Path) -> None:
    """A class or function that is referred to is its name; unknown ones differ only in that."""
    found = load(path, b"(cos\nsystem\ncos\nsystem\ncno.such\nthing\nt.")
    assert found == (Global("os", "system"), Global("os", "system"), Global("no.such", "thing"))
    assert [each.path for each in found[1:]] == ["os.system", "no.such.thing"]
    assert load(path, b"\x80\x04\x8c\x02os\x8c\x06system\x93.") == Global("os", "system")
    assert load(path, b"\x82\x07.") == Global("copyreg", "extension 7")


def test_every_way_to_call(path: Path) -> None:
    """REDUCE, NEWOBJ, NEWOBJ_EX, OBJ and INST of an unknown name all leave the same inert object."""
    call = b"cos\nsystem\n(S'id'\nt"
    for code in (call + b"R", call + b"\x81", call + b"}\x92", b"(cos\nsystem\nS'id'\no", b"(S'id'\nios\nsystem\n"):
        found = load(path, code + b".")
        assert isinstance(found, Opaque)
        assert found.kind == "os.system"
        assert found.args in (("id",), (("id",), {}))


def test_python_2_strings_are_text(path: Path) -> None:
    """`str` of Python 2 is text in every checkpoint that has it."""
    for code in (b"S'abc'\n", b"U\x03abc", b"T\x03\0\0\0abc", b"Vabc\n"):
        assert load(path, code + b".") == "abc"
    assert load(path, b"U\x02\xff\xe9.") == "\xff\xe9"


def test_long_strings_are_skipped(path: Path) -> None:
    """Text and bytes beyond the limit leave their length, whatever opcode they come by; nothing of them is read."""
    size = LONGEST_STRING + 1
    for code in (b"X", b"B", b"T"):
        assert load(path, code + struct.pack("<I", size) + b"a" * size + b".") == Skipped(size)
    for code in (b"\x8d", b"\x8e", b"\x96"):
        assert load(path, code + struct.pack("<Q", size) + b"a" * size + b".") == Skipped(size)
    assert load(path, b"X" + struct.pack("<I", size - 1) + b"a" * (size - 1) + b".") == "a" * (size - 1)


@pytest.mark.parametrize("protocol", range(6))
def test_long_lists_of_numbers_are_cut(path: Path, protocol: int) -> None:
    """Of a long list of numbers the beginning is kept, and what follows the list is intact."""
    numbers = [*range(200_000), -1, 1 << 40, -(1 << 70), 2.5, None, True]
    found = load(path, pickle.dumps({"numbers": numbers, "after": ["x"]}, protocol))
    assert len(numbers) > len(found["numbers"]) >= LONGEST_NUMBERS
    assert found["numbers"][:LONGEST_NUMBERS] == numbers[:LONGEST_NUMBERS]
    assert found["after"] == ["x"]


def test_a_list_of_millions_costs_nothing(path: Path) -> None:
    """Five million integers of a data loader's state are passed over, not counted as steps."""
    batch = b"(" + b"".join(b"J" + struct.pack("<i", 70_000 + i) for i in range(1000)) + b"e"
    found = load(path, b"\x80\x02}" + text("numbers") + b"]" + batch * 5000 + b"s" + text("after") + b"Ns.")
    assert LONGEST_NUMBERS <= len(found["numbers"]) < LONGEST_NUMBERS + 1000
    assert found["after"] is None


def test_other_long_lists_are_kept(path: Path) -> None:
    """Lists of anything but numbers are whole: names, pairs, and tuples of numbers behind a long list."""
    names = [f"n{i}" for i in range(LONGEST_NUMBERS + 2000)]
    assert load(path, pickle.dumps(names, 2)) == names
    rows = [(i, i + 1, i + 2, i + 3) for i in range(LONGEST_NUMBERS + 2000)]
    assert load(path, pickle.dumps(rows, 2)) == rows


def test_keys_that_can_be_made_to_collide_are_inert(path: Path) -> None:
    """Floats, tuples and large integers, whose hashes anybody can choose, become keys of their own."""
    found = load(path, pickle.dumps({1.5: 1, (1, 2): 2, 1 << 61: 3, "a": 4, 5: 5, None: 6, b"b": 7, True: 8}, 4))
    assert {key: value for key, value in found.items() if not isinstance(key, Opaque)} == {
        "a": 4, 5: 5, None: 6, b"b": 7, True: 8,
    }  # fmt: skip
    assert [value for key, value in found.items() if isinstance(key, Opaque)] == [1, 2, 3]


BROKEN = {
    "empty": b"",
    "only a header": b"\x80\x02",
    "no stop": b"N",
    "stop on nothing": b".",
    "two objects": b"NN.",
    "a mark at the end": b"(.",
    "no mark": b"Nt.",
    "pop of nothing": b"0N.",
    "protocol 6": b"\x80\x06N.",
    "unknown opcode": b"\xff.",
    "memo that is not there": b"h\x05.",
    "key without value": b"}(Ku.",
    "item of a number": b"K\x01NNs.",
    "append to a dict": b"}Na.",
    "append to a tuple": b")Na.",
    "call without tuple": b"cos\nsystem\nNR.",
    "class that is no text": b"NN\x93.",
    "text beyond the end": b"X\xff\xff\xff\xffabc.",
    "eight-byte length": b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.",
    "negative length": b"T\xff\xff\xff\xffabc.",
    "line without end": b"V" + b"a" * 200_000,
    "invalid UTF-8": b"X\x02\0\0\0\xff\xff.",
    "not an integer": b"Iabc\n.",
    "not a float": b"Fabc\n.",
    "text without quotes": b"Sabc\n.",
    "negative memo index": b"Np-1\n",
    "obj of nothing": b"(o.",
    "tuple of more than there is": b"N\x87.",
    "tensor without arguments": b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "parameter without arguments": b"ctorch._utils\n_rebuild_parameter\n)R.",
    "half a pair": b"ccollections\nOrderedDict\n(](](K\x01ee",
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_pickles(path: Path, what: str) -> None:
    """Each ends in BrokenArchive with the file's name and no other exception."""
    with pytest.raises(BrokenArchive) as caught:
        load(path, BROKEN[what])
    assert str(caught.value).startswith(f"{path}: ")


UNSAFE = {
    "persistent id as a line": b"P0\n.",
    "out-of-band buffer": b"\x97.",
    "an integer of a megabyte": b"\x8b\0\0\x10\0" + bytes(1 << 20) + b".",
    "an integer of thousands of digits": b"L" + b"7" * 5000 + b"L\n.",
    "a long class name": b"c" + b"m" * (LONGEST_NAME + 1) + b"\nn\n.",
    "a tensor of no storage": b"ctorch._utils\n_rebuild_tensor_v2\n(NK\0))tR.",
}


@pytest.mark.parametrize("what", UNSAFE)
def test_unsafe_pickles(path: Path, what: str) -> None:
    """Each is refused for what it asks, with the file's name."""
    with pytest.raises(UnsafeArchive) as caught:
        load(path, UNSAFE[what])
    assert str(caught.value).startswith(f"{path}: ")


def test_every_opcode_of_python_is_known(path: Path) -> None:
    """None of the opcodes that Python's own picklers or pickletools know ends in `an unknown opcode`."""
    for opcode in pickletools.opcodes:
        try:
            load(path, opcode.code.encode("latin-1") + b"." * 16)
        except BrokenArchive as error:
            assert "unknown opcode" not in str(error), opcode.name


def test_a_pickle_may_be_followed_by_another(path: Path) -> None:
    """The legacy container strings pickles together: each load ends behind its STOP, with a memo of its own."""
    path.write_bytes(pickle.dumps([1, "a"], 2) + pickle.dumps({"b": "a"}, 2) + b"rest")
    source = Source.open(path)
    tape = Tape(source, 0, source.size)
    machine = Unpickler(tape, Opaque)
    assert machine.load() == [1, "a"]
    assert machine.load() == {"b": "a"}
    assert tape.take(4) == b"rest"
