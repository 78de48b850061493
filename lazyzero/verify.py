"""Compares an output with its checkpoint: files, index, names, shapes, dtypes, ties, and every element's bits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from lazyzero import dtypes
from lazyzero.cast import cast, differing
from lazyzero.checkpoint import Checkpoint, Opening, opened
from lazyzero.dtypes import DType
from lazyzero.errors import CheckpointNotFound, InvalidRequest, ReadError, VerificationFailed
from lazyzero.export.plan import STEMS, with_dtype
from lazyzero.export.run import placeholders
from lazyzero.gather import read
from lazyzero.memory import peak_rss
from lazyzero.readers import Reader, Stored, open_output
from lazyzero.selfcheck import check
from lazyzero.tensor import LazyTensor, Placeholder


@dataclass(frozen=True, slots=True)
class Verification:
    """`differences` has a line for each thing that is not as it should be; none means the output is right.

    `elements` counts compared elements, `checked` the tensors compared in full with the training copy as well.
    """

    output: str
    files: tuple[str, ...]
    tensors: int
    elements: int
    checked: int
    differences: tuple[str, ...]
    seconds: float
    peak_rss: int

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}


def verify(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    self_check: bool = True,
    workers: int = 2,
    **opening: Unpack[Opening],
) -> Verification:
    """Reads `output` through the official readers and the checkpoint again, and compares them in bounded memory.

    `dtype` is what the output should have; None accepts the one floating dtype it does have, or the stored ones.
    Raises SelfCheckFailed when the checkpoint disagrees with itself, CheckpointNotFound when there is no output.
    """
    began = time.monotonic()
    with opened(checkpoint, opening) as source:
        return _verify(source, Path(output), dtype, self_check=self_check, workers=workers, began=began)


def _verify(
    checkpoint: Checkpoint, directory: Path, dtype: str | None, *, self_check: bool, workers: int, began: float
) -> Verification:
    files = weight_files(directory)
    checked = check(checkpoint.checks, full=True) if self_check else 0
    readers = {path.name: open_output(path) for path in files}
    found = {name: reader.tensors() for name, reader in readers.items()}
    differences = list(_structure(directory, checkpoint, readers, found, dtype))
    work = [
        (readers[file], checkpoint[name], stored)
        for file, tensors in found.items()
        for name, stored in tensors.items()
        if name in checkpoint and stored.shape == checkpoint[name].shape
    ]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        differences += [line for line in pool.map(lambda item: _compare(*item), work) if line]
    return Verification(
        output=os.fspath(directory),
        files=tuple(path.name for path in files),
        tensors=len(work),
        elements=sum(tensor.numel for _, tensor, _ in work),
        checked=checked,
        differences=tuple(differences),
        seconds=time.monotonic() - began,
        peak_rss=peak_rss(),
    )


def require(result: Verification) -> None:
    """Raises VerificationFailed naming the first differences."""
    if not result.ok:
        more = len(result.differences) - 1
        rest = f" (and {more} more)" if more else ""
        raise VerificationFailed(f"{result.output}: {result.differences[0]}{rest}")


def weight_files(directory: Path) -> list[Path]:
    """The weight files of an output directory, of one format. Raises CheckpointNotFound or InvalidRequest."""
    if directory.is_file():
        return [directory]
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        raise CheckpointNotFound(f"{directory}: no such directory") from None
    except OSError as error:
        raise ReadError(f"{directory}: cannot be listed: {error.strerror}") from None
    by_format = {
        form: [directory / name for name in names if name.startswith(stem) and name.endswith(suffix)]
        for form, (stem, suffix) in STEMS.items()
    }
    present = [form for form, paths in by_format.items() if paths]
    if not present:
        raise CheckpointNotFound(f"{directory}: has no model*.safetensors and no pytorch_model*.bin to verify")
    if len(present) > 1:
        raise InvalidRequest(
            f"{directory}: holds both safetensors and .bin files; verify them in directories of their own"
        )
    return by_format[present[0]]


def _structure(
    directory: Path,
    checkpoint: Checkpoint,
    readers: dict[str, Reader],
    found: dict[str, dict[str, Stored]],
    dtype: str | None,
) -> Iterator[str]:
    """All that can be wrong beside the values."""
    where: dict[str, str] = {}
    for file, tensors in found.items():
        for name in tensors:
            if name in where:
                yield f"{name}: is in {where[name]} and in {file}"
            where[name] = file
    yield from _index(directory, where, found)
    dropped: dict[str, str] = {}
    for file, reader in readers.items():
        if file.endswith(".safetensors"):
            metadata = reader.metadata()
            if metadata.pop("format", None) != "pt":
                yield f"{file}: its metadata lacks format=pt, which transformers asks for"
            dropped.update(metadata)
    wanted = placeholders(checkpoint)
    for name in wanted.keys() - where.keys():
        if dropped.get(name) != wanted[name].tied_to or wanted[name].tied_to is None:
            yield f"{name}: is in the checkpoint, not in the output"
    for name in sorted(where.keys() - wanted.keys()):
        yield f"{name}: is in {where[name]}, not in the checkpoint"
    yield from _kinds(wanted, where, found, _expected_dtype(dtype, wanted, where, found))
    yield from _ties(wanted, where, found)


def _index(directory: Path, where: dict[str, str], found: dict[str, dict[str, Stored]]) -> Iterator[str]:
    if directory.is_file():
        return
    paths = sorted(directory.glob("*.index.json"))
    if len(found) > 1 and not paths:
        yield f"{len(found)} weight files and no index; the output is unfinished"
    for path in paths:
        try:
            index = json.loads(path.read_bytes())
            told, total = dict(index["weight_map"]), index["metadata"]["total_size"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield f"{path.name}: is no index ({type(error).__name__})"
            continue
        for name in sorted(told.keys() | where.keys()):
            if told.get(name) != where.get(name):
                yield f"{path.name}: has {name} in {told.get(name, 'no file')}, it is in {where.get(name, 'none')}"
        size = _total_size(found)
        if total != size:
            yield f"{path.name}: total_size is {total}, the tensors have {size} bytes"


def _total_size(found: dict[str, dict[str, Stored]]) -> int:
    """The bytes of all tensors, those that share a storage counted once."""
    total = 0
    for tensors in found.values():
        seen = set()
        for stored in tensors.values():
            if stored.storage is None or stored.storage not in seen:
                total += Placeholder(stored.shape, stored.dtype).nbytes
                seen.add(stored.storage)
    return total


def _expected_dtype(
    dtype: str | None, wanted: dict[str, Placeholder], where: dict[str, str], found: dict[str, dict[str, Stored]]
) -> DType | None:
    """The floating dtype the output should have; None for the stored ones."""
    if dtype is not None:
        return dtypes.requested(dtype)
    floating = {found[where[name]][name].dtype for name in wanted if name in where and wanted[name].dtype.floating}
    return floating.pop() if len(floating) == 1 else None


def _kinds(
    wanted: dict[str, Placeholder], where: dict[str, str], found: dict[str, dict[str, Stored]], dtype: DType | None
) -> Iterator[str]:
    for name, file in where.items():
        if name not in wanted:
            continue
        want, have = with_dtype(wanted[name], dtype), found[file][name]
        if want.shape != have.shape:
            yield f"{name}: has shape {list(have.shape)} in {file}, {list(want.shape)} in the checkpoint"
        if want.dtype != have.dtype:
            yield f"{name}: is {have.dtype} in {file}, should be {want.dtype}"


def _ties(wanted: dict[str, Placeholder], where: dict[str, str], found: dict[str, dict[str, Stored]]) -> Iterator[str]:
    for name, want in wanted.items():
        owner = want.tied_to
        if owner is None or name not in where or owner not in where or not where[name].endswith(".bin"):
            continue
        if want.numel and found[where[name]][name].storage != found[where[owner]][owner].storage:
            yield f"{name}: no longer shares storage with {owner}"


def _compare(reader: Reader, tensor: LazyTensor, stored: Stored) -> str | None:
    """The first element that differs, in words."""
    count = 0
    for start, values in reader.blocks(tensor.name):
        count += len(values)
        source = read(tensor, start, start + len(values))
        expected = np.empty(len(values), stored.dtype.numpy)
        cast(source, expected)
        where = differing(expected, values)
        if len(where):
            at = int(where[0])
            index = [int(i) for i in np.unravel_index(start + at, tensor.shape)] if tensor.shape else []
            return (
                f"{tensor.name}: element {index} is {values[at]!s}, should be {expected[at]!s}"
                f" ({len(where)} differ in this block)"
            )
    if count != tensor.numel:
        return f"{tensor.name}: {count} elements could be read back, should be {tensor.numel}"
    return None
