"""An export from beginning to end: checked, planned, written shard by shard, resumable at every moment.

check -> plan -> lock the output -> compare with the journal -> space -> shards, each published whole -> index
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from lazyzero.checkpoint import Checkpoint
from lazyzero.errors import InconsistentCheckpoint, InvalidRequest, OutputRefused
from lazyzero.export import checksum, journal, outdir, safetensors, torch_bin
from lazyzero.export.budget import Budget, allot
from lazyzero.export.journal import Done, Journal
from lazyzero.export.options import Options
from lazyzero.export.plan import Plan, Shard, make_plan
from lazyzero.export.progress import Progress, Silent
from lazyzero.export.report import Finished
from lazyzero.export.sink import FileSink, PipeSink, Sink, temporary, write_small
from lazyzero.export.stream import Observe, Segment, pump
from lazyzero.selfcheck import check
from lazyzero.tensor import Placeholder, Slice, Striped, View


def placeholders(checkpoint: Checkpoint) -> dict[str, Placeholder]:
    """What planning needs to know of a checkpoint: names, shapes, dtypes, ties."""
    return {name: Placeholder(tensor.shape, tensor.dtype, tensor.tied_to) for name, tensor in checkpoint.items()}


def plan_export(checkpoint: Checkpoint, options: Options) -> Plan:
    """The files an export with these options writes. Raises InconsistentCheckpoint when there is nothing to write."""
    if not checkpoint:
        raise InconsistentCheckpoint(f"{checkpoint.directory}: holds no weights that could be written")
    return make_plan(
        placeholders(checkpoint),
        format=options.format,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        tied=options.tied,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Everything a shard needs to be written."""

    checkpoint: Checkpoint
    options: Options
    plan: Plan
    budget: Budget
    progress: Progress
    observe: Observe | None = None

    def pump(self, places: tuple[safetensors.Place, ...], sink: Sink) -> None:
        """Streams the tensors of one file, then makes sure that the sources are still those that were planned with."""
        segments = [Segment(self.checkpoint[place.name], place.placeholder.dtype, place.offset) for place in places]
        pump(
            segments,
            sink,
            window=self.budget.window,
            workers=self.budget.workers,
            io=self.options.io,
            observe=self.observe,
            wrote=self.progress.advance,
        )
        for source in self.checkpoint.sources:
            source.check()


def shards(
    checkpoint: Checkpoint,
    output: Path,
    options: Options,
    *,
    progress: Progress | None = None,
    observe: Observe | None = None,
    taken_away: bool = False,
) -> Iterator[Finished]:
    """Writes the export into `output`, yielding each file once it is durable under its final name, the index last.

    Files that an earlier, interrupted run of the same export finished are yielded as `resumed`. With `taken_away` the
    consumer removes each file, so space is needed for one at a time and their absence later is no surprise.
    """
    shown = progress or Silent()
    prepare(checkpoint, options)
    plan = plan_export(checkpoint, options)
    budget = allot(options.max_memory, options.workers, torch=options.format == "bin")
    with ExitStack() as stack:
        stack.enter_context(outdir.opened(output, tag=Path(checkpoint.directory)))
        record = begin(checkpoint, output, plan, options, taken_away=taken_away)
        todo = [shard for shard in plan.shards if shard.filename not in record.done]
        sizes = [_file_size(shard) for shard in todo] or [0]
        outdir.check_space(output, max(sizes) if taken_away else sum(sizes), force=options.force)
        shown.start(sum(shard.nbytes for shard in todo))
        stack.callback(shown.close)
        yield from _write_all(Work(checkpoint, options, plan, budget, shown, observe), output, record)


def prepare(checkpoint: Checkpoint, options: Options) -> int:
    """What must hold before anything is written: all data at hand, and the self-check; the number of tensors checked."""
    if options.format == "bin":
        torch_bin.require_torch()
    for tensor in checkpoint.values():
        if not isinstance(tensor.data, (Slice, Striped, View)):  # these are whole
            next(tensor.pieces(0, min(1, tensor.numel)), None)  # raises for data in files that are not there
    return check(checkpoint.checks) if options.self_check else 0


def begin(checkpoint: Checkpoint, output: Path, plan: Plan, options: Options, *, taken_away: bool) -> Journal:
    """The journal to go on from. Raises OutputRefused when the directory holds anything else."""
    identity = journal.identity_of(plan, {**options.settings(), "state": checkpoint.state}, checkpoint.archives)
    if options.overwrite:
        outdir.clear(output)
    found = journal.load(output)
    if options.merge and found and (found.finished or journal.differences(found.identity, identity)):
        found = None  # files that are there already are replaced one by one, each by a whole one
    if found is None:
        outdir.sweep(output)
        if not (options.overwrite or options.merge):
            outdir.refuse_strangers(output, root=Path(checkpoint.path))
        return Journal(identity)
    different = journal.differences(found.identity, identity)
    if different:
        raise OutputRefused(
            f"{output}: holds an export of something else ({'; '.join(different[:4])}); "
            "give the same command, choose another place, or start anew with --overwrite"
        )
    outdir.sweep(output)
    return Journal(identity, _still_there(output, found, taken_away=taken_away), found.finished)


