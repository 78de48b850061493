"""The real checkpoints in tests/data as descriptions that can be edited: every layout is fuzzed from what it really reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lazyzero.container.archive import open_archive
from lazyzero.container.builders import Builder, StorageClass
from lazyzero.container.objects import Global, Opaque, Skipped, TensorRef
from lazyzero.dtypes import STORAGE_CLASSES, DType
from tests.forge import Call, Raw, Tensor, Zip, global_, parts, pickled, storages_of, write
from tests.hostile.checkpoints import TAG, Changes, changed

_DATA = Path(__file__).parents[1] / "data"
_KINDS = {dtype: f"{kind}" for kind, dtype in reversed(STORAGE_CLASSES.items())}
_LARGEST = 40 << 10  # bytes of a checkpoint's files; larger ones only slow down

# One case for each layout and what is odd in it.
CASES = (
    "a_z2_bf16_w2", "a_z3_bf16_w2", "b_z2_tied_triple", "b_z3_tied_frozen", "d_z2_oddbuf", "e_z1_bf16opt",
    "e_z2_elastic_w4", "g_z0_fp16", "h_z1_autoep_ep2_w4", "h_z2_moe_ep2_w4", "h_z3_autoep_ep2_w4", "i_z0_pipe_tied_w2",
    "i_z1_pipe_w2", "j_z1_autotp_w4", "j_z3_autotp_uneven_w4", "l_a_z1_bf16_w2_universal", "l_a_z3_bf16_w2_universal",
    "old_0.3.16_z1_fp16", "old_0.3.16_z2_lora", "old_0.4.5_z1_fp16",
)  # fmt: skip


@cache
def described(case: str) -> dict[str, Any]:
    """The files of a case's tag directory by relative path: the object in each, or its bytes where it is no archive."""
    root = next(path.parent for path in sorted((_DATA / case / "checkpoint").rglob("*model_states.pt")))
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        if path.suffix == ".pt":
            found[str(path.relative_to(root))] = _plain(open_archive(path).root, {})
        elif path.is_file():
            found[str(path.relative_to(root))] = path.read_bytes()[:_LARGEST]
    return found


def written(directory: Path, files: dict[str, Any]) -> Path:
    """Writes such files; storages are full of zeros."""
    for name, value in files.items():
        raw = isinstance(value, bytes)
        write(directory / name, value if raw else Zip(parts(pickled(value), storages_of(value))).write())
    return directory


def real(case: str, name: str, change: Changes) -> Callable[[Path], Path]:
    """A real checkpoint in which the dict of one file is changed."""

    def make(root: Path) -> Path:
        files = dict(described(case))
        files[name] = changed(files[name], change)
        written(root / TAG, files)
        return root / TAG / name

    return make


def only(root: Path, case: str, part: str) -> Path:
    """A real checkpoint of which only some files are left."""
    files = {name: value for name, value in described(case).items() if part in name}
    return written(root / TAG, files)


def _plain(value: Any, storages: dict[int, str], depth: int = 0) -> Any:
    if isinstance(value, TensorRef):
        key = storages.setdefault(id(value.storage), str(len(storages)))
        numel = value.storage.nbytes // value.storage.dtype.itemsize
        return Tensor(key, value.shape, value.stride, value.offset, numel, _KINDS[value.storage.dtype])
    if depth > 12 or isinstance(value, (Skipped, Builder, StorageClass)):
        return None
    if isinstance(value, dict):
        return {_key(key): _plain(item, storages, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item, storages, depth + 1) for item in value)
    if isinstance(value, Opaque):
        return _call(value, storages, depth)
    if isinstance(value, Global):
        return Raw(global_(value.module, value.name))
    return Raw(global_("torch", value.name)) if isinstance(value, DType) else value


def _key(key: Any) -> Any:
    return key if isinstance(key, (str, int, bytes)) or key is None else "key"


def _call(value: Opaque, storages: dict[int, str], depth: int) -> Call:
    module, _, name = value.kind.rpartition(".")
    args, state = (_plain(each, storages, depth + 1) for each in (value.args, value.state))
    return Call(module or "builtins", name, args if isinstance(args, tuple) else (args,), state)
