"""What torch.save writes is read as torch.load reads it, bit for bit, without torch."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyzero.container.archive import open_archive
from lazyzero.container.machine import MOST_STEPS, MOST_TENSORS, ROOM, STEPS_PER_TENSOR
from lazyzero.container.objects import Opaque, TensorRef
from lazyzero.container.unpickle import Unpickler
from lazyzero.errors import BrokenArchive, UnsafeArchive
from lazyzero.tensor import LazyTensor, View

CONTAINERS = {"zip": True, "legacy": False}
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def save(value: Any, path: Path, container: str = "zip", **options: Any) -> Path:
    """torch.save into one of its containers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its own storage classes are deprecated
        torch.save(value, path, _use_new_zipfile_serialization=CONTAINERS[container], **options)
    return path


def lazy(ref: Any) -> LazyTensor:
    """A reference out of a pickle, as a tensor that can be read."""
    assert isinstance(ref, TensorRef)
    return LazyTensor("t", ref.shape, View(ref), "module")


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(ref: Any, tensor: torch.Tensor) -> None:
    """Shape, dtype and every bit, through numpy, torch and chunks."""
    found = lazy(ref)
    assert found.shape == tuple(tensor.shape)
    assert found.dtype.name == str(tensor.dtype).removeprefix("torch.")
    assert found.numpy().tobytes() == bits(tensor)
    assert b"".join(chunk.tobytes() for chunk in found.chunks(64)) == bits(tensor)
    loaded = found.torch()
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert bits(loaded) == bits(tensor)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits, NaNs among them; for bool random truth."""
    raw = torch.randint(0, 256, (int(np.prod(shape)) * dtype.itemsize,), dtype=torch.uint8)
    return (raw % 2).bool().reshape(shape) if dtype == torch.bool else raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, container: str) -> None:
    """Every element type torch can save and numpy or ml_dtypes can hold is read bit for bit."""
    tensor = random(3, 5, dtype=dtype)
    assert_same(open_archive(save({"t": tensor}, tmp_path / "a.pt", container)).root["t"], tensor)


@pytest.mark.parametrize("container", CONTAINERS)
def test_views(tmp_path: Path, container: str) -> None:
    """Views keep offset, shape and stride: transposed, stepped, expanded, inside, scalar, empty, with one element."""
    base = random(6, 8, 4)
    views = {
        "whole": base,
        "transposed": base.permute(2, 0, 1),
        "stepped": base[::2, 1::3, ::2],
        "inside": base[2:4, 3],
        "scalar": base[1, 2, 3],
        "empty": base[3:3],
        "empty in the middle": base[:, 0:0, :],
        "one": base[5:6, 7:8, 3:4],
        "expanded": base[:1, :, :1].expand(5, 8, 3),
        "diagonal": base[:, :, 0].diagonal(),
        "windows": base.flatten().unfold(0, 7, 3),
    }
    root = open_archive(save(views, tmp_path / "a.pt", container)).root
    for name, tensor in views.items():
        assert_same(root[name], tensor)
    assert len({id(ref.storage) for ref in root.values()}) == 1


@pytest.mark.parametrize("container", CONTAINERS)
def test_shared_storages_stay_shared(tmp_path: Path, container: str) -> None:
    """Two tensors that were one are one; two that were equal are two."""
    tensor, part = random(4, 4), random(9)
    saved = {"a": tensor, "b": tensor, "c": tensor.clone(), "d": part[2:5], "e": part[2:5], "f": part[3:5]}
    root = open_archive(save(saved, tmp_path / "a.pt", container)).root
    assert root["a"].identity == root["b"].identity
    assert root["a"].identity != root["c"].identity
    assert root["d"].identity == root["e"].identity
    assert root["d"].identity != root["f"].identity
    assert root["d"].storage is root["f"].storage


@pytest.mark.parametrize("container", CONTAINERS)
def test_parameters_and_dicts(tmp_path: Path, container: str) -> None:
    """Parameters are tensors, an OrderedDict with metadata is a dict in its order, a Size is a tuple."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    saved = {"state": module.state_dict(), "weight": module[0].weight, "size": torch.Size([3, 4]), "set": {1, 2}}
    root = open_archive(save(saved, tmp_path / "a.pt", container)).root
    assert list(root["state"]) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert_same(root["state"][name], tensor)
    assert_same(root["weight"], module[0].weight.detach())
    assert root["size"] == (3, 4)
    assert sorted(root["set"]) == [1, 2]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickle_protocols(tmp_path: Path, protocol: int) -> None:
    """Every pickle protocol that torch can write its archives in gives the same objects."""
    tensor = random(7)
    saved = collections.OrderedDict(t=tensor, n=[None, True, 1 << 40, -(1 << 80), 2.5, "ü", b"\xff"], u=("a", ("b",)))
    root = open_archive(save(saved, tmp_path / "a.pt", pickle_protocol=protocol)).root
    assert root["n"][:6] == saved["n"][:6]
    assert root["u"] == saved["u"]
    assert_same(root["t"], tensor)


def test_conjugated_tensors_are_not_taken_as_they_lie(tmp_path: Path) -> None:
    """A conjugated or negated view is saved as the original and a flag: an inert object, not the wrong numbers."""
    tensor, other = random(3, dtype=torch.complex64), random(3, dtype=torch.complex64)
    saved = {"conj": tensor.conj(), "negated": other.conj().imag, "t": tensor}
    assert saved["negated"].is_neg()
    root = open_archive(save(saved, tmp_path / "a.pt")).root
    assert isinstance(root["conj"], Opaque)
    assert isinstance(root["negated"], Opaque)
    assert_same(root["t"], tensor)


