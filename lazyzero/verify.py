"""Compares an output with its checkpoint: files, index, names, shapes, dtypes, ties, and every element's bits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from lazyzero import dtypes
from lazyzero.checkpoint import Checkpoint, Opening, opened
from lazyzero.dtypes import DType
from lazyzero.errors import BrokenArchive, VerificationFailed
from lazyzero.export.run import placeholders
from lazyzero.layout.contents import Check
from lazyzero.memory import peak_rss
from lazyzero.readers import Stored
from lazyzero.selfcheck import check
from lazyzero.tensor import Placeholder
from lazyzero.threads import Queue, share
from lazyzero.verification import frame, structure
from lazyzero.verification.sums import listed, misnamed, outdated
from lazyzero.verification.values import Batch, Tally, batches, compare


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
    output = structure.look(directory)
    wanted = placeholders(checkpoint)
    differences = list(structure.faults(output, wanted, _expected_dtype(dtype, output, wanted)))
    same = {
        file: {
            name: stored
            for name, stored in tensors.items()
            if name in checkpoint and stored.shape == checkpoint[name].shape
        }
        for file, tensors in output.tensors.items()
    }
    tally, found = Tally(), list[str]()
    checks = checkpoint.checks if self_check else ()
    jobs = Queue(_jobs(checkpoint, output, same, checks, tally, found))

    def work() -> None:
        for job in jobs:
            job()

    share(work, max(1, workers), jobs.stop)
    compared = [checkpoint[name] for tensors in same.values() for name in tensors]
    return Verification(
        output=os.fspath(directory),
        files=tuple(path.name for path in output.files),
        tensors=len(compared),
        elements=sum(tensor.numel for tensor in compared),
        checked=len(checks),
        differences=(*differences, *sorted(found), *tally.lines(checkpoint.values())),
        seconds=time.monotonic() - began,
        peak_rss=peak_rss(),
    )


def _jobs(
    checkpoint: Checkpoint,
    output: structure.Output,
    same: dict[str, dict[str, Stored]],
    checks: Sequence[Check],
    tally: Tally,
    found: list[str],
) -> Iterator[Callable[[], object]]:
    """All that takes time, in parts that any thread can do: lines go to `found`, differing elements to `tally`."""
    if checks:
        yield partial(check, checks, full=True)
    sums = listed(output.files[0].parent) if output.whole else None
    if sums is not None:
        found.extend(misnamed(sums, (path.name for path in output.files)))
    for path in output.files:
        if sums and path.name in sums:
            yield partial(_collect, outdated, found, path, sums[path.name])
        if path.name in output.broken:
            continue
        if output.format == "bin":
            yield partial(_collect, frame.faults, found, path)
        for batch in batches(output.readers[path.name], same[path.name]):
            yield partial(_compare, batch, checkpoint, tally, found)


def _collect(faults: Callable[..., Iterator[str]], found: list[str], *args: object) -> None:
    found.extend(faults(*args))


def _compare(batch: Batch, checkpoint: Checkpoint, tally: Tally, found: list[str]) -> None:
    try:
        compare(batch, checkpoint, tally)
    except BrokenArchive as error:  # the reader took the file's header, and now not its data
        found.append(str(error))


def _expected_dtype(dtype: str | None, output: structure.Output, wanted: dict[str, Placeholder]) -> DType | None:
    """The floating dtype the output should have; None for the stored ones."""
    if dtype is not None:
        return dtypes.requested(dtype)
    floating = {output.stored(name).dtype for name in wanted if name in output.where and wanted[name].dtype.floating}
    return floating.pop() if len(floating) == 1 else None


def require(result: Verification) -> None:
    """Raises VerificationFailed naming the first differences."""
    if not result.ok:
        more = len(result.differences) - 1
        rest = f" (and {more} more)" if more else ""
        raise VerificationFailed(f"{result.output}: {result.differences[0]}{rest}")
