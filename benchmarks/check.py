"""Compares what a benchmark wrote with the values that its checkpoint was made of, bit for bit, after the clock has stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.models import Parameter
from benchmarks.spec import Spec
from benchmarks.values import marks, round_bf16

_CHUNK: Final = 1 << 20  # elements
_RUN: Final = 1024  # elements in one place of a sample
_DTYPES: Final = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_ITEMSIZE: Final = {"fp32": 4, "bf16": 2, "fp16": 2}

Read = Callable[[int, int], np.ndarray]
"""Elements [start, stop) of a tensor as unsigned integers of their size."""


class WrongOutput(AssertionError):
    """What was written is not what the checkpoint holds."""


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor of an output."""

    dtype: str
    shape: tuple[int, ...]
    read: Read


def check_output(directory: Path, spec: Spec, dtype: str, *, full: bool) -> int:
    """Compares every tensor, in `full` or in places; returns the number of elements compared. Raises WrongOutput.

    `dtype` is fp32, bf16 or fp16, or keep: trained weights fp32, frozen ones bf16.
    """
    with _opened(directory) as found:
        names = {parameter.name for parameter in spec.model.parameters}
        if set(found) != names:
            raise WrongOutput(
                f"{len(set(found) ^ names)} names are missing or too many: {sorted(set(found) ^ names)[:4]}"
            )
        return sum(
            _compare(spec, index, parameter, found[parameter.name], dtype, full=full)
            for index, parameter in enumerate(spec.model.parameters)
        )


def check_notes(notes: Path, spec: Spec, dtype: str) -> int:
    """The same for the places that `take.py` noted of every shard before it was deleted."""
    index = {parameter.name: index for index, parameter in enumerate(spec.model.parameters)}
    compared = 0
    with notes.open() as lines:
        for row in map(json.loads, lines):
            at = index.pop(row["name"], None)
            if at is None:
                raise WrongOutput(f"{row['name']}: not a parameter, or written twice")
            parameter = spec.model.parameters[at]
            _agree(parameter, dtype, _DTYPES[row["dtype"]], tuple(row["shape"]))
            for first, raw in row["places"]:
                found = np.frombuffer(bytes.fromhex(raw), f"u{_ITEMSIZE[_DTYPES[row['dtype']]]}")
                _equal(spec, at, parameter, dtype, first, found)
                compared += len(found)
    if index:
        raise WrongOutput(f"{len(index)} parameters were never written: {sorted(index)[:4]}")
    return compared


def _agree(parameter: Parameter, wanted: str, dtype: str, shape: tuple[int, ...]) -> None:
    kept = "fp32" if parameter.trained else "bf16"
    expected = kept if wanted == "keep" else wanted
    if (dtype, shape) != (expected, parameter.shape):
        raise WrongOutput(f"{parameter.name}: expected {expected} {parameter.shape}, found {dtype} {shape}")


def _compare(spec: Spec, index: int, parameter: Parameter, found: Written, dtype: str, *, full: bool) -> int:
    _agree(parameter, dtype, found.dtype, found.shape)
    compared = 0
    for start, stop in _whole(parameter.numel) if full else _places(parameter.numel, index):
        _equal(spec, index, parameter, dtype, start, found.read(start, stop))
        compared += stop - start
    return compared


def _equal(spec: Spec, index: int, parameter: Parameter, dtype: str, start: int, found: np.ndarray) -> None:
    stored = 4 if parameter.trained else 2
    values = spec.values.expected(index, parameter.numel, start, start + len(found), stored=stored)
    if not np.array_equal(found, _bits(values, dtype if dtype != "keep" else ("fp32" if stored == 4 else "bf16"))):
        raise WrongOutput(
            f"{parameter.name}: elements {start} to {start + len(found)} are not what the checkpoint holds"
        )


def _bits(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return round_bf16(values)
    return values.view(np.uint32) if dtype == "fp32" else values.astype(np.float16).view(np.uint16)


def _whole(numel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, _CHUNK):
        yield start, min(start + _CHUNK, numel)


def _places(numel: int, index: int) -> Iterator[tuple[int, int]]:
    """The marks of a sparse model, and runs at places that differ from tensor to tensor."""
    yield from marks(numel)
    for place in range(8):
        start = (index * 7919 + place * numel // 8) % max(numel - _RUN, 1)
        yield start, min(start + _RUN, numel)


class _opened:  # noqa: N801 - a context manager
    """All tensors of an output directory by name: safetensors, or torch files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: list[int] = []

    def __enter__(self) -> dict[str, Written]:
        files = sorted(self._directory.glob("*.safetensors"))
        if files:
            return {name: written for path in files for name, written in self._safetensors(path).items()}
        return {name: written for path in sorted(self._directory.glob("*.bin")) for name, written in _bin(path).items()}

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _safetensors(self, path: Path) -> dict[str, Written]:
        descriptor = os.open(path, os.O_RDONLY)
        self._descriptors.append(descriptor)
        size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header: dict[str, Any] = json.loads(os.pread(descriptor, size, 8))
        header.pop("__metadata__", None)
        return {
            name: Written(
                _DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                _reader(descriptor, 8 + size + entry["data_offsets"][0], _ITEMSIZE[_DTYPES[entry["dtype"]]]),
            )
            for name, entry in header.items()
        }


def _reader(descriptor: int, offset: int, itemsize: int) -> Read:
    def read(start: int, stop: int) -> np.ndarray:
        raw = os.pread(descriptor, (stop - start) * itemsize, offset + start * itemsize)
        return np.frombuffer(raw, f"u{itemsize}")

    return read


def _bin(path: Path) -> dict[str, Written]:
    import torch

    kinds = {
        torch.float32: ("fp32", torch.int32),
        torch.bfloat16: ("bf16", torch.int16),
        torch.float16: ("fp16", torch.int16),
    }

    def written(tensor: Any) -> Written:
        dtype, bits = kinds[tensor.dtype]
        flat = tensor.detach().reshape(-1).view(bits)
        unsigned = f"u{_ITEMSIZE[dtype]}"
        return Written(dtype, tuple(tensor.shape), lambda start, stop: flat[start:stop].numpy().view(unsigned))

    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return {name: written(tensor) for name, tensor in loaded.items()}
