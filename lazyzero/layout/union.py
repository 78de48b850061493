"""Several directories of one save as one: node-local saves, and what an interrupted save left in `tmp-checkpoint-*`.

Every node that saves to its own disk writes the files of its own ranks and a copy of the model file. Files are joined by
rank; of what is there twice, one is taken if both say the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lazyzero.cast import same
from lazyzero.container.objects import TensorRef
from lazyzero.container.source import Source
from lazyzero.errors import CheckpointNotFound, InconsistentCheckpoint, InvalidRequest
from lazyzero.layout.contents import view
from lazyzero.layout.discover import FileSet, Ranks, find_tag_dir, list_files
from lazyzero.layout.states import ModelStates, read_model

_CHUNK = 4 << 20  # bytes compared at once


def list_all(directory: Path, also: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> FileSet:
    """The files of a tag directory, joined with those of the same tag in further directories.

    Each of `also` is a root, which must have the tag, or a tag directory itself. Raises CheckpointNotFound,
    InconsistentCheckpoint for two files of one rank that differ, InvalidRequest for universal checkpoints.
    """
    files = list_files(directory)
    for path in [also] if isinstance(also, (str, os.PathLike)) else also:
        other = list_files(_tag_dir(Path(path), directory.name))
        if os.path.samefile(other.directory, directory) or other.directory in files.also:
            continue
        if files.universal or other.universal:
            raise InvalidRequest(f"{other.directory}: a universal checkpoint is one directory, others cannot be added")
        files = join(files, other)
    return files


def join(files: FileSet, other: FileSet) -> FileSet:
    """Both directories' files by role and rank. Raises InconsistentCheckpoint where two of one name differ."""
    optim = {
        prefix: _ranks(files.optim.get(prefix, {}), other.optim.get(prefix, {}))
        for prefix in sorted({*files.optim, *other.optim})
    }
    model = dict(files.model)
    for rank, path in other.model.items():
        model[rank] = _model(model[rank], path, _home(optim, rank)) if rank in model else path
    return replace(
        files,
        optim=optim,
        zero_model=_ranks(files.zero_model, other.zero_model),
        model=model,
        experts=_names(files.experts, other.experts),
        expert_optim=_names(files.expert_optim, other.expert_optim),
        layers=_names(files.layers, other.layers),
        offloaded=files.offloaded or other.offloaded,
        also=(*files.also, other.directory),
    )


def _tag_dir(path: Path, tag: str) -> Path:
    if not path.is_dir():
        return find_tag_dir(path)  # which says what is wrong
    if list_files(path).any or (path / "offloaded_tensors").is_dir():
        return path
    if (path / tag).is_dir():
        return path / tag
    found = find_tag_dir(path)
    raise CheckpointNotFound(
        f"{path}: has no tag {tag!r} to add files from, but {found.name!r}; name that directory itself"
    )


def _ranks(mine: Ranks, theirs: Ranks) -> Ranks:
    joined = dict(mine)
    for rank, path in theirs.items():
        if rank in joined:
            _require_same(joined[rank], path)
        else:
            joined[rank] = path
    return joined


def _names(mine: list[str], theirs: list[str]) -> list[str]:
    joined = {os.path.basename(path): path for path in mine}
    for path in theirs:
        name = os.path.basename(path)
        if name in joined:
            _require_same(joined[name], path)
        else:
            joined[name] = path
    return [joined[name] for name in sorted(joined)]


def _require_same(mine: str, theirs: str) -> None:
    if not _same_bytes(Source.open(mine), Source.open(theirs)):
        raise InconsistentCheckpoint(_differ(mine, theirs))


def _differ(mine: str, theirs: str) -> str:
    return f"{theirs}: differs from {mine}; both are of one rank, so one of them is of another save: leave it out"


def _same_bytes(mine: Source, theirs: Source) -> bool:
    if os.path.samefile(mine.path, theirs.path):
        return True
    if mine.size != theirs.size:
        return False
    return all(
        mine.read(start, min(_CHUNK, mine.size - start)) == theirs.read(start, min(_CHUNK, mine.size - start))
        for start in range(0, mine.size, _CHUNK)
    )


def _home(optim: dict[str, Ranks], mp: int) -> str | None:
    """The directory global rank 0 saved to."""
    return next((os.path.dirname(ranks[0, mp]) for ranks in optim.values() if (0, mp) in ranks), None)


def _model(mine: str, theirs: str, home: str | None) -> str:
    """The one of two model files to use: global rank 0's.

    Each node writes one with the same parameters, but only rank 0's lists `shared_params`; buffers such as running means
    and the client state are each node's own, and those of rank 0 count, as when DeepSpeed saves to one place.
    """
    if _same_bytes(Source.open(mine), Source.open(theirs)):
        return mine
    a, b = read_model(mine, without_module=True), read_model(theirs, without_module=True)
    if _described(a) != _described(b) or not all(_same_values(*pair) for pair in _parameters(a, b)):
        raise InconsistentCheckpoint(_differ(mine, theirs))
    if home in (os.path.dirname(mine), os.path.dirname(theirs)):
        return mine if os.path.dirname(mine) == home else theirs
    return theirs if b.shared and not a.shared else mine


def _described(model: ModelStates) -> tuple[object, ...]:
    """What must be equal before values are compared."""
    steps = model.root.get("global_steps")
    tensors = [(name, ref.shape, ref.dtype) for name, ref in (*model.module.items(), *model.frozen.items())]
    return (model.version, steps if isinstance(steps, int) else None, model.param_shapes, tensors)


def _parameters(a: ModelStates, b: ModelStates) -> list[tuple[TensorRef, TensorRef]]:
    buffers = a.buffers or frozenset()
    pairs = [(a.module[name], b.module[name]) for name in a.module if name not in buffers]
    return pairs + [(a.frozen[name], b.frozen[name]) for name in a.frozen]


def _same_values(mine: TensorRef, theirs: TensorRef) -> bool:
    a, b = view("", mine, "module"), view("", theirs, "module")
    return all(same(x, y) for x, y in zip(a.chunks(_CHUNK), b.chunks(_CHUNK), strict=True))
