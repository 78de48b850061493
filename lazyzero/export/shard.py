"""Drafts of output files: written whole and durable under a temporary name, not published yet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lazyzero.checkpoint import Checkpoint
from lazyzero.errors import BrokenArchive
from lazyzero.export import checksum, safetensors, torch_bin
from lazyzero.export.budget import Budget
from lazyzero.export.options import Options
from lazyzero.export.plan import Plan, Shard
from lazyzero.export.progress import Progress
from lazyzero.export.sink import Draft, FileSink, Nowhere, Sink, temporary
from lazyzero.export.stream import Observe, Segment, pump


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
        try:
            self._stream(segments, sink, self.progress.advance)
        except BrokenArchive:
            self.check_sources()  # it was whole when it was opened: most likely it changed
            raise
        self.check_sources()

    def watch(self, shard: Shard) -> None:
        """Lets `observe` see the tensors of a file that an earlier run has written."""
        segments, at = list[Segment](), 0
        for name, _ in shard.entries:
            tensor = self.checkpoint[name]
            segments.append(Segment(tensor, tensor.dtype, at))
            at += tensor.nbytes
        self._stream(segments, Nowhere(), lambda count: None)

    def _stream(self, segments: list[Segment], sink: Sink, wrote: Callable[[int], None]) -> None:
        pump(
            segments,
            sink,
            window=self.budget.window,
            workers=self.budget.workers,
            io=self.options.io,
            observe=self.observe,
            wrote=wrote,
        )

    def check_sources(self) -> None:
        """Raises SourceChanged unless all sources are as they were when the checkpoint was opened."""
        for source in self.checkpoint.sources:
            source.check()


@dataclass(frozen=True, slots=True)
class Sealed:
    """A draft that only its final name is missing from, and its SHA-256 where that was asked for."""

    draft: Draft
    sha256: str = ""


def write_shard(work: Work, shard: Shard, path: Path) -> Sealed:
    """Writes one weight file. Nothing is left of it when that fails."""
    if work.options.format == "bin":
        frame, places, draft = _bin_draft(shard, path)
    else:
        layout = safetensors.lay_out(shard)
        frame, places, draft = layout.header, layout.places, FileSink(path, layout.size)
    hashing = checksum.HashingSink(draft) if work.options.checksum else None
    target: Draft = hashing or draft
    try:
        if frame:
            target.write(0, memoryview(frame))
        work.pump(places, target)
        target.seal()
    except BaseException:
        target.abandon()
        raise
    return Sealed(target, hashing.digest if hashing else "")


def _bin_draft(shard: Shard, path: Path) -> tuple[bytes, tuple[safetensors.Place, ...], Draft]:
    skeleton_path = temporary(path)
    try:
        torch_bin.write_skeleton(skeleton_path, shard)
        skeleton = torch_bin.read_skeleton(skeleton_path, shard)
        return b"", skeleton.places, torch_bin.Checksums(FileSink(path, None), skeleton)
    except BaseException:
        with contextlib.suppress(OSError):
            skeleton_path.unlink()
        raise


def write_text(path: Path, data: bytes) -> Sealed:
    """Writes an index or the like."""
    draft = FileSink(path, len(data))
    try:
        draft.write(0, memoryview(data))
        draft.seal()
    except BaseException:
        draft.abandon()
        raise
    return Sealed(draft)


def file_size(shard: Shard) -> int:
    """The bytes of a shard's file, its header or frame estimated."""
    return shard.nbytes + 512 * len(shard.entries) + 4096


def index_text(plan: Plan) -> bytes:
    """The index file: the same bytes DeepSpeed and transformers write."""
    index = {"metadata": {"total_size": plan.total_size}, "weight_map": plan.weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