def _still_there(output: Path, found: Journal, *, taken_away: bool) -> dict[str, Done]:
    """The finished files that are as they were left; one that is gone counts where a consumer takes them away."""
    kept = {}
    for name, done in found.done.items():
        try:
            there = os.stat(output / name).st_size == done.nbytes
        except OSError:
            there = taken_away
        if there:
            kept[name] = done
    return kept


def _write_all(work: Work, output: Path, record: Journal) -> Iterator[Finished]:
    extra = [work.plan.index] if work.plan.index else []
    count = len(work.plan.shards) + len(extra) + work.options.checksum
    if work.options.merge:
        for name in extra:  # an old index must not stand beside shards that are no longer all its own
            outdir.remove(output / name)
    for number, shard in enumerate(work.plan.shards, start=1):
        path = output / shard.filename
        done, resumed = record.done.get(shard.filename), shard.filename in record.done
        if done is None:
            done = write_shard(work, shard, path)
            record = replace(record.with_done(shard.filename, done), finished=False)
            record.save(output)
        elif work.options.checksum and not done.sha256 and path.exists():
            done = replace(done, sha256=checksum.file_digest(path))
            record = record.with_done(shard.filename, done)
        yield Finished(path, number, count, done.nbytes, resumed=resumed)
    if work.options.checksum:
        text = checksum.sums_text({name: done.sha256 for name, done in record.done.items()})
        yield _small(output / checksum.NAME, text, count - len(extra), count)
    for name in extra:
        yield _small(output / name, index_text(work.plan), count, count)
    if work.options.merge:
        outdir.remove(output / journal.NAME)
    elif not record.finished:
        replace(record, finished=True).save(output)


def _small(path: Path, text: bytes, index: int, count: int) -> Finished:
    """A small file written, unless it is there already."""
    resumed = path.exists() and path.read_bytes() == text
    if not resumed:
        write_small(path, text)
    return Finished(path, index, count, len(text), resumed=resumed)


def _file_size(shard: Shard) -> int:
    """The bytes of a shard's file, its header or frame estimated."""
    return shard.nbytes + 512 * len(shard.entries) + 4096


def write_shard(work: Work, shard: Shard, path: Path) -> Done:
    """Writes one file whole and durable. Nothing is left of it when that fails."""
    if work.options.format == "bin":
        frame, places, sink = _bin_sink(shard, path)
    else:
        layout = safetensors.lay_out(shard)
        frame, places, sink = layout.header, layout.places, FileSink(path, layout.size)
    hashing = checksum.HashingSink(sink) if work.options.checksum else None
    target: Sink = hashing or sink
    try:
        if frame:
            target.write(0, memoryview(frame))
        work.pump(places, target)
        target.finish()
    except BaseException:
        target.abandon()
        raise
    return Done(os.stat(path).st_size, hashing.digest if hashing else "")


def _bin_sink(shard: Shard, path: Path) -> tuple[bytes, tuple[safetensors.Place, ...], checksum.SeekableSink]:
    draft = temporary(path)
    try:
        torch_bin.write_skeleton(draft, shard)
        skeleton = torch_bin.read_skeleton(draft, shard)
        return b"", skeleton.places, torch_bin.Checksums(FileSink(path, None), skeleton)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def index_text(plan: Plan) -> bytes:
    """The index file: the same bytes DeepSpeed and transformers write."""
    index = {"metadata": {"total_size": plan.total_size}, "weight_map": plan.weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def to_pipe(
    checkpoint: Checkpoint,
    fd: int,
    options: Options,
    *,
    progress: Progress | None = None,
    observe: Observe | None = None,
) -> int:
    """Streams one safetensors file to a descriptor that need not seek; the number of bytes.

    Raises InvalidRequest for options that a stream cannot honour.
    """
    if options.format != "safetensors" or options.checksum:
        raise InvalidRequest("standard output takes one safetensors file; --format bin and --checksum need a directory")
    prepare(checkpoint, options)
    plan = plan_export(checkpoint, replace(options, max_shard_size=None))
    layout = safetensors.lay_out(plan.shards[0])
    budget = allot(options.max_memory, 1, torch=False)
    shown = progress or Silent()
    shown.start(plan.total_size)
    sink = PipeSink(fd)
    try:
        sink.write(0, memoryview(layout.header))
        Work(checkpoint, options, plan, budget, shown, observe).pump(layout.places, sink)
    finally:
        shown.close()
    return layout.size
