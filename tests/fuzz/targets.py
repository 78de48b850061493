"""One function for each surface: it reads what the bytes say and lets nothing but LazyZeroError be caught."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lazyzero
from lazyzero.container.archive import open_archive
from lazyzero.container.objects import Opaque, Storage, TensorRef
from lazyzero.container.safetensors import read_header
from lazyzero.container.source import POOL, Source
from lazyzero.container.storages import storage_identity
from lazyzero.container.tape import Tape
from lazyzero.container.unpickle import Unpickler
from lazyzero.errors import LazyZeroError
from lazyzero.gather import read
from lazyzero.layout.discover import find_tag_dir, list_files
from lazyzero.tensor import LazyTensor, View
from tests.forge import Zip, parts, pickled, write
from tests.fuzz.choice import Choice
from tests.fuzz.values import edited
from tests.hostile.checkpoints import LAYOUTS, TAG
from tests.hostile.real import CASES, described, written

_STORAGES = {str(key): bytes(64) for key in range(8)}
_MOST_READ = 1 << 16  # elements of a tensor that are read
_NAMES = (
    "latest", "latest_universal", "zero", "offloaded_tensors", "global_step3", "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_0_mp_rank_00optim_states.pt", "layer_00-model_00-model_states.pt",
    "layer_0_expert_0_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt", "fp16_", "\u0663", "\udcff",
)  # fmt: skip


def scratch() -> Path:
    """A directory of this process that holds the input under test."""
    home = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=home))


def archive(data: bytes, root: Path) -> None:
    """A file that may be an archive; of its tensors a little is read."""
    path = write(root / "a.pt", data)
    for ref in _tensors(open_archive(path).root):
        tensor = LazyTensor("t", ref.shape, View(ref), "module")
        read(tensor, 0, min(tensor.numel, _MOST_READ))


def safetensors(data: bytes, root: Path) -> None:
    """A file that may be safetensors, as a base model's are."""
    for ref in read_header(write(root / "a.safetensors", data)).values():
        read(LazyTensor("t", ref.shape, View(ref), "module"), 0, min(ref.numel, _MOST_READ))


def _tensors(value: Any) -> Iterator[TensorRef]:
    rest, seen = [value], set()
    for _ in range(1000):
        if not rest:
            return
        each = rest.pop()
        if isinstance(each, TensorRef):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, dict):
                rest += list(each.values())[:100]
            elif isinstance(each, (list, tuple)):
                rest += each[:100]


def unpickler(data: bytes, root: Path) -> None:
    """A pickle, whatever its protocol."""
    source = Source.open(write(root / "a.pkl", data))

    def load(identity: Any) -> Storage | Opaque:
        kind, key, _ = storage_identity(source, identity)
        return Opaque("storage") if kind is None else Storage(source, key, kind.dtype, 64)

    Unpickler(Tape(source, 0, source.size), load).load()


def discovery(data: bytes, root: Path) -> None:
    """A directory of files, links and directories, named as DeepSpeed names them and a little differently."""
    choice = Choice(data)
    made = [root]
    for _ in range(choice.below(12)):
        _make_entry(choice, made)
    tag = choice.of((None, "global_step3", "..", "/", "\0"))
    found = find_tag_dir(root, tag)
    assert list_files(found).any


def _make_entry(choice: Choice, made: list[Path]) -> None:
    name = (
        choice.of(_NAMES)
        if choice.byte() % 4
        else os.fsdecode(choice.bytes(255).replace(b"/", b"").replace(b"\0", b""))
    )
    name = name.replace("0", str(choice.below(300)), choice.below(3))
    path = choice.of(made) / (name or "x")
    try:
        kind = choice.below(5)
        if kind == 0:
            path.mkdir()
            made.append(path)
        elif kind == 1:
            path.symlink_to(choice.of((".", "..", "/", "latest", "global_step3", path.name)))
        else:
            path.write_bytes(choice.of((b"global_step3", b"..", b"")) if kind == 2 else choice.bytes(80))
    except OSError:
        return  # there already, or a name the system does not take


def layout(data: bytes, root: Path) -> None:
    """A small checkpoint in whose dicts some values are others."""
    choice = Choice(data)
    files = LAYOUTS[choice.of(sorted(LAYOUTS))]()
    for _ in range(1 + choice.below(4)):
        name = choice.of(sorted(files))
        files[name] = edited(files[name], choice)
    _open(root, {name: pickled(value) for name, value in files.items()})


def real_layout(data: bytes, root: Path) -> None:
    """A real checkpoint in whose dicts some values are others, or which lacks a file."""
    choice = Choice(data)
    files = dict(described(choice.of(CASES)))
    for _ in range(choice.below(9)):
        name = choice.of(sorted(files))
        act = choice.byte() % 16
        if act == 0 and len(files) > 1:
            del files[name]
        elif act == 1:
            files[choice.of(sorted(files))] = files[name]
        elif not isinstance(files[name], bytes):
            files[name] = edited(files[name], choice)
    written(root / TAG, files)
    _read_all(root, choice.of((None, None, None, "exp_avg")))


def layout_pickle(data: bytes, root: Path) -> None:
    """A small checkpoint of which one file's pickle is another."""
    choice = Choice(data)
    files = LAYOUTS[choice.of(sorted(LAYOUTS))]()
    pickles = {name: pickled(value) for name, value in files.items()}
    name = choice.of(sorted(pickles))
    pickles[name] = choice.rest()
    _open(root, pickles)


def _open(root: Path, pickles: dict[str, bytes]) -> None:
    for name, pickle in pickles.items():
        write(root / TAG / name, Zip(parts(pickle, _STORAGES)).write())
    _read_all(root, None)


def _read_all(root: Path, state: str | None) -> None:
    checkpoint = lazyzero.open_checkpoint(root / TAG, state=state)
    for name, tensor in checkpoint.items():
        assert name.isprintable()
        assert tensor.numel < 1 << 48
        read(tensor, 0, min(tensor.numel, _MOST_READ))
    assert all(reason.isprintable() for reason in checkpoint.missing.values())


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "archive": archive,
    "unpickler": unpickler,
    "safetensors": safetensors,
    "discovery": discovery,
    "layout": layout,
    "real-layout": real_layout,
    "layout-pickle": layout_pickle,
}


def run(name: str, data: bytes, root: Path) -> str:
    """Runs a target in an empty directory; the name of the error it ended in. Anything but LazyZeroError comes through."""
    try:
        TARGETS[name](data, root)
    except LazyZeroError as error:
        message = str(error)
        assert message.isprintable(), message
        assert str(root) in message or error.__class__.__name__ == "InvalidRequest", message
        assert len(message) < 4000, message
        return type(error).__name__
    finally:
        POOL.close()
        for entry in root.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    return "read"
