"""Finds the tag directory a user means and sorts its files by role. Reads names and `latest`, no archive.

<root>/latest                                  one line, the tag
<root>/<tag>/[bf16_]zero_pp_rank_<dp>_mp_rank_<mp>_optim_states.pt
<root>/<tag>/mp_rank_<mp>_model_states.pt      or, ZeRO-3, zero_pp_rank_<dp>_mp_rank_<mp>_model_states.pt
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from lazyzero.errors import (
    AmbiguousCheckpoint,
    CheckpointNotFound,
    InconsistentCheckpoint,
    LazyZeroError,
    ReadError,
    one_line,
)

_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_?optim_states\.pt")
_ZERO_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_([0-9]+)_model_states\.pt")
EXPERT = re.compile(r"(?:layer_([0-9]+)_)?expert_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
EXPERT_OPTIM = re.compile(r"expp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
LAYER = re.compile(r"layer_([0-9]+)(?:-[a-z]+_([0-9]+))?-model_states\.pt")  # the axis, `model`, where there is one
_LONGEST_TAG = 1024  # bytes; a path component has at most 255

Ranks = dict[tuple[int, int], str]


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of one tag directory by role; ranks are (data parallel, model parallel)."""

    directory: str
    optim: dict[str, Ranks] = field(default_factory=dict)  # by precision prefix: "", "bf16_", "fp16_"
    zero_model: Ranks = field(default_factory=dict)
    model: dict[int, str] = field(default_factory=dict)  # by model-parallel rank
    experts: list[str] = field(default_factory=list)
    expert_optim: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    universal: bool = False
    offloaded: bool = False
    also: tuple[str, ...] = ()  # further directories of the same save that files were taken from

    @property
    def any(self) -> bool:
        """Whether there is anything DeepSpeed would have written."""
        return bool(self.optim or self.zero_model or self.model or self.layers or self.experts or self.universal)

    @property
    def model_ranks(self) -> list[int]:
        """The model-parallel ranks that have files: tensor parallel, pipeline stages, or both."""
        optim = {mp for ranks in self.optim.values() for _, mp in ranks}
        return sorted(optim | set(self.model) | {mp for _, mp in self.zero_model})

    def of_model_rank(self, rank: int) -> FileSet:
        """The files of one model-parallel rank: a checkpoint without model parallelism."""
        optim = {prefix: _of(ranks, rank) for prefix, ranks in self.optim.items()}
        return replace(
            self,
            optim={prefix: ranks for prefix, ranks in optim.items() if ranks},
            zero_model=_of(self.zero_model, rank),
            model={mp: path for mp, path in self.model.items() if mp == rank},
        )


def _of(ranks: Ranks, rank: int) -> Ranks:
    return {key: path for key, path in ranks.items() if key[1] == rank}


def list_files(directory: str | os.PathLike[str]) -> FileSet:
    """Sorts the names in `directory`; unknown names are passed over. Raises CheckpointNotFound or ReadError."""
    files = FileSet(os.fspath(directory))
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"{files.directory}: no such directory") from None
    except OSError as error:
        raise ReadError(f"{files.directory}: cannot be listed: {error.strerror}") from None
    for name in names:
        _sort_in(files, name, os.path.join(files.directory, name))
    _refuse_doubles(files, names)
    zero = os.path.join(files.directory, "zero")
    offloaded = os.path.isdir(os.path.join(files.directory, "offloaded_tensors"))
    return FileSet(
        files.directory, files.optim, files.zero_model, files.model, files.experts, files.expert_optim, files.layers,
        universal=os.path.isdir(zero), offloaded=offloaded,
    )  # fmt: skip


def _sort_in(files: FileSet, name: str, path: str) -> None:
    if match := _OPTIM.fullmatch(name):
        files.optim.setdefault(match[1] or "", {})[int(match[2]), int(match[3])] = path
    elif match := _ZERO_MODEL.fullmatch(name):
        files.zero_model[int(match[1]), int(match[2])] = path
    elif match := _MODEL.fullmatch(name):
        files.model[int(match[1])] = path
    elif EXPERT.fullmatch(name):
        files.experts.append(path)
    elif EXPERT_OPTIM.fullmatch(name):
        files.expert_optim.append(path)
    elif LAYER.fullmatch(name):
        files.layers.append(path)


