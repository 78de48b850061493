"""What an output must be, worked out with torch alone: nothing here calls lazyzero."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

DATA = Path(__file__).parent / "data"

# What --dtype calls it -> what torch does; None keeps each tensor's own.
DTYPES: dict[str, torch.dtype | None] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "keep": None,
}
# The ways to write an output: format and shard size.
FORMS: dict[str, tuple[str, str | None]] = {
    "single": ("safetensors", None),
    "sharded": ("safetensors", "3KB"),
    "bin": ("bin", None),
    "bin-sharded": ("bin", "3KB"),
}
_NAMES = {"safetensors": ("model", ".safetensors"), "bin": ("pytorch_model", ".bin")}


@dataclass(frozen=True)
class Written:
    """An output read back: tensors by name, the file each is in, the index where there is one."""

    tensors: dict[str, torch.Tensor]
    where: dict[str, str]
    index: dict[str, Any] | None
    faults: tuple[str, ...]


def case(name: str) -> dict[str, Any]:
    """case.json of a checkpoint in tests/data."""
    loaded: dict[str, Any] = json.loads((DATA / name / "case.json").read_text())
    return loaded


def cases() -> list[str]:
    """The checkpoints in tests/data that have a truth beside them."""
    return sorted(path.parent.name for path in DATA.glob("*/case.json"))


def truth(name: str, which: str = "expected.safetensors") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors an output of that case must hold, tied names included, and alias -> owner of those."""
    facts = case(name)
    absent = set(facts["absent"])
    want = {key: tensor for key, tensor in load_file(DATA / name / which).items() if key not in absent}
    tied = {alias: owner for alias, owner in facts["tied"].items() if owner in want}
    return {**want, **{alias: want[owner] for alias, owner in tied.items()}}, tied


def weight_files(output: Path) -> list[Path]:
    """Every .safetensors and .bin file there."""
    return sorted(path for path in output.iterdir() if path.suffix in (".safetensors", ".bin"))


def read(output: Path, format: str) -> Written:
    """All files of `format` in `output` through the official readers, with what is wrong about the set of them."""
    stem, suffix = _NAMES[format]
    files = weight_files(output)
    tensors: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    faults = [f"{path.name} is not a {suffix} file" for path in files if path.suffix != suffix]
    for path in files:
        part = _read_one(path, faults)
        faults += [f"{name} is in {where[name]} and in {path.name}" for name in part if name in where]
        tensors.update(part)
        where.update(dict.fromkeys(part, path.name))
    expected = [stem + suffix]
    if len(files) > 1:
        expected = [f"{stem}-{number:05d}-of-{len(files):05d}{suffix}" for number in range(1, len(files) + 1)]
    if [path.name for path in files] != expected:
        faults.append(f"files are {[path.name for path in files]}, should be {expected}")
    path = output / f"{stem}{suffix}.index.json"
    if path.exists() != (len(files) > 1):
        faults.append(f"{len(files)} files, and the index {'exists' if path.exists() else 'does not'}")
    index = json.loads(path.read_text()) if path.exists() else None
    if index is not None:
        if index["weight_map"] != where:
            faults.append("the index disagrees with the files")
        total = sum(_stored(tensors[name] for name in tensors if where[name] == file.name) for file in files)
        if index["metadata"] != {"total_size": total}:
            faults.append(f"the index says {index['metadata']}, the files hold {total} bytes")
    return Written(tensors, where, index, tuple(faults))


def _read_one(path: Path, faults: list[str]) -> dict[str, torch.Tensor]:
    if path.suffix == ".bin":
        loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        for name, tensor in loaded.items():
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                faults.append(f"{name}: carries {tensor.untyped_storage().nbytes()} bytes for {tensor.nbytes}")
        return loaded
    with safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("format") != "pt":
            faults.append(f"{path.name}: no format=pt metadata")
    return dict(load_file(path))


def _stored(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors; those at one address count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}.values())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape, and bits; a NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    # A copy, as one element may have any stride.
    mine, theirs = (t.clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b))
    different = (mine.view(torch.uint8) != theirs.view(torch.uint8)).view(a.numel(), -1).any(1)
    return bool((~different | (mine.isnan() & theirs.isnan())).all()) if different.any() else True


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """What an export in `dtype` makes of a tensor: only floating ones change."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def faults(
    want: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    output: Path,
    *,
    format: str,
    dtype: torch.dtype | None,
    optional: frozenset[str] = frozenset(),
) -> list[str]:
    """Everything about an output that is not as `want` (alias names included) says; empty when it is right."""
    got = read(output, format)
    wrong = list(got.faults)
    wrong += [f"missing: {name}" for name in want if name not in got.tensors]
    wrong += [f"unexpected: {name}" for name in got.tensors if name not in want and name not in optional]
    for name, tensor in want.items():
        have = got.tensors.get(name)
        expected = as_dtype(tensor, dtype)
        if have is not None and not same_bits(expected, have):
            wrong.append(
                f"{name}: {have.dtype}{list(have.shape)} has not the bits of {expected.dtype}{list(expected.shape)}"
            )
    if format == "bin":
        for alias, owner in tied.items():
            a, b = got.tensors.get(alias), got.tensors.get(owner)
            if a is not None and b is not None and a.numel() and a.data_ptr() != b.data_ptr():
                wrong.append(f"{alias} no longer shares storage with {owner}")
    return wrong
