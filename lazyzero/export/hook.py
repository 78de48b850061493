"""Runs the user's command for a finished file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator

from lazyzero.errors import WriteError
from lazyzero.export.report import Finished

_GRACE = 0.3  # seconds


def run_command(command: str, finished: Finished) -> None:
    """Runs `command` in a shell with LAZYZERO_PATH, LAZYZERO_INDEX and LAZYZERO_COUNT in its environment.

    Raises WriteError when it fails: what it was to carry away is then still there.
    """
    environment = {
        **os.environ,
        "LAZYZERO_PATH": str(finished.path),
        "LAZYZERO_INDEX": str(finished.index),
        "LAZYZERO_COUNT": str(finished.count),
    }
    process = None
    try:
        with _signals_later():
            # Its output must not mix with ours on standard output. In a session of its own, all of it can be ended with us.
            process = subprocess.Popen(command, shell=True, env=environment, stdout=2, start_new_session=True)
        code = process.wait()
    except BaseException:
        if process is not None:
            _end(process)
        raise
    if code:
        raise WriteError(
            f"{finished.path}: the command for finished files ended with {code}: {command!r:.200}; "
            "the same conversion goes on from here, with this file first"
        )


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """What a signal raises is raised at the end: in between, a process could start that nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and what it has started: asked first, then forced."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(_GRACE)
            return
        except subprocess.TimeoutExpired:
            pass