def _refuse_doubles(files: FileSet, names: list[str]) -> None:
    """No two files may be of one rank, as `mp_rank_0_` and `mp_rank_00_` would be: one of them would be passed over."""
    ranked = sum(map(len, files.optim.values())) + len(files.zero_model) + len(files.model)
    patterns = (_OPTIM, _ZERO_MODEL, _MODEL)
    found = [name for name in names if any(pattern.fullmatch(name) for pattern in patterns)]
    if len(found) > ranked:
        raise InconsistentCheckpoint(
            f"{files.directory}: expected one file for each rank, found {len(found)} files for {ranked} ranks "
            f"(ranks written in two ways); move those of another run away"
        )


def find_tag_dir(path: str | os.PathLike[str], tag: str | None = None) -> Path:
    """The tag directory for what the user gave: a root with `latest`, a root with one tag, or a tag directory.

    Raises CheckpointNotFound, AmbiguousCheckpoint (naming the tags), or ReadError.
    """
    root = Path(path)
    if not os.path.isdir(root):
        if os.path.exists(root):
            raise CheckpointNotFound(f"{root}: is a file; give the checkpoint's directory, {root.parent} perhaps")
        raise CheckpointNotFound(f"{root}: no such directory")
    if tag is not None:
        return _tagged(root, tag)
    if list_files(root).any:
        return root
    for pointer in ("latest", "latest_universal"):
        if os.path.isfile(root / pointer):
            return _pointed(root, root / pointer)
    tags = _tags(root)
    if len(tags) == 1:
        _refuse_elsewhere(root, tags[0], root)
        return root / tags[0]
    if tags:
        raise AmbiguousCheckpoint(
            f"{root}: has no `latest` file and several tags: {_listed(tags)}; choose one with --tag"
        )
    raise CheckpointNotFound(f"{root}: {_why_nothing(root)}")


def _tagged(root: Path, tag: str) -> Path:
    if os.path.isdir(root / tag) and list_files(root / tag).any:
        return root / tag
    if root.name == tag and list_files(root).any:
        return root
    raise CheckpointNotFound(f"{root}: has no tag {tag!r}; it has {_listed(_tags(root))}")


def _pointed(root: Path, pointer: Path) -> Path:
    try:
        with pointer.open("rb") as file:
            raw = file.read(_LONGEST_TAG + 1)
    except OSError as error:
        raise ReadError(f"{pointer}: cannot be read: {error.strerror}") from None
    tag = raw.decode("utf-8", "replace").strip()
    inside = Path(tag)
    plain = tag and len(raw) <= _LONGEST_TAG and tag.isprintable() and "\ufffd" not in tag
    if not plain or inside.is_absolute() or ".." in inside.parts:
        raise CheckpointNotFound(f"{pointer}: expected the name of a tag, found {tag[:60]!r}; name one with --tag")
    if not os.path.isdir(root / tag):
        raise CheckpointNotFound(f"{pointer}: names tag {tag!r}, which is not there; found {_listed(_tags(root))}")
    _refuse_elsewhere(root, tag, pointer)
    if not list_files(root / tag).any:
        raise CheckpointNotFound(f"{root / tag}: no DeepSpeed files in it; found {_listed(_tags(root))} in {root}")
    return root / tag


def _refuse_elsewhere(root: Path, tag: str, told_by: Path) -> None:
    """A tag that was not named by the user must not be a link to a place the user did not name."""
    if not Path(os.path.realpath(root / tag)).is_relative_to(os.path.realpath(root)):
        raise CheckpointNotFound(
            f"{told_by}: tag {tag!r} leads out of {root}; give that directory itself if you trust it"
        )


def _directories(root: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(root) if os.path.isdir(root / name))
    except OSError:
        return []


def _tags(root: Path) -> list[str]:
    return [name for name in _directories(root) if _holds_any(root / name)]


def _holds_any(directory: Path) -> bool:
    try:
        return list_files(directory).any
    except LazyZeroError:  # a neighbour that cannot be read is not the one that is meant
        return False


def _listed(tags: list[str]) -> str:
    return _some(tags) if tags else "no other tag"


def _some(names: list[str]) -> str:
    """The first names, each cut where it is no name to type."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(one_line(name)[:100] for name in names[:20]) + more


def _why_nothing(root: Path) -> str:
    inner = [name for name in _directories(root) if _tags(root / name) or os.path.exists(root / name / "latest")]
    if inner:
        return f"holds no checkpoint itself; give one of {_some(inner)}"
    from lazyzero.layout.leftovers import plain_weights  # only now, when it takes a look into files to say more

    weights = plain_weights(root)
    if weights:
        return weights
    return "no DeepSpeed checkpoint here (no *_optim_states.pt or *_model_states.pt, here or one level down)"
