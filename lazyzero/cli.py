"""The command line: inspect, convert, verify. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted, 143 terminated."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import lazyzero
from lazyzero.checkpoint import Checkpoint, open_checkpoint
from lazyzero.errors import InvalidRequest, LazyZeroError
from lazyzero.export import options as export_options
from lazyzero.export.hook import run_command
from lazyzero.export.progress import Progress, for_stream
from lazyzero.export.report import Finished, Report
from lazyzero.export.run import make_report, shards, to_pipe
from lazyzero.export.units import show_size, show_time
from lazyzero.inspection import describe, show

EXAMPLES = """\
examples:
  lazyzero inspect checkpoint-500                  what is in it, what a conversion would give
  lazyzero convert checkpoint-500 out              fp32 safetensors in shards of 5GB, with an index
  lazyzero convert checkpoint-500 out --dtype bf16 --max-shard-size 2GB
  lazyzero convert checkpoint-500 - > model.safetensors
  lazyzero verify checkpoint-500 out               compare every element again
An interrupted conversion goes on when the same command is given again.
"""


class Terminated(BaseException):
    """SIGTERM, raised where the main thread is, so that everything is taken back on the way out."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="lazyzero",
        description="Turns DeepSpeed ZeRO checkpoints into plain weights, in constant memory, without DeepSpeed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lazyzero {lazyzero.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _inspect_parser(commands)
    _convert_parser(commands)
    _verify_parser(commands)
    return parser


def _source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="a directory with `latest`, such as checkpoint-500, or a tag directory in it"
    )
    parser.add_argument("--tag", help="which tag to take, where there are several")
    parser.add_argument("--exclude-frozen", action="store_true", help="leave out parameters that were not trained")


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="fp32",
        choices=("fp32", "bf16", "fp16", "keep"),
        help="floating type of all weights (default fp32); keep: as stored",
    )
    parser.add_argument(
        "--format",
        default="safetensors",
        choices=("safetensors", "bin"),
        help="file format (default safetensors); bin needs torch",
    )
    parser.add_argument(
        "--max-shard-size",
        default=export_options.DEFAULT_SHARD,
        metavar="SIZE",
        help="such as 5GB (default), 500MB or 2GiB; none: one file",
    )
    parser.add_argument(
        "--tied",
        default="clone",
        choices=("clone", "drop"),
        help="tied weights in safetensors: under every name (default), or under the owner's only",
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="what the whole process may have resident (default 64MiB; bin: more, for torch)",
    )
    parser.add_argument("--workers", default="auto", metavar="N", help="threads that read, cast and write (default auto)")  # fmt: skip


def _inspect_parser(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show what a checkpoint holds and what a conversion would need")
    _source_arguments(parser)
    _output_arguments(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run_inspect)


def _convert_parser(commands: Any) -> None:
    parser = commands.add_parser("convert", help="write plain weights")
    _source_arguments(parser)
    parser.add_argument("output", help="directory to write to; - streams one safetensors file to standard output")
    _output_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace weight files in the output directory")
    parser.add_argument("--force", action="store_true", help="go on though the disk seems too small")
    parser.add_argument(
        "--no-self-check", action="store_true", help="do not compare with the 16-bit copy in the checkpoint"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and plan only, write nothing")
    parser.add_argument("--on-shard", metavar="CMD", help="shell command run for each finished file, which may take it away; LAZYZERO_PATH, _INDEX, _COUNT say which")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the report as JSON at the end")
    parser.set_defaults(run=run_convert)


def _verify_parser(commands: Any) -> None:
    parser = commands.add_parser("verify", help="compare every element of an output with its checkpoint")
    _source_arguments(parser)
    parser.add_argument("output", help="the directory that was written to")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "keep"), help="what the output should have (default: what it has)"
    )
    parser.add_argument(
        "--no-self-check", action="store_true", help="do not compare the checkpoint with its own 16-bit copy"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="threads (default 2)")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run_verify)


def _open(args: argparse.Namespace) -> Checkpoint:
    return open_checkpoint(args.checkpoint, tag=args.tag, exclude_frozen=args.exclude_frozen)


def _options(args: argparse.Namespace) -> export_options.Options:
    return export_options.make_options(
        dtype=args.dtype,
        format=args.format,
        max_shard_size=args.max_shard_size,
        tied=args.tied,
        overwrite=getattr(args, "overwrite", False),
        force=getattr(args, "force", False),
        self_check=not getattr(args, "no_self_check", False),
        max_memory=args.max_memory,
        workers=args.workers,
    )


