"""The zip directory: every honest form is read, and no lie about names, places or sizes survives."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from lazyzero.container.archive import open_archive
from lazyzero.container.objects import TensorRef
from lazyzero.container.source import Source
from lazyzero.container.zipdir import data_offset, read_directory
from lazyzero.errors import BrokenArchive, LazyZeroError, UnsafeArchive
from lazyzero.tensor import LazyTensor, View
from tests.forge import Part, Raw, Tensor, Zip, archive, parts, pickled, write

VALUE = {"t": Tensor("0", (4,)), "n": 7}
DATA = struct.pack("<4f", 1, 2, 3, 4)


def members(data: bytes = DATA, root: str = "archive") -> list[Part]:
    """The parts of an archive that holds VALUE."""
    return parts(pickled(VALUE), {"0": data}, root)


def numbers(path: Path) -> list[float]:
    """The elements of VALUE's tensor as the file has them."""
    ref = open_archive(path).root["t"]
    assert isinstance(ref, TensorRef)
    found: list[float] = LazyTensor("t", ref.shape, View(ref), "module").numpy().tolist()
    return found


def swapped(parts: list[Part], name: str, **changes: object) -> list[Part]:
    """The parts with one of them changed."""
    return [replace(part, **changes) if part.raw_name.endswith(name.encode()) else part for part in parts]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"zip64": True},
        {"descriptors": True},
        {"zip64": True, "descriptors": True},
        {"comment": b"a comment"},
        {"comment": b"x" * 65535},
        {"trailing": b"\0" * 512},
    ],
    ids=str,
)
def test_honest_forms(tmp_path: Path, form: dict[str, object]) -> None:
    """zip64 fields, data descriptors, a comment, a block of zeros behind the end: all are read alike."""
    path = write(tmp_path / "a.pt", Zip(members(), **form).write())  # type: ignore[arg-type]
    assert numbers(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("root", ["archive", "mp_rank_00_model_states", "a.b c", "ünïcode", "x" * 200])
def test_any_root_name(tmp_path: Path, root: str) -> None:
    """torch names the root after the file, or `archive`; any one name will do."""
    assert numbers(write(tmp_path / "a.pt", Zip(members(root=root)).write())) == [1, 2, 3, 4]


def test_alignment_in_the_local_header_only(tmp_path: Path) -> None:
    """torch aligns data by an extra field that the directory does not know of: the local header decides."""
    padded = swapped(members(), "data/0", local_extra=b"FB" + struct.pack("<H", 57) + bytes(57))
    assert numbers(write(tmp_path / "a.pt", Zip(padded).write())) == [1, 2, 3, 4]


def test_order_of_members_does_not_matter(tmp_path: Path) -> None:
    """The storages may stand before the pickle."""
    assert numbers(write(tmp_path / "a.pt", Zip(members()[::-1]).write())) == [1, 2, 3, 4]


def test_more_in_the_archive_than_torch_writes(tmp_path: Path) -> None:
    """Members nobody refers to are passed over."""
    more = [*members(), Part("archive/.format_version", b"1"), Part("archive/.data/serialization_id", b"0" * 40)]
    assert numbers(write(tmp_path / "a.pt", Zip(more).write())) == [1, 2, 3, 4]


def test_directory_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Offsets above 4 GiB come from the zip64 fields (a sparse file of 5 GB)."""
    far = 5 << 30
    data = Zip(members(), zip64=True).write()
    honest = read_directory(Source.open(write(tmp_path / "near.pt", data)))
    start = min(member.entry for member in honest.values())
    moved = Zip([replace(part, header=m.header + far) for part, m in zip(members(), honest.values(), strict=True)])
    tail = replace(moved, zip64=True, lies={"start": start + far, "locator": far + _end64(data)}).write()[start:]
    path = tmp_path / "far.pt"
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(far)
        file.write(data[:start] + tail)
    assert numbers(path) == [1, 2, 3, 4]


def _end64(data: bytes) -> int:
    return data.rindex(b"PK\x06\x06")


def test_entries_are_where_members_say(tmp_path: Path) -> None:
    """Member.entry, .header and .end are byte offsets in the file."""
    data = Zip(members()).write()
    source = Source.open(write(tmp_path / "a.pt", data))
    found = read_directory(source)
    assert list(found) == [part.name for part in members()]
    for member in found.values():
        assert data[member.entry : member.entry + 4] == b"PK\x01\x02"
        assert data[member.header : member.header + 4] == b"PK\x03\x04"
        assert member.header < data_offset(source, member) <= member.end - member.size
    offset = data_offset(source, found["archive/data/0"])
    assert data[offset : offset + 16] == DATA


LIES = {
    "duplicate member": (Zip([*members(), members()[0]]), "appears twice"),
    "two members at one place": (Zip(swapped(members(), "version", header=0)), "overlaps"),
    "a member inside another": (Zip(swapped(members(), "data.pkl", size=1 << 20)), "overlaps"),
    "terabytes in zip64": (Zip(swapped(members(), "data/0", size=1 << 42), zip64=True), "overlaps"),
    "2**64 - 1 bytes": (Zip(swapped(members(), "data/0", size=(1 << 64) - 1), zip64=True), "overlaps"),
    "sizes that differ": (Zip(swapped(members(), "data/0", packed=3)), "claims 16 bytes but stores 3"),
    "header behind the directory": (Zip(swapped(members(), "version", header=1 << 20)), "overlaps"),
    "compressed": (Zip(swapped(members(), "data/0", method=8)), "compressed"),
    "encrypted": (Zip(swapped(members(), "data/0", flags=1)), "encrypted"),
    "dot dot": (Zip([*members(), Part("archive/../../etc/passwd")]), "points outside"),
    "absolute": (Zip([*members(), Part("/etc/passwd")]), "points outside"),
    "NUL": (Zip([*members(), Part("archive/data/0\0.txt")]), "points outside"),
    "no zip64 field": (Zip(swapped(members(), "data/0", extra=b""), zip64=True), "zip64 sizes are missing"),
    "half a zip64 field": (Zip(swapped(members(), "data/0", extra=b"\1\0\4\0abcd"), zip64=True), "zip64 sizes are"),
    "several disks": (Zip(members(), lies={"disk": 1}), "in several parts"),
    "more entries than there are": (Zip(members(), lies={"count": 60000}), "ends early"),
    "2**60 entries": (Zip(members(), zip64=True, lies={"count": 1 << 60}), "more than any checkpoint"),
    "huge directory": (Zip(members(), zip64=True, lies={"size": 1 << 60}), "more than any checkpoint"),
    "directory outside": (Zip(members(), lies={"start": 1 << 30}), "lies outside the file"),
    "directory over its own end": (Zip(members(), lies={"start": 120}), "damaged|outside"),
    "zip64 record outside": (Zip(members(), zip64=True, lies={"locator": 1 << 50}), "lies outside the file"),
    "zip64 record elsewhere": (Zip(members(), zip64=True, lies={"locator": 3}), "not found where announced"),
    "no pickle": (Zip(members()[1:]), "expected one data.pkl in the archive, found 0"),
    "two pickles": (Zip([*members(), Part("other/data.pkl")]), "expected one data.pkl in the archive, found 2"),
    "no storage": (Zip([part for part in members() if part.name != "archive/data/0"]), "storage '0' is not in the"),
    "short storage": (Zip(members(DATA[:15])), "claims 16 bytes, the archive holds 15"),
    "byte order": (Zip(swapped(members(), "byteorder", data=b"big")), "byte order is b'big'"),
    "long byte order": (Zip(swapped(members(), "byteorder", data=b"little" * 9)), "byte order is"),
    "nothing but an end": (Zip([]), "expected one data.pkl in the archive, found 0"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_in_the_directory(tmp_path: Path, lie: str) -> None:
    """Each is refused when the archive is opened, by a line that names the file."""
    form, told = LIES[lie]
    path = write(tmp_path / "a.pt", form.write())
    with pytest.raises(BrokenArchive, match=told) as caught:
        open_archive(path)
    assert str(caught.value).startswith(f"{path}: ")


LOCAL_LIES = {
    "data in the next member": ({"local_extra": bytes(100)}, "reaches past byte"),
    "compressed after all": ({"local_method": 8}, "is compressed"),
    "no header": ({"magic": b"PK\x03\x05"}, "expected a zip member"),
}


@pytest.mark.parametrize("lie", LOCAL_LIES)
def test_lies_in_a_local_header(tmp_path: Path, lie: str) -> None:
    """A local header that contradicts the directory is found when its storage is read; none is read at its word."""
    changes, told = LOCAL_LIES[lie]
    honest = Zip(members()).write()
    liar = bytearray(Zip(swapped(members(), "data/0", **changes)).write())
    if "local_extra" in changes:  # announced, but not there: what it would skip is the next member
        liar = bytearray(honest)
        at = honest.index(b"archive/data/0")
        liar[at - 2 : at] = struct.pack("<H", 100)
    path = write(tmp_path / "a.pt", bytes(liar))
    with pytest.raises(BrokenArchive, match=told):
        numbers(path)


def test_every_truncation(tmp_path: Path) -> None:
    """An archive cut at any byte is an error that names the file, never another object."""
    data = archive({"t": Tensor("0", (3,)), "text": "x" * 50})
    path = write(tmp_path / "a.pt", data)
    for length in reversed(range(len(data))):
        os.truncate(path, length)
        with pytest.raises(LazyZeroError) as caught:
            open_archive(path)
        assert str(path) in str(caught.value)


def test_too_many_members(tmp_path: Path) -> None:
    """A directory of a million members is refused before they are read."""
    with pytest.raises(UnsafeArchive, match="1000000 members"):
        open_archive(write(tmp_path / "a.pt", Zip(members(), zip64=True, lies={"count": 1_000_000}).write()))


def test_one_storage_under_two_types(tmp_path: Path) -> None:
    """A storage that is said to be of two types or sizes is refused: one of them would be read wrongly."""
    for other in (Tensor("0", (4,), kind="LongStorage"), Tensor("0", (2,)), Tensor("0", (8,), kind="HalfStorage")):
        value = {"a": Tensor("0", (4,)), "b": other}
        path = write(tmp_path / "a.pt", Zip(parts(pickled(value), {"0": bytes(64)})).write())
        with pytest.raises(UnsafeArchive, match="in one place and"):
            open_archive(path)


def test_unknown_storage_class(tmp_path: Path) -> None:
    """A storage class of a later torch leaves an inert object, even where the archive lacks its data."""
    value = {"a": Tensor("9", (4,), kind="ComplexHalfStorage"), "t": Tensor("0", (4,))}
    root = open_archive(write(tmp_path / "a.pt", Zip(parts(pickled(value), {"0": bytes(16)})).write())).root
    assert not isinstance(root["a"], TensorRef)
    assert isinstance(root["t"], TensorRef)


@pytest.mark.parametrize(
    "identity",
    [
        "storage",
        ("storage", "FloatStorage", "0", "cpu", 4),
        ("module", Raw(b"ctorch\nFloatStorage\n"), "0", "cpu", 4),
        ("storage", Raw(b"cos\nsystem\n"), "0", "cpu", 4),
        ("storage", Raw(b"ctorch\nFloatStorage\n"), 0, "cpu", 4),
        ("storage", Raw(b"ctorch\nFloatStorage\n"), "0", "cpu", -1),
        ("storage", Raw(b"ctorch\nFloatStorage\n"), "0", "cpu", 1 << 70),
        ("storage", Raw(b"ctorch\nFloatStorage\n"), "0", "cpu", 4.0),
        ("storage", Raw(b"ctorch\nFloatStorage\n"), "0", "cpu", True),
        ("storage",),
        [],
    ],
    ids=repr,
)
def test_persistent_ids_that_are_no_storages(tmp_path: Path, identity: object) -> None:
    """A persistent id is torch's tuple of five or an error."""
    code = pickled(identity)[2:-1] + b"Q"
    path = write(tmp_path / "a.pt", Zip(parts(pickled({"t": Raw(code)}), {"0": DATA})).write())
    with pytest.raises(UnsafeArchive, match="persistent id"):
        open_archive(path)
