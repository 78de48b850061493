"""All that can be wrong about an output beside its values: files, names, shapes, dtypes, ties, metadata, index."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lazyzero.dtypes import DType
from lazyzero.errors import BrokenArchive, CheckpointNotFound, InvalidRequest, ReadError
from lazyzero.export.plan import STEMS, Format, shard_name, with_dtype
from lazyzero.readers import Reader, Stored, open_output
from lazyzero.tensor import Placeholder


@dataclass(slots=True)
class Output:
    """What an output directory has: `tensors` and `where` are by file and by name, `broken` the files nobody can read."""

    files: tuple[Path, ...]
    whole: bool  # a directory, not a single file out of one
    readers: dict[str, Reader] = field(default_factory=dict)
    tensors: dict[str, dict[str, Stored]] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def format(self) -> Format:
        return "bin" if self.files[0].suffix == ".bin" else "safetensors"

    def stored(self, name: str) -> Stored:
        """What the output says of a tensor it has."""
        return self.tensors[self.where[name]][name]


def look(directory: Path) -> Output:
    """Opens every weight file of an output. Raises CheckpointNotFound, InvalidRequest or ReadError."""
    output = Output(tuple(weight_files(directory)), not directory.is_file())
    for path in output.files:
        try:
            reader = open_output(path)
            output.tensors[path.name] = reader.tensors()
            output.readers[path.name] = reader
            output.where.update(dict.fromkeys(output.tensors[path.name], path.name))
        except BrokenArchive as error:
            output.broken[path.name] = str(error)
    return output


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


def faults(output: Output, wanted: Mapping[str, Placeholder], dtype: DType | None) -> Iterator[str]:
    """A line for each thing that is wrong; `dtype` is what floating tensors should have, None for the stored one."""
    yield from output.broken.values()
    yield from _files(output)
    yield from _twice(output)
    told = yield from _index(output)
    dropped = yield from _metadata(output, wanted)
    yield from _names(output, wanted, told, dropped)
    yield from _kinds(output, wanted, dtype)
    yield from _ties(output, wanted)


def _files(output: Output) -> Iterator[str]:
    """The names of a set of shards say how many there are."""
    names, count = {path.name for path in output.files}, len(output.files)
    expected = {shard_name(output.format, number, count) for number in range(1, count + 1)}
    if output.whole and names != expected:
        yield f"the names of the files are not those of a set of {count}: {', '.join(sorted(names)[:4])}"


def _twice(output: Output) -> Iterator[str]:
    for file, tensors in output.tensors.items():
        for name in tensors:
            if output.where[name] != file:
                yield f"{name}: is in {file} and in {output.where[name]}"


def _index(output: Output) -> Generator[str, None, dict[str, str]]:
    """Compares every index with what is there; the generator's value is name -> file as told by the last."""
    told: dict[str, str] = {}
    if not output.whole:
        return told
    paths = sorted(output.files[0].parent.glob("*.index.json"))
    if len(output.files) > 1 and not paths:
        yield f"{len(output.files)} weight files and no index; the output is unfinished"
    for path in paths:
        try:
            index = json.loads(path.read_bytes())
            told, total = dict(index["weight_map"]), index["metadata"]["total_size"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            yield f"{path.name}: is no index ({type(error).__name__})"
            continue
        known = {*output.tensors, *output.broken}
        for file, count in sorted(Counter(str(file) for file in told.values() if file not in known).items()):
            yield f"{path.name}: has {count} tensors in {file}, which is not there"
        for name in sorted(told.keys() | output.where.keys()):
            here, there = output.where.get(name, "no file"), told.get(name, "no file")
            if here != there and (there in output.tensors or name not in told):
                yield f"{path.name}: has {name} in {there}, it is in {here}"
        size = _total_size(output)
        if total != size and not output.broken:
            yield f"{path.name}: total_size is {total}, the tensors have {size} bytes"
    return told


def _total_size(output: Output) -> int:
    """The bytes of all tensors, those that share a storage counted once."""
    total = 0
    for tensors in output.tensors.values():
        seen = set()
        for stored in tensors.values():
            if stored.storage is None or stored.storage not in seen:
                total += Placeholder(stored.shape, stored.dtype).nbytes
                seen.add(stored.storage)
    return total


def _metadata(output: Output, wanted: Mapping[str, Placeholder]) -> Generator[str, None, set[str]]:
    """A safetensors file says format=pt, and of each name left out which one it is tied to; the value: those names."""
    dropped: set[str] = set()
    for file, reader in output.readers.items():
        if output.format == "bin":
            break
        metadata = reader.metadata()
        if metadata.pop("format", None) != "pt":
            yield f"{file}: its metadata lacks format=pt, which transformers asks for"
        for name, owner in sorted(metadata.items()):
            if name not in wanted or wanted[name].tied_to != owner or name in output.where:
                yield f"{file}: its metadata says that {name} is {owner}, which is not so"
            elif output.where.get(owner) != file:
                yield f"{file}: its metadata says that {name} is {owner}, which is not in this file"
            else:
                dropped.add(name)
    return dropped


def _names(output: Output, wanted: Mapping[str, Placeholder], told: dict[str, str], dropped: set[str]) -> Iterator[str]:
    for name in wanted:
        file = told.get(name)
        gone = file is not None and file not in output.tensors  # said already, for the whole file
        if name not in output.where and name not in dropped and not gone:
            yield f"{name}: is in the checkpoint, not in the output"
    for name in sorted(output.where.keys() - wanted.keys()):
        yield f"{name}: is in {output.where[name]}, not in the checkpoint"


def _kinds(output: Output, wanted: Mapping[str, Placeholder], dtype: DType | None) -> Iterator[str]:
    for name, file in output.where.items():
        if name not in wanted:
            continue
        want, have = with_dtype(wanted[name], dtype), output.stored(name)
        if want.shape != have.shape:
            yield f"{name}: has shape {list(have.shape)} in {file}, {list(want.shape)} in the checkpoint"
        if want.dtype != have.dtype:
            yield f"{name}: is {have.dtype} in {file}, should be {want.dtype}"


def _ties(output: Output, wanted: Mapping[str, Placeholder]) -> Iterator[str]:
    """In a .bin file tied names share one storage, and no others do."""
    if output.format != "bin":
        return
    first: dict[tuple[str, object], str] = {}
    for name, want in wanted.items():
        if name not in output.where or not want.numel:
            continue
        owner = want.tied_to if want.tied_to in output.where else None
        if owner and output.stored(name).storage != output.stored(owner).storage:
            yield f"{name}: no longer shares storage with {owner}"
        other = first.setdefault((output.where[name], output.stored(name).storage), name)
        if name != other and (owner or name) != (wanted[other].tied_to or other):
            yield f"{name}: shares storage with {other}, and is not tied to it"
