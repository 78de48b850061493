"""An export from beginning to end: checked, planned, written shard by shard, resumable at every moment.

check -> plan -> lock the output -> compare with the journal -> space -> shards, each published whole -> index
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lazyzero.checkpoint import Checkpoint
from lazyzero.errors import InconsistentCheckpoint, InvalidRequest, WriteError
from lazyzero.export import checksum, journal, outdir, resume, safetensors, torch_bin
from lazyzero.export.budget import allot
from lazyzero.export.journal import Done, Journal
from lazyzero.export.options import Options
from lazyzero.export.plan import Plan, Shard, make_plan
from lazyzero.export.progress import Progress, Silent
from lazyzero.export.report import Finished
from lazyzero.export.shard import Sealed, Work, file_size, index_text, write_shard, write_text
from lazyzero.export.sink import PipeSink
from lazyzero.export.stream import Observe
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


def shards(
    checkpoint: Checkpoint,
    output: Path,
    options: Options,
    *,
    progress: Progress | None = None,
    observe: Observe | None = None,
    taken_away: bool = False,
) -> Generator[Finished, None, None]:
    """Writes the export into `output`, yielding each file once it is durable under its final name, the index last.

    Files that an earlier, interrupted run of the same export finished are yielded as `resumed`. With `taken_away` the
    consumer may remove each file before it asks for the next: space is needed for one at a time, and a file that is
    gone later counts as finished if the consumer had it.
    """
    shown = progress or Silent()
    prepare(checkpoint, options)
    plan = plan_export(checkpoint, options)
    budget = allot(options.max_memory, options.workers, torch=options.format == "bin")
    with outdir.opened(output, tag=Path(checkpoint.directory)):
        record = resume.begin(checkpoint, output, plan, options, taken_away=taken_away)
        todo = [shard for shard in plan.shards if shard.filename not in record.done]
        if todo:
            sizes = [file_size(shard) for shard in todo]
            freed = resume.reclaimable(output) if options.overwrite else 0
            outdir.check_space(output, (max(sizes) if taken_away else sum(sizes)) - freed, force=options.force)
        try:
            resume.clear_way(output, plan, record, options)
            shown.start(sum(shard.nbytes for shard in todo))
            work = Work(checkpoint, options, plan, budget, shown, observe)
            yield from _write_all(work, output, record, taken_away=taken_away)
        except BaseException:
            resume.give_up(output)
            raise
        finally:
            shown.close()


def prepare(checkpoint: Checkpoint, options: Options) -> int:
    """What must hold before anything is written: all data at hand, and the self-check; the number of tensors checked."""
    if options.format == "bin":
        torch_bin.require_torch()
    for tensor in checkpoint.values():
        if not isinstance(tensor.data, (Slice, Striped, View)):  # these are whole
            next(tensor.pieces(0, min(1, tensor.numel)), None)  # raises for data in files that are not there
    return check(checkpoint.checks) if options.self_check else 0


def _write_all(work: Work, output: Path, record: Journal, *, taken_away: bool) -> Iterator[Finished]:
    """Publishes what is still missing, in order; the journal knows of each file before it appears."""
    shards = {shard.filename: shard for shard in work.plan.shards}
    names = [
        *shards,
        *([checksum.NAME] if work.options.checksum else ()),
        *([work.plan.index] if work.plan.index else ()),
    ]
    for number, name in enumerate(names, start=1):
        resumed = name in record.done
        if not resumed:
            sealed = _seal(work, shards.get(name), output / name, record)
            try:
                # What the journal says of a name must never be taken to mean a file that was there before.
                outdir.remove(output, [name])
                record = record.with_done(name, Done(sealed.draft.size, sealed.sha256))
                record.save(output)
                sealed.draft.publish()
            except WriteError:
                with suppress(WriteError):
                    outdir.remove(output, [name])  # it may be there, and not be durable
                raise
            finally:
                sealed.draft.abandon()
        elif work.observe and name in shards:
            work.watch(shards[name])
        done = record.done[name]
        yield Finished(output / name, number, len(names), done.nbytes, resumed=resumed, handed=done.handed)
        if taken_away and not done.handed:  # asked for the next one: the consumer is done with this one
            record = record.with_done(name, replace(done, handed=True))
            record.save(output)
    if work.options.merge:
        outdir.remove(output, [journal.NAME])


def _seal(work: Work, shard: Shard | None, path: Path, record: Journal) -> Sealed:
    if shard is not None:
        return write_shard(work, shard, path)
    if path.name == checksum.NAME:
        return write_text(
            path, checksum.sums_text({one.filename: record.done[one.filename].sha256 for one in work.plan.shards})
        )
    return write_text(path, index_text(work.plan))


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
    sink = PipeSink(fd, layout.size)
    try:
        sink.write(0, memoryview(layout.header))
        Work(checkpoint, options, plan, budget, shown, observe).pump(layout.places, sink)
        sink.complete()
    finally:
        shown.close()
    return layout.size
