"""The legacy container: five pickles and the raw storages behind them."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from lazyzero.container.archive import open_archive
from lazyzero.errors import BrokenArchive, LazyZeroError
from lazyzero.tensor import LazyTensor, View
from tests.forge import Raw, Tensor, legacy, write

VALUE = {"a": Tensor("11", (2, 3)), "b": Tensor("7", (3,)), "c": Tensor("11", (2,), offset=4, numel=6)}
STORAGES = [("7", 3, struct.pack("<3f", 7, 8, 9)), ("11", 6, struct.pack("<6f", *range(6)))]


def test_storages_in_any_order(tmp_path: Path) -> None:
    """The list of keys says in which order the storages follow; each is found, and shared ones stay shared."""
    for storages in (STORAGES, STORAGES[::-1]):
        root = open_archive(write(tmp_path / "a.pt", legacy(VALUE, storages))).root
        found = {name: LazyTensor(name, ref.shape, View(ref), "module").numpy().tolist() for name, ref in root.items()}
        assert found == {"a": [[0, 1, 2], [3, 4, 5]], "b": [7, 8, 9], "c": [4, 5]}
        assert root["a"].storage is root["c"].storage


def test_the_range_of_the_pickles(tmp_path: Path) -> None:
    """`Archive.pickles` covers everything in front of the storages."""
    data = legacy(VALUE, STORAGES)
    ((start, length),) = open_archive(write(tmp_path / "a.pt", data)).pickles
    assert start == 0
    assert data[length : length + 8] == struct.pack("<q", 3)


def test_every_truncation(tmp_path: Path) -> None:
    """A file cut at any byte is an error that names the file, never another object."""
    data = legacy(VALUE, STORAGES)
    path = write(tmp_path / "a.pt", data)
    for length in reversed(range(len(data))):
        os.truncate(path, length)
        with pytest.raises(LazyZeroError) as caught:
            open_archive(path)
        assert str(path) in str(caught.value)


LIES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another magic number": ({"magic": 0x1950A86A20F9469CFC6D}, STORAGES, "expected a torch archive"),
    "another protocol": ({"protocol": 1002}, STORAGES, "protocol 1001, found 1002"),
    "protocol that cannot be printed": ({"protocol": 1 << 60000}, STORAGES, "an integer of 60001 bits"),
    "big-endian": ({"system": {"little_endian": False}}, STORAGES, "big-endian"),
    "keys missing": ({"keys": ["7"]}, STORAGES, "the list of storages is not"),
    "keys too many": ({"keys": ["7", "11", "12"]}, STORAGES, "the list of storages is not"),
    "keys twice": ({"keys": ["7", "7", "11"]}, STORAGES, "the list of storages is not"),
    "keys that are numbers": ({"keys": [7, 11]}, STORAGES, "the list of storages is not"),
    "keys that are no list": ({"keys": {"7": 1, "11": 1}}, STORAGES, "the list of storages is not"),
    "no keys": ({"keys": None}, STORAGES, "the list of storages is not"),
    "wrong count": ({}, [STORAGES[0], ("11", 5, STORAGES[1][2])], "claims 24 bytes and 5 elements"),
    "negative count": ({}, [STORAGES[0], ("11", -6, STORAGES[1][2])], "claims 24 bytes and -6 elements"),
    "huge count": ({}, [STORAGES[0], ("11", (1 << 63) - 1, STORAGES[1][2])], "claims 24 bytes"),
    "data missing": ({}, [STORAGES[0], ("11", 6, STORAGES[1][2][:-1])], "the file is truncated"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(tmp_path: Path, lie: str) -> None:
    """Each is refused with the file's name."""
    changes, storages, told = LIES[lie]
    path = write(tmp_path / "a.pt", legacy(VALUE, storages, **{"keys": ["7", "11"], **changes}))
    with pytest.raises(BrokenArchive, match=told) as caught:
        open_archive(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_storage_of_two_sizes(tmp_path: Path) -> None:
    """One storage cannot have two sizes: what follows it would be found in the wrong place."""
    value = {"a": Tensor("1", (2,)), "b": Tensor("1", (4,))}
    with pytest.raises(BrokenArchive, match="in one place and"):
        open_archive(write(tmp_path / "a.pt", legacy(value, [("1", 4, bytes(16))])))


def test_views_of_old_torch(tmp_path: Path) -> None:
    """Persistent ids with a view in them (torch before 0.4) are refused, not misread."""
    value = {"a": Tensor("1", (2,), more=(("view", 0, 2),))}
    with pytest.raises(BrokenArchive, match=r"before 0\.4"):
        open_archive(write(tmp_path / "a.pt", legacy(value, [("1", 2, bytes(8))])))


def test_all_pickles_share_the_limits(tmp_path: Path) -> None:
    """Five pickles do not make five times the allowance."""
    nothing = Raw(b"N" + b"N0" * 300_000)
    value = Raw(b"N" + b"N0" * 500_000)
    with pytest.raises(BrokenArchive, match="more steps"):
        open_archive(write(tmp_path / "a.pt", legacy(value, system=nothing, keys=Raw(b"]" + b"N0" * 300_000))))
