"""Tensors out of a pickle: every claim about offset, shape and stride is held against the storage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from lazyzero.container.archive import open_archive
from lazyzero.container.objects import Opaque, TensorRef
from lazyzero.errors import UnsafeArchive
from lazyzero.tensor import LazyTensor, View
from tests.forge import Call, Raw, Tensor, Zip, global_, parts, pickled, write

STORAGE = struct.pack("<8f", *range(8))


def opened(path: Path, value: Any) -> Any:
    """What an archive with the one storage "0" of eight floats gives for `value`."""
    return open_archive(write(path / "a.pt", Zip(parts(pickled({"t": value}), {"0": STORAGE})).write())).root["t"]


def view(shape: Any, stride: Any, offset: Any = 0) -> Tensor:
    """A view of the eight floats."""
    return Tensor("0", shape, stride, offset, numel=8)


HONEST = {
    "whole": (view((8,), (1,)), list(range(8))),
    "matrix": (view((2, 4), (4, 1)), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "transposed": (view((4, 2), (1, 4)), [[0, 4], [1, 5], [2, 6], [3, 7]]),
    "last element": (view((1,), (1,), 7), [7]),
    "scalar": (view((), (), 3), 3),
    "steps": (view((4,), (2,), 1), [1, 3, 5, 7]),
    "repeated": (view((2, 3), (0, 1), 5), [[5, 6, 7], [5, 6, 7]]),
    "windows": (view((3, 4), (2, 1)), [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]),
    "empty at the end": (view((0,), (1,), 8), []),
    "empty of a large shape": (view((0, 1 << 40), (1 << 40, 1)), []),
    "stride of a single row": (view((1, 8), (1 << 61, 1)), [list(range(8))]),
    "lists for tuples": (view([2, 2], [2, 1]), [[0, 1], [2, 3]]),
}


@pytest.mark.parametrize("what", HONEST)
def test_honest_views(tmp_path: Path, what: str) -> None:
    """Any view that stays inside its storage is read."""
    tensor, values = HONEST[what]
    ref = opened(tmp_path, tensor)
    assert isinstance(ref, TensorRef)
    assert LazyTensor("t", ref.shape, View(ref), "module").numpy().tolist() == values


DISHONEST = {
    "one element too many": view((9,), (1,)),
    "offset at the end": view((1,), (1,), 8),
    "offset past the end, empty": view((0,), (1,), 9),
    "negative offset": view((1,), (1,), -1),
    "huge offset": view((1,), (1,), 1 << 62),
    "offset that overflows 64 bits": view((1,), (1,), (1 << 64) + 1),
    "offset that is no number": view((1,), (1,), "0"),
    "offset that is a truth": view((1,), (1,), True),
    "offset that is a fraction": view((1,), (1,), 0.5),
    "negative size": view((-1,), (1,)),
    "negative sizes that make a positive": view((-2, -4), (4, 1)),
    "negative stride": view((8,), (-1,), 7),
    "huge size": view((1 << 62,), (1,)),
    "sizes whose product overflows": view((1 << 33, 1 << 33), (1, 1)),
    "size without stride": view((2, 2), (1,)),
    "stride without size": view((), (1,)),
    "stride past the end": view((2, 2), (7, 1)),
    "huge stride": view((2,), (1 << 61,)),
    "terabytes of nothing": view((1 << 40,), (0,)),
    "exabytes in many dimensions": view((1 << 10,) * 6, (0,) * 6),
    "65 dimensions": view((1,) * 65, (1,) * 65),
    "size that is no tuple": view(8, (1,)),
    "size that is text": view("8", (1,)),
    "size of fractions": view((2.0,), (1,)),
    "size of truths": view((True,), (1,)),
    "size of everything": view((Raw(b"]"),), (1,)),
}


@pytest.mark.parametrize("what", DISHONEST)
def test_dishonest_views(tmp_path: Path, what: str) -> None:
    """Any other is refused when the archive is opened, with the file's name."""
    with pytest.raises(UnsafeArchive) as caught:
        opened(tmp_path, DISHONEST[what])
    assert str(caught.value).startswith(f"{tmp_path / 'a.pt'}: ")


def test_expanded_tensors_have_a_limit(tmp_path: Path) -> None:
    """A mask expanded to a gigabyte is what people save; beyond that nothing is gained but a full disk."""
    assert opened(tmp_path, view((1 << 28,), (0,))).numel == 1 << 28
    with pytest.raises(UnsafeArchive, match=r"claims 1073741828 bytes, its storage holds 32"):
        opened(tmp_path, view(((1 << 28) + 1,), (0,)))


def storage() -> Raw:
    """The storage alone."""
    return Raw(pickled(("storage", Raw(global_("torch", "FloatStorage")), "0", "cpu", 8))[2:-1] + b"Q")


def test_dtype_of_the_third_rebuild_function(tmp_path: Path) -> None:
    """`_rebuild_tensor_v3` names the element type; one not known here is inert, never taken for bytes."""
    for name, known in (("float8_e4m3fn", True), ("float8_e8m0fnu", False), ("quint8", False)):
        dtype = Raw(global_("torch", name))
        found = opened(
            tmp_path, Call("torch._utils", "_rebuild_tensor_v3", (storage(), 0, (8,), (1,), False, None, dtype))
        )
        assert isinstance(found, TensorRef if known else Opaque)
        assert not known or found.dtype.name == name


def test_flags_of_the_second_rebuild_function(tmp_path: Path) -> None:
    """Metadata that says a tensor is conjugated or negated makes it inert; metadata without a true flag does not."""
    for metadata, plain in (({"conj": False}, True), ({}, True), ({"conj": True}, False), ({"neg": True}, False)):
        args = (storage(), 0, (8,), (1,), False, None, metadata)
        found = opened(tmp_path, Call("torch._utils", "_rebuild_tensor_v2", args))
        assert isinstance(found, TensorRef if plain else Opaque)


def test_calls_inside_calls(tmp_path: Path) -> None:
    """`_rebuild_from_type_v2` passes on to a builder only, and not to itself."""
    inner = (storage(), 0, (8,), (1,), False, None)
    tensor = Raw(global_("torch._utils", "_rebuild_tensor_v2"))
    again = Raw(global_("torch._tensor", "_rebuild_from_type_v2"))
    kind = Raw(global_("torch", "Tensor"))
    assert isinstance(
        opened(tmp_path, Call("torch._tensor", "_rebuild_from_type_v2", (tensor, kind, inner))), TensorRef
    )
    nested = Call("torch._tensor", "_rebuild_from_type_v2", (again, kind, (tensor, kind, inner)))
    assert isinstance(opened(tmp_path, nested), Opaque)
    evil = Call("torch._tensor", "_rebuild_from_type_v2", (Raw(global_("os", "system")), kind, ("id",), {}))
    found = opened(tmp_path, evil)
    assert isinstance(found, Opaque)
    assert found.kind == "os.system"
