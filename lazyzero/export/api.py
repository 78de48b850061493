"""convert() and stream(): an export in one call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Unpack

from lazyzero.checkpoint import Checkpoint, Opening, opened
from lazyzero.errors import InvalidRequest
from lazyzero.export.finite import FiniteWatch
from lazyzero.export.options import DEFAULT_SHARD, Options, make_options
from lazyzero.export.progress import Progress
from lazyzero.export.report import Finished, Report
from lazyzero.export.run import shards
from lazyzero.memory import peak_rss


def convert(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    output: str | os.PathLike[str],
    *,
    dtype: str = "fp32",
    format: str = "safetensors",
    max_shard_size: str | int | None = DEFAULT_SHARD,
    tied: str = "clone",
    overwrite: bool = False,
    force: bool = False,
    self_check: bool = True,
    verify: bool = False,
    check_finite: bool = False,
    checksum: str | None = None,
    max_memory: str | int | None = None,
    workers: int | str | None = None,
    io: str = "auto",
    progress: Progress | None = None,
    on_shard: Callable[[Finished], None] | None = None,
    **opening: Unpack[Opening],
) -> Report:
    """Converts a checkpoint (a path, or one that is open) into plain weights in the directory `output`.

    `dtype` is fp32, bf16, fp16 or keep; `format` safetensors or bin; `max_shard_size` a size like "5GB", or None for one
    file. An interrupted conversion is resumed by the same call. `on_shard` is called with each finished file and may
    take it away, so not beside `verify`, which compares every element afterwards. `opening` is what `open_checkpoint`
    takes: tag, also, exclude_frozen, base_model, state, tp_rules. Raises LazyZeroError's descendants; nothing
    unfinished is ever left under a final name.
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
        io=io,
        checksum=checksum,
    )
    with opened(checkpoint, opening) as source:
        return export(
            source,
            output,
            options,
            verify=verify,
            check_finite=check_finite,
            progress=progress,
            on_shard=on_shard,
        )


def export(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    options: Options,
    *,
    verify: bool = False,
    check_finite: bool = False,
    progress: Progress | None = None,
    on_shard: Callable[[Finished], None] | None = None,
) -> Report:
    """`convert` for an open checkpoint and checked options."""
    if verify and on_shard is not None:
        raise InvalidRequest(
            "--verify reads all files once the last is written, when --on-shard may have taken them away; "
            "leave one of the two, or run `lazyzero verify` where the files are"
        )
    began = time.monotonic()
    watch = FiniteWatch() if check_finite else None
    done = []
    taken = on_shard is not None
    # Closed in any case: an error that is kept would keep the generator, and with it the lock on the directory.
    with closing(
        shards(checkpoint, Path(output), options, progress=progress, observe=watch, taken_away=taken)
    ) as files:
        for finished in files:
            if on_shard is not None and not finished.handed:
                on_shard(finished)
            done.append(finished)
    if verify:
        _verify(checkpoint, output, options)
    return Report(
        output=os.fspath(output),
        layout=checkpoint.layout,
        files=tuple(finished.path.name for finished in done),
        tensors=len(checkpoint),
        nbytes=sum(finished.nbytes for finished in done),
        seconds=time.monotonic() - began,
        peak_rss=peak_rss(),
        checked=min(len(checkpoint.checks), 512) if options.self_check else 0,
        verified=verify,
        resumed=sum(finished.resumed for finished in done),
        tied=checkpoint.tied,
        missing=checkpoint.missing,
        warnings=(*checkpoint.warnings, *(watch.findings() if watch else ())),
    )


def _verify(checkpoint: Checkpoint, output: str | os.PathLike[str], options: Options) -> None:
    from lazyzero.verify import require, verify

    name = options.dtype.name if options.dtype else "keep"
    require(verify(checkpoint, output, dtype=name, self_check=options.self_check))


def stream(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    output: str | os.PathLike[str],
    *,
    dtype: str = "fp32",
    format: str = "safetensors",
    max_shard_size: str | int | None = DEFAULT_SHARD,
    tied: str = "clone",
    overwrite: bool = False,
    self_check: bool = True,
    max_memory: str | int | None = None,
    workers: int | str | None = None,
    progress: Progress | None = None,
    **opening: Unpack[Opening],
) -> Iterator[Finished]:
    """Yields each file of a conversion once it is whole and durable, the index last; move or delete it as you go.

    A model of any size leaves through one shard's worth of disk. The next shard is begun when the next file is asked
    for: until then the file counts as not dealt with, and is yielded (written, if it is gone) again after an
    interruption. What is done comes as `resumed`, and what an earlier consumer dealt with as `handed` too.
    """
    options = make_options(
        dtype=dtype,
        format=format,
        max_shard_size=max_shard_size,
        tied=tied,
        overwrite=overwrite,
        self_check=self_check,
        max_memory=max_memory,
        workers=workers,
    )
    with opened(checkpoint, opening) as source:
        yield from shards(source, Path(output), options, progress=progress, taken_away=True)
