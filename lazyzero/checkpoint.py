"""open_checkpoint() and the Checkpoint it returns: a read-only mapping from names to LazyTensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypedDict

from lazyzero.container.archive import Archive
from lazyzero.container.source import POOL, Source
from lazyzero.errors import InvalidRequest
from lazyzero.layout import moments
from lazyzero.layout.contents import Check, Contents
from lazyzero.layout.discover import find_tag_dir
from lazyzero.layout.found import Found
from lazyzero.layout.registry import read_contents
from lazyzero.layout.tp_rules import read_rules
from lazyzero.layout.union import list_all
from lazyzero.tensor import LazyTensor


class Checkpoint(Mapping[str, LazyTensor]):
    """The weights in a DeepSpeed checkpoint, by name, in DeepSpeed's own order; tied names come last.

    Only metadata has been read. Tensors stay usable after `close()`, which merely gives back file descriptors.
    """

    def __init__(self, path: str, directory: str, contents: Contents, state: str | None = None) -> None:
        self.path = path
        self.directory = directory
        self.state = state
        self._contents = contents

    def __getitem__(self, name: str) -> LazyTensor:
        return self._contents.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents.entries)

    def __len__(self) -> int:
        return len(self._contents.entries)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files kept open for reading."""
        POOL.close()

    @property
    def layout(self) -> str:
        """What was recognised: "ZeRO-1", "ZeRO-2", "ZeRO-3", "BF16_Optimizer", "stage 0", "universal", ..."""
        return self._contents.layout

    @property
    def stage(self) -> int:
        """ZeRO stage, as recorded (2 for both 1 and 2 in DeepSpeed 0.4.0-0.6.7)."""
        return self._contents.stage

    @property
    def world_size(self) -> int:
        """Number of partitions of each parameter."""
        return self._contents.world_size

    @property
    def version(self) -> str | None:
        """The DeepSpeed version that wrote it, where recorded."""
        return self._contents.version

    @property
    def missing(self) -> dict[str, str]:
        """Names that appear in the checkpoint but whose values no file holds, with the reason."""
        return dict(self._contents.missing)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before trusting the result: files set aside, values of lower precision."""
        return self._contents.warnings

    @property
    def checks(self) -> tuple[Check, ...]:
        """Pairs of a rebuilt tensor and the copy of it in `module`, for the self-check."""
        return self._contents.checks

    @property
    def tied(self) -> dict[str, str]:
        """alias -> owner for every tied name."""
        return {name: tensor.tied_to for name, tensor in self.items() if tensor.tied_to is not None}

    @property
    def archives(self) -> tuple[Archive, ...]:
        """The parsed files this checkpoint was read from."""
        return self._contents.archives

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files this checkpoint was read from."""
        return tuple(archive.source for archive in self._contents.archives)

    def __repr__(self) -> str:
        return f"Checkpoint({self.directory!r}, {self.layout}, {self.world_size} ranks, {len(self)} tensors)"


class Opening(TypedDict, total=False):
    """What `open_checkpoint` takes beside the path, for the functions that open a checkpoint on the way."""

    tag: str | None
    also: Sequence[str | os.PathLike[str]]
    exclude_frozen: bool
    base_model: str | os.PathLike[str] | None
    state: str | None
    tp_rules: str | os.PathLike[str] | None


@contextmanager
def opened(checkpoint: str | os.PathLike[str] | Checkpoint, opening: Opening) -> Iterator[Checkpoint]:
    """An open checkpoint as it is, or the one at a path, opened here and closed at the end.

    Raises InvalidRequest for words about opening what is open, and what `open_checkpoint` raises.
    """
    if isinstance(checkpoint, Checkpoint):
        if opening:
            raise InvalidRequest(f"{', '.join(opening)}: the checkpoint is open already; say this to open_checkpoint")
        yield checkpoint
        return
    with open_checkpoint(checkpoint, **opening) as fresh:
        yield fresh


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    exclude_frozen: bool = False,
    base_model: str | os.PathLike[str] | None = None,
    state: str | None = None,
    tp_rules: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Opens a DeepSpeed checkpoint: a root with `latest`, a root with one tag, or a tag directory.

    `also` names further directories of the same save, for ranks that saved elsewhere (`use_node_local_storage`) or were
    left in `tmp-checkpoint-*`: files are joined by rank, and what is there twice must be the same. With `exclude_frozen`,
    parameters that were not trained are left out. `base_model` is a directory of plain weights (safetensors or `.bin`)
    for the frozen parameters that ZeRO-3 did not save. With `state` ("exp_avg" or "exp_avg_sq") the tensors are the
    optimizer's moments under the names of the parameters it trains, and nothing else. `tp_rules` is a file that says how
    tensor-parallel parameters are joined (a pattern and a dimension or `replicated` on each line), where the checkpoint
    does not.

    Raises CheckpointNotFound, AmbiguousCheckpoint, MissingFiles, BrokenArchive, InconsistentCheckpoint, UnsupportedLayout
    or InvalidRequest.
    """
    directory = find_tag_dir(path, tag)
    found = Found(
        list_all(directory, also),
        exclude_frozen=exclude_frozen,
        base_model=None if base_model is None else os.fspath(base_model),
        state=moments.requested(state),
        tp_rules=() if tp_rules is None else read_rules(tp_rules),
    )
    contents = read_contents(found)
    return Checkpoint(os.fspath(path), os.fspath(directory), contents, found.state)