def run_inspect(args: argparse.Namespace) -> int:
    """`lazyzero inspect`."""
    options = _options(args)
    with _open(args) as checkpoint:
        facts = describe(checkpoint, options, tensors=args.tensors)
    print(json.dumps(facts, indent=2) if args.json else show(facts))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """`lazyzero convert`."""
    options = _options(args)
    progress = for_stream(quiet=args.quiet)
    began = time.monotonic()
    with _open(args) as checkpoint:
        if args.dry_run:
            print(show(describe(checkpoint, options, tensors=False)))
            return 0
        _warn(checkpoint, progress)
        if args.output == "-":
            _to_stdout(checkpoint, options, progress)
            return 0
        done = _write(checkpoint, args, options, progress)
        report = make_report(checkpoint, args.output, options, done, time.monotonic() - began)
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    elif not args.quiet:
        print(summary(report))
    return 0


def _write(
    checkpoint: Checkpoint, args: argparse.Namespace, options: export_options.Options, progress: Progress
) -> list[Finished]:
    done = []
    files = shards(checkpoint, Path(args.output), options, progress=progress, taken_away=bool(args.on_shard))
    for finished in files:
        done.append(finished)
        if args.on_shard and not finished.resumed:
            run_command(args.on_shard, finished)
    return done


def _to_stdout(checkpoint: Checkpoint, options: export_options.Options, progress: Progress) -> None:
    if sys.stdout.isatty():
        raise InvalidRequest("standard output is a terminal; redirect it: lazyzero convert CKPT - > model.safetensors")
    to_pipe(checkpoint, sys.stdout.fileno(), options, progress=progress)


def _warn(checkpoint: Checkpoint, progress: Progress) -> None:
    for warning in checkpoint.warnings:
        progress.note(f"warning: {warning}")
    if checkpoint.missing:
        names = list(checkpoint.missing)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        progress.note(
            f"warning: no file holds the values of {', '.join(names[:5])}{more}; they are left out "
            f"({checkpoint.missing[names[0]]})"
        )


def summary(report: Report) -> str:
    """The last lines of a conversion."""
    rate = report.nbytes / report.seconds if report.seconds else 0
    files = f"{len(report.files)} file{'s' if len(report.files) != 1 else ''}"
    if report.resumed == len(report.files):
        return f"nothing to do: {report.output} is finished already ({files}, {show_size(report.nbytes)})"
    lines = [
        f"wrote {files}, {report.tensors} tensors, {show_size(report.nbytes)} to {report.output}"
        f" in {show_time(report.seconds)} ({show_size(rate)}/s), peak RSS {show_size(report.peak_rss)}"
    ]
    if report.resumed:
        lines.append(f"{report.resumed} of them were finished by an earlier run")
    if report.checked:
        lines.append(f"self-check: samples of {report.checked} tensors agree with the training copy")
    return "\n".join(lines)


def run_verify(args: argparse.Namespace) -> int:
    """`lazyzero verify`."""
    from lazyzero.verify import verify

    with _open(args) as checkpoint:
        result = verify(
            checkpoint, args.output, dtype=args.dtype, self_check=not args.no_self_check, workers=args.workers
        )
    if args.json:
        print(json.dumps(result.as_dict(), indent=2))
    elif result.ok:
        checked = f"; {result.checked} agree with the training copy in full" if result.checked else ""
        print(
            f"{result.output}: right: {result.tensors} tensors, {result.elements} elements compared in "
            f"{show_time(result.seconds)}{checked}, peak RSS {show_size(result.peak_rss)}"
        )
    else:
        for line in result.differences:
            print(f"differs: {line}")
        print(f"{result.output}: {len(result.differences)} differences from {args.checkpoint}", file=sys.stderr)
    return 0 if result.ok else 1


def _on_terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


def _interrupted(args: argparse.Namespace, code: int) -> int:
    what = "terminated" if code == 143 else "interrupted"
    resumable = args.command == "convert" and args.output != "-" and not args.dry_run
    hint = "; finished shards are kept, give the same command to go on" if resumable else ""
    print(f"\nlazyzero: {what}{hint}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code; no exception reaches the user as a traceback."""
    args = build_parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _on_terminate)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except InvalidRequest as error:
        print(f"lazyzero: error: {error}", file=sys.stderr)
        return 2
    except LazyZeroError as error:
        print(f"lazyzero: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _interrupted(args, 130)
    except Terminated:
        return _interrupted(args, 143)
    except BrokenPipeError:
        # Whoever read our output went away; standard output must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
