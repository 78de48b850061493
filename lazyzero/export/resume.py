"""What an export finds in its output directory: nothing, its own earlier work to go on from, or something to refuse."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from lazyzero.checkpoint import Checkpoint
from lazyzero.errors import LazyZeroError, OutputRefused
from lazyzero.export import checksum, journal, outdir
from lazyzero.export.journal import Done, Journal
from lazyzero.export.options import Options
from lazyzero.export.plan import Plan
from lazyzero.export.sink import write_errors


def begin(checkpoint: Checkpoint, output: Path, plan: Plan, options: Options, *, taken_away: bool) -> Journal:
    """The journal to go on from; temporary files are gone, nothing else is touched.

    Raises OutputRefused when the directory holds anything but earlier work of the same export.
    """
    settings = {**options.settings(), "state": checkpoint.state, "tensors": len(checkpoint)}
    identity = journal.identity_of(plan, settings, checkpoint.archives)
    found = None if options.overwrite else journal.load(output)
    if options.merge and found and (journal.differences(found.identity, identity) or _complete(found, plan)):
        found = None  # its files are replaced one by one
    if found is not None:
        _require_same(output, found, identity)
    outdir.sweep(output)
    if found is None:
        if not (options.overwrite or options.merge):
            outdir.refuse_strangers(output, root=Path(checkpoint.path))
        return Journal(identity)
    kept = {name: one for name, one in found.done.items() if _counts(output / name, one, taken_away=taken_away)}
    if options.checksum:
        names = [shard.filename for shard in plan.shards if shard.filename in kept]
        kept.update((name, _with_digest(output / name, kept[name])) for name in names)
    if plan.index and any(shard.filename not in kept for shard in plan.shards):
        kept.pop(plan.index, None)  # it must not be there before the rest is
    return Journal(identity, kept)


def _require_same(output: Path, found: Journal, identity: dict[str, object]) -> None:
    different = journal.differences(found.identity, identity)
    if different:
        raise OutputRefused(
            f"{output}: holds an export of something else ({'; '.join(different[:4])}); "
            "give the same command, choose another place, or start anew with --overwrite"
        )


def _counts(path: Path, done: Done, *, taken_away: bool) -> bool:
    """Whether a finished file is as it was left; one that is gone counts if its consumer had it and took it away."""
    try:
        return os.stat(path).st_size == done.nbytes
    except OSError:
        return taken_away and done.handed


def _with_digest(path: Path, done: Done) -> Done:
    """Its checksum, where an earlier run was not asked for it."""
    if done.sha256:
        return done
    try:
        return replace(done, sha256=checksum.file_digest(path))
    except OSError as error:
        raise OutputRefused(
            f"{path}: was finished and taken away without a checksum ({error.strerror}); "
            "go on without --checksum, or start anew with --overwrite"
        ) from None


def _complete(found: Journal, plan: Plan) -> bool:
    return all(shard.filename in found.done for shard in plan.shards) and plan.index in (None, *found.done)


def clear_way(output: Path, plan: Plan, record: Journal, options: Options) -> None:
    """Removes what stands under the name of a file still to be written; with `overwrite` every file of our naming.

    With `merge` weight files stay until each is replaced, and only the index goes.
    """
    present = outdir.our_files(output)
    planned = {plan.index, *(() if options.merge else (checksum.NAME, *(shard.filename for shard in plan.shards)))}
    gone = [name for name in present if name in planned and name not in record.done]
    outdir.remove(output, present if options.overwrite else gone)


def reclaimable(output: Path) -> int:
    """The bytes that `clear_way` with `overwrite` sets free."""
    with write_errors(output, "looked at"):
        return sum((output / name).lstat().st_blocks * 512 for name in outdir.our_files(output))


def give_up(output: Path) -> None:
    """After a failure or a signal: no temporary file stays, nor a journal that nothing is to be gone on from."""
    with contextlib.suppress(LazyZeroError, OSError):
        outdir.sweep(output)
        record = journal.load(output)
        if record and not any(one.handed or (output / name).exists() for name, one in record.done.items()):
            outdir.remove(output, [journal.NAME])
