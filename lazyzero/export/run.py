"""An export from beginning to end: checked, planned, written shard by shard, resumable at every moment.

check -> plan -> lock the output -> compare with the journal -> space -> shards, each published whole -> index
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from lazyzero.checkpoint import Checkpoint, open_checkpoint
from lazyzero.container.source import Source
from lazyzero.errors import InconsistentCheckpoint, InvalidRequest, OutputRefused
from lazyzero.export import journal, outdir, safetensors, torch_bin
from lazyzero.export.budget import Budget, allot
from lazyzero.export.journal import Journal
from lazyzero.export.options import Options, make_options
from lazyzero.export.plan import Plan, Shard, make_plan
from lazyzero.export.progress import Progress, Silent
from lazyzero.export.report import Finished, Report
from lazyzero.export.sink import FileSink, PipeSink, Sink, temporary, write_small
from lazyzero.export.stream import Observe, Segment, pump
from lazyzero.memory import peak_rss
from lazyzero.selfcheck import check
from lazyzero.tensor import Placeholder


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

    def segments(self, places: tuple[safetensors.Place, ...]) -> list[Segment]:
        """What is to be streamed where."""
        return [Segment(self.checkpoint[place.name], place.placeholder.dtype, place.offset) for place in places]

    def pump(self, places: tuple[safetensors.Place, ...], sink: Sink) -> None:
        """Streams the tensors of one file, and makes sure that the sources are still those that were planned with."""
        segments = self.segments(places)
        pump(
            segments,
            sink,
            window=self.budget.window,
            workers=self.budget.workers,
            observe=self.observe,
            wrote=self.progress.advance,
        )
        for source in sources_of(segments):
            source.check()


def sources_of(segments: list[Segment]) -> set[Source]:
    """The files these tensors are read from."""
    return {piece.storage.source for segment in segments for piece in segment.tensor.pieces(0, segment.tensor.numel)}


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

    Files an earlier, interrupted run of the same export finished are yielded as `resumed`. With `taken_away` the
    consumer removes each file, so space is needed for one at a time and their absence later is no surprise.
    """
    shown = progress or Silent()
    prepare(checkpoint, options)
    plan = plan_export(checkpoint, options)
    with ExitStack() as stack:
        stack.enter_context(outdir.opened(output, tag=Path(checkpoint.directory)))
        record = begin(checkpoint, output, plan, options, taken_away=taken_away)
        todo = [shard for shard in plan.shards if shard.filename not in record.done]
        sizes = [_file_size(shard) for shard in todo] or [0]
        outdir.check_space(output, max(sizes) if taken_away else sum(sizes), force=options.force)
        work = Work(checkpoint, options, plan, allot(options.max_memory, options.workers), shown, observe)
        shown.start(sum(shard.nbytes for shard in todo))
        stack.callback(shown.close)
        yield from _write_all(work, output, record)


def prepare(checkpoint: Checkpoint, options: Options) -> int:
    """What must hold before anything is written: all data at hand, and the self-check; the number of tensors checked."""
    if options.format == "bin":
        torch_bin.require_torch()
    for tensor in checkpoint.values():
        next(tensor.pieces(0, min(1, tensor.numel)), None)  # raises for data in files that are not there
    return check(checkpoint.checks) if options.self_check else 0


def begin(checkpoint: Checkpoint, output: Path, plan: Plan, options: Options, *, taken_away: bool) -> Journal:
    """The journal to go on from. Raises OutputRefused when the directory holds anything else."""
    identity = journal.identity_of(plan, options.settings(), checkpoint.archives)
    if options.overwrite:
        outdir.clear(output)
        found = None
    else:
        found = journal.load(output)
    if found is None:
        for path in journal.leftovers(output):
            path.unlink()
        if not options.overwrite:
            outdir.refuse_strangers(output, root=Path(checkpoint.path))
        return Journal(identity)
    different = journal.differences(found.identity, identity)
    if different:
        raise OutputRefused(
            f"{output}: holds an export of something else ({'; '.join(different[:4])}); "
            "give the same command, choose another place, or start anew with --overwrite"
        )
    for path in journal.leftovers(output):
        path.unlink()
    return Journal(identity, _still_there(output, found, taken_away=taken_away), found.finished)


def _still_there(output: Path, found: Journal, *, taken_away: bool) -> dict[str, int]:
    """The finished files that are as they were left; one that is gone counts where a consumer takes them away."""
    kept = {}
    for name, size in found.done.items():
        try:
            there = os.stat(output / name).st_size == size
        except OSError:
            there = taken_away
        if there:
            kept[name] = size
    return kept


def _write_all(work: Work, output: Path, record: Journal) -> Iterator[Finished]:
    count = len(work.plan.shards) + (work.plan.index is not None)
    for number, shard in enumerate(work.plan.shards, start=1):
        path = output / shard.filename
        if shard.filename in record.done:
            yield Finished(path, number, count, record.done[shard.filename], resumed=True)
            continue
        nbytes = write_shard(work, shard, path)
        record = record.with_done(shard.filename, nbytes)
        record.save(output)
        yield Finished(path, number, count, nbytes)
    if work.plan.index is not None:
        path = output / work.plan.index
        text = index_text(work.plan)
        resumed = record.finished and path.exists() and path.read_bytes() == text
        if not resumed:
            write_small(path, text)
        yield Finished(path, count, count, len(text), resumed=resumed)
    if not record.finished:
        replace(record, finished=True).save(output)