def test_tensors_that_are_not_plain_are_inert(tmp_path: Path) -> None:
    """Quantized and sparse tensors and unknown element types stay inert, and what lies around them is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        sparse = torch.eye(3).to_sparse()
        half = torch.zeros(2, dtype=torch.complex32)
    tensor = random(5)
    saved = {"q": quantized, "s": sparse, "h": half, "t": tensor}
    root = open_archive(save(saved, tmp_path / "a.pt")).root
    assert [isinstance(root[key], Opaque) for key in "qsh"] == [True] * 3
    assert_same(root["t"], tensor)


def test_quantized_tensors_in_the_legacy_container_are_refused(tmp_path: Path) -> None:
    """There the size of every storage is needed to find the next one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    with pytest.raises(UnsafeArchive, match=r"a\.pt: holds quantized tensors"):
        open_archive(save({"q": quantized}, tmp_path / "a.pt", "legacy"))


def test_read_only_file_in_read_only_directory(tmp_path: Path) -> None:
    """Mode 0444 in a directory of mode 0555 is enough, for a user who is not root too."""
    folder = tmp_path / "ro"
    folder.mkdir()
    path = save({"t": torch.arange(6)}, folder / "a.pt")
    path.chmod(0o444)
    folder.chmod(0o555)
    code = (
        "import os, sys\n"
        "from lazyzero.container.archive import open_archive\n"
        "from lazyzero.tensor import LazyTensor, View\n"
        "import lazyzero.gather\n"
        "os.chdir(sys.argv[1])\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "assert not os.access('.', os.W_OK) and not os.access('a.pt', os.W_OK)\n"
        "ref = open_archive('a.pt').root['t']\n"
        "print(LazyTensor('t', ref.shape, View(ref), 'module').numpy().tolist())\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    finally:
        folder.chmod(0o755)
    assert done.stdout == "[0, 1, 2, 3, 4, 5]\n", done.stderr


def test_big_endian_archives_are_refused(tmp_path: Path) -> None:
    """Both containers record the byte order, and the wrong one is an error, not wrong numbers."""
    path = save({"t": torch.arange(6)}, tmp_path / "a.pt")
    data = path.read_bytes()
    assert data.count(b"little") == 1
    path.write_bytes(data.replace(b"little", b"big   "))
    with pytest.raises(BrokenArchive, match=r"a\.pt: byte order is b'big   '"):
        open_archive(path)
    path = save({"t": torch.arange(6)}, tmp_path / "b.pt", "legacy")
    data = path.read_bytes()
    at = data.index(b"little_endian") + len(b"little_endian")
    flag = data.index(b"\x88", at)
    assert flag - at < 4
    path.write_bytes(data[:flag] + b"\x89" + data[flag + 1 :])
    with pytest.raises(BrokenArchive, match=r"b\.pt: byte order is big-endian"):
        open_archive(path)


def test_ten_elements_of_a_large_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of ten elements in a storage of 1 GB reads ten elements, whatever shape the view has."""
    path = tmp_path / "a.pt"
    tensor = torch.empty(1 << 28)  # never touched
    views = {"run": tensor[1 << 27 : (1 << 27) + 10], "steps": tensor[:: (1 << 28) // 10][:10]}
    with torch.serialization.skip_data():
        save(views, path)
    assert path.stat().st_size > 1 << 30
    root = open_archive(path).root
    offset = root["run"].storage.offset
    with path.open("r+b") as file:
        file.seek(offset + (4 << 27))
        file.write(np.arange(10, dtype=np.float32).tobytes())
        for index in range(10):
            file.seek(offset + 4 * index * ((1 << 28) // 10))
            file.write(np.float32(index + 0.5).tobytes())
    root = open_archive(path).root
    assert root["run"].storage.nbytes == 1 << 30
    assert root["run"].storage.offset == offset
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(sum(map(len, views))) or preadv(fd, views, at))
    assert list(next(lazy(root["run"]).chunks())) == list(range(10))
    assert read == [40]
    read.clear()
    assert list(next(lazy(root["steps"]).chunks())) == [index + 0.5 for index in range(10)]
    assert sum(read) == 40


def test_subclasses_and_old_rebuild_functions(tmp_path: Path) -> None:
    """ZeRO-3's tensors went through `_rebuild_from_type_v2`; a parameter with attributes through another function."""
    parameter = torch.nn.Parameter(random(4), requires_grad=False)
    parameter.tag = "kept with it"  # type: ignore[attr-defined]
    root = open_archive(save({"p": parameter}, tmp_path / "a.pt")).root
    assert_same(root["p"], parameter.detach())


def test_models_of_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits on steps and memory leave room for 80,000 tensors, each with its name, shape and place."""
    machines: list[Unpickler] = []

    class Kept(Unpickler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            machines.append(self)

    monkeypatch.setattr("lazyzero.container.archive.Unpickler", Kept)
    for count in (1000, 2000):
        flat = torch.zeros(count, dtype=torch.bfloat16)
        names = [f"model.layers.{index // 500}.mlp.experts.{index % 500}.down_proj.weight" for index in range(count)]
        saved = {
            "module": collections.OrderedDict((name, flat[at : at + 1]) for at, name in enumerate(names)),
            "param_shapes": [collections.OrderedDict((name, torch.Size([1])) for name in names)],
            "buffer_names": [],
        }
        root = open_archive(save(saved, tmp_path / "a.pt")).root
        assert list(root["module"]) == list(root["param_shapes"][0]) == names
    less, more = machines
    steps, room = less._steps - more._steps, less._room - more._room  # for a thousand tensors
    assert 80 * steps < MOST_STEPS + STEPS_PER_TENSOR * min(MOST_TENSORS, 80_000)
    assert 80 * room < ROOM
