"""The command line: inspect, convert, verify. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted, 143 terminated."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import NoReturn

from lazyzero.arguments import build_parser
from lazyzero.checkpoint import Checkpoint, open_checkpoint
from lazyzero.errors import InvalidRequest, LazyZeroError
from lazyzero.export.api import export
from lazyzero.export.finite import FiniteWatch
from lazyzero.export.hook import run_command
from lazyzero.export.options import Options, make_options
from lazyzero.export.progress import Progress, for_stream
from lazyzero.export.report import Report
from lazyzero.export.run import to_pipe
from lazyzero.export.trace import MemoryTrace
from lazyzero.export.units import show_size, show_time
from lazyzero.inspection import describe, notices, show

RESUMABLE = "; finished shards are kept, give the same command to go on"


class Terminated(BaseException):
    """SIGTERM, raised where the main thread is, so that everything is taken back on the way out."""


def _open(args: argparse.Namespace) -> Checkpoint:
    return open_checkpoint(
        args.checkpoint,
        tag=args.tag,
        also=args.also,
        exclude_frozen=args.exclude_frozen,
        base_model=args.base_model,
        state=args.state,
        tp_rules=args.tp_rules,
    )


def _options(args: argparse.Namespace) -> Options:
    return make_options(
        dtype=args.dtype,
        format=args.format,
        max_shard_size=args.max_shard_size,
        tied=args.tied,
        overwrite=getattr(args, "overwrite", False),
        force=getattr(args, "force", False),
        self_check=not getattr(args, "no_self_check", False),
        max_memory=args.max_memory,
        workers=args.workers,
        io=args.io,
        checksum=getattr(args, "checksum", None),
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
    hook = (lambda finished: run_command(args.on_shard, finished)) if args.on_shard else None
    with ExitStack() as stack:
        if args.memory_trace:
            stack.enter_context(MemoryTrace(args.memory_trace))
        checkpoint = stack.enter_context(_open(args))
        if args.dry_run:
            print(show(describe(checkpoint, options, tensors=False)))
            return 0
        _warn(checkpoint, progress)
        if args.output == "-":
            _to_stdout(checkpoint, args, options, progress)
            return 0
        report = export(
            checkpoint,
            args.output,
            options,
            verify=args.verify,
            check_finite=args.check_finite,
            progress=progress,
            on_shard=hook,
        )
    for warning in report.warnings[len(checkpoint.warnings) :]:
        progress.note(f"warning: {warning}")
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    elif not args.quiet:
        print(summary(report))
    return 0


def _to_stdout(checkpoint: Checkpoint, args: argparse.Namespace, options: Options, progress: Progress) -> None:
    if args.verify or args.on_shard or args.json:
        raise InvalidRequest("--verify, --on-shard and --json need a directory to write to, not standard output")
    if sys.__stdout__ is None:
        raise InvalidRequest("standard output is closed; redirect it: lazyzero convert CKPT - > model.safetensors")
    if sys.stdout.isatty():
        raise InvalidRequest("standard output is a terminal; redirect it: lazyzero convert CKPT - > model.safetensors")
    watch = FiniteWatch() if args.check_finite else None
    to_pipe(checkpoint, sys.stdout.fileno(), options, progress=progress, observe=watch)
    for finding in watch.findings() if watch else ():
        progress.note(f"warning: {finding}")


def _warn(checkpoint: Checkpoint, progress: Progress) -> None:
    for warning in notices(checkpoint):
        progress.note(f"warning: {warning}")


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
    if report.verified:
        lines.append("verified: every element was read back and is right")
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


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RUN = {"inspect": run_inspect, "convert": run_convert, "verify": run_verify}


def _on_terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


def _hint(args: argparse.Namespace) -> str:
    if args.command != "convert" or args.dry_run:
        return ""
    if args.output == "-":
        return "; what was written to standard output is not a whole file"
    return RESUMABLE + (" (without --overwrite)" if args.overwrite else "")


def guarded(run: Callable[[], int], *, hint: str = "") -> int:
    """The exit code of `run`; whatever it raises becomes a line on standard error, `hint` after an interruption."""
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in _SIGNALS}
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        code = run()
        sys.stdout.flush()
        return code
    except InvalidRequest as error:
        print(f"lazyzero: error: {error}", file=sys.stderr)
        return 2
    except LazyZeroError as error:
        print(f"lazyzero: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _stopped("interrupted" + hint, 130)
    except Terminated:
        return _stopped("terminated" + hint, 143)
    except BrokenPipeError:
        # Whoever read our output went away; standard output must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (OSError, MemoryError) as error:  # nobody below made more of it
        print(f"lazyzero: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(how: str, code: int) -> int:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # another one has nothing left to stop
    print(f"\nlazyzero: {how}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code; no exception reaches the user as a traceback."""
    args = build_parser().parse_args(argv)
    return guarded(lambda: _RUN[args.command](args), hint=_hint(args))


def _open_streams() -> None:
    """Standard streams that take any file name, and where they were closed, nothing.

    No file of ours may come by the number of a closed one: what others write to it would end up there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - for as long as the process lives
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def program() -> NoReturn:
    """The command `lazyzero`. After a signal nothing is waited for any more: to take down torch alone is a second."""
    _open_streams()
    code = main()
    if code in (130, 143):
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    program()