def _file_size(shard: Shard) -> int:
    """The bytes of a shard's file; a .bin file's frame is estimated."""
    return shard.nbytes + 512 * len(shard.entries) + 4096


def write_shard(work: Work, shard: Shard, path: Path) -> int:
    """Writes one file whole and durable; its size in bytes. Nothing is left of it when that fails."""
    if work.options.format == "bin":
        return _write_bin(work, shard, path)
    layout = safetensors.lay_out(shard)
    sink = FileSink(path, layout.size)
    with _abandoning(sink):
        sink.write(0, memoryview(layout.header))
        work.pump(layout.places, sink)
        sink.finish()
    return layout.size


def _write_bin(work: Work, shard: Shard, path: Path) -> int:
    draft = temporary(path)
    try:
        torch_bin.write_skeleton(draft, shard)
        skeleton = torch_bin.read_skeleton(draft, shard)
        sink = torch_bin.Checksums(FileSink(path, None), skeleton)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    with _abandoning(sink):
        work.pump(skeleton.places, sink)
        sink.finish()
    return os.stat(path).st_size


class _abandoning:  # noqa: N801 - reads as a statement
    """Takes back what a sink wrote when the block does not end well."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self._sink.abandon()


def index_text(plan: Plan) -> bytes:
    """The index file: the same bytes DeepSpeed and transformers write."""
    index = {"metadata": {"total_size": plan.total_size}, "weight_map": plan.weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def to_pipe(checkpoint: Checkpoint, fd: int, options: Options, *, progress: Progress | None = None) -> int:
    """Streams one safetensors file to a descriptor that need not seek; the number of bytes.

    Raises InvalidRequest for options that a stream cannot honour.
    """
    if options.format != "safetensors":
        raise InvalidRequest("only safetensors can be streamed to standard output; a .bin file needs a file to seek in")
    prepare(checkpoint, options)
    plan = plan_export(checkpoint, replace(options, max_shard_size=None))
    layout = safetensors.lay_out(plan.shards[0])
    shown = progress or Silent()
    shown.start(plan.total_size)
    sink = PipeSink(fd)
    work = Work(checkpoint, options, plan, allot(options.max_memory, 1), shown)
    sink.write(0, memoryview(layout.header))
    work.pump(layout.places, sink)
    shown.close()
    return layout.size


def convert(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    output: str | os.PathLike[str],
    *,
    dtype: str = "fp32",
    format: str = "safetensors",
    max_shard_size: str | int | None = "5GB",
    tied: str = "clone",
    tag: str | None = None,
    exclude_frozen: bool = False,
    overwrite: bool = False,
    force: bool = False,
    self_check: bool = True,
    max_memory: str | int | None = None,
    workers: int | str | None = None,
    progress: Progress | None = None,
    on_shard: Callable[[Finished], None] | None = None,
) -> Report:
    """Converts a checkpoint (a path, or one that is open) into plain weights in the directory `output`.

    `dtype` is fp32, bf16, fp16 or keep; `format` safetensors or bin; `max_shard_size` a size like "5GB", or None for one
    file. An interrupted conversion is resumed by the same call. `on_shard` is called with each finished file and may
    take it away. Raises LazyZeroError's descendants; nothing unfinished is ever left under a final name.
    """
    options = make_options(
        dtype=dtype,
        format=format,
        max_shard_size=max_shard_size,
        tied=tied,
        overwrite=overwrite,
        force=force,
        self_check=self_check,
        max_memory=max_memory,
        workers=workers,
    )
    began = time.monotonic()
    with ExitStack() as stack:
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = stack.enter_context(open_checkpoint(checkpoint, tag=tag, exclude_frozen=exclude_frozen))
        done = []
        for finished in shards(checkpoint, Path(output), options, progress=progress, taken_away=on_shard is not None):
            done.append(finished)
            if on_shard is not None and not finished.resumed:
                on_shard(finished)
    return make_report(checkpoint, os.fspath(output), options, done, time.monotonic() - began)


def make_report(checkpoint: Checkpoint, output: str, options: Options, done: list[Finished], seconds: float) -> Report:
    """Sums up what was done."""
    return Report(
        output=output,
        layout=checkpoint.layout,
        files=tuple(finished.path.name for finished in done),
        tensors=len(checkpoint),
        nbytes=sum(finished.nbytes for finished in done),
        seconds=seconds,
        peak_rss=peak_rss(),
        checked=min(len(checkpoint.checks), 512) if options.self_check else 0,
        resumed=sum(finished.resumed for finished in done),
        tied=checkpoint.tied,
        missing=checkpoint.missing,
        warnings=checkpoint.warnings,
    )
