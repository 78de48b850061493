"""Frozen weights a ZeRO-3 checkpoint does not have, out of the model it was trained from.

DeepSpeed before 0.9.1, and later with `exclude_frozen_parameters`, saves only placeholders for what ZeRO-3 partitioned
and the optimizer did not train. The base model's own files have those weights, under the same names, or under the names
they had before PEFT wrapped the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lazyzero.container.archive import Archive, open_archive
from lazyzero.container.objects import TensorRef
from lazyzero.container.safetensors import read_header
from lazyzero.container.source import Source
from lazyzero.errors import CheckpointNotFound, InconsistentCheckpoint, ReadError
from lazyzero.layout.contents import is_placeholder, view
from lazyzero.layout.found import Found
from lazyzero.layout.states import ModelStates, Shapes
from lazyzero.tensor import LazyTensor


def read_base(directory: str | os.PathLike[str]) -> dict[str, TensorRef]:
    """The tensors of all `*.safetensors` in a directory, or where it has none, of its `*.bin`; only headers are read.

    Raises CheckpointNotFound when there are none, BrokenArchive, InconsistentCheckpoint for one name in two files.
    """
    tensors: dict[str, TensorRef] = {}
    for path in weight_files(directory):
        for name, ref in tensors_in(path).items():
            if name in tensors:
                raise InconsistentCheckpoint(f"{path}: has {name!r}, and so has {tensors[name].storage.source.path}")
            tensors[name] = ref
    if not tensors:
        raise CheckpointNotFound(
            f"{os.fspath(directory)}: no weights in it; expected *.safetensors or *.bin of the model trained from"
        )
    return tensors


def weight_files(directory: str | os.PathLike[str]) -> list[Path]:
    """Files that look like plain weights. Raises CheckpointNotFound or ReadError."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"{os.fspath(directory)}: no such directory") from None
    except OSError as error:
        raise ReadError(f"{os.fspath(directory)}: cannot be listed: {error.strerror}") from None
    for suffix in (".safetensors", ".bin"):
        found = [Path(directory, name) for name in names if name.endswith(suffix)]
        if found:
            return found
    return []


def tensors_in(path: Path) -> dict[str, TensorRef]:
    """The named tensors of one file; none for a `.bin` that is something else (`training_args.bin`)."""
    if path.suffix == ".safetensors":
        return read_header(path)
    root = open_archive(path).root
    if not isinstance(root, dict):
        return {}
    return {name: ref for name, ref in root.items() if isinstance(name, str) and isinstance(ref, TensorRef)}


@dataclass(frozen=True, slots=True)
class Supplied:
    """Frozen weights from elsewhere, the files they are in, and what to tell about them."""

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    archives: tuple[Archive, ...] = ()
    warnings: tuple[str, ...] = ()


def supply(found: Found, model: ModelStates, shapes: Shapes, known: Iterable[str]) -> Supplied:
    """The parameters that are placeholders in `module` and not `known`, as the base model asked for has them.

    Of tied names the first that is found stands for all. `shapes` are those on record. Raises InconsistentCheckpoint for a
    shape that differs, or a base model that is itself placeholders.
    """
    if found.base_model is None or found.exclude_frozen or found.state is not None:
        return Supplied()
    base = read_base(found.base_model)
    done = {model.module[name].identity for name in known if name in model.module}
    tensors: dict[str, LazyTensor] = {}
    sources: dict[str, Source] = {}
    for name, placeholder in model.module.items():
        if not is_placeholder(model, name, placeholder) or placeholder.identity in done:
            continue
        ref = next((base[candidate] for candidate in _names(name) if candidate in base), None)
        if ref is None:
            continue
        source = ref.storage.source
        expected = shapes.get(name, model.frozen_shapes.get(name))
        if (expected is not None and ref.shape != expected) or (expected is None and ref.shape == (0,)):
            raise InconsistentCheckpoint(
                f"{source.path}: {name!r} has shape {list(ref.shape)}, expected "
                f"{list(expected) if expected else 'values'}; give the directory of the model this was trained from"
            )
        done.add(placeholder.identity)
        tensors[name] = view(name, ref, "frozen")
        sources[source.path] = source
    told = f"{len(tensors)} frozen parameters are the base model's, from {os.fspath(found.base_model)}"
    archives = tuple(Archive(source, None, ()) for source in sources.values())
    return Supplied(tensors, archives, (told,) if tensors else ())


def _names(name: str) -> Iterator[str]:
    """The names the base model can have it under: its own, and the one from before PEFT wrapped it."""
    yield name
    plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
    if plain != name:
        yield plain
