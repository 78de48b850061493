"""Runs the user's command for a finished file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

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
    # Its output must not mix with ours on standard output. In a session of its own, all of it can be ended with us.
    process = subprocess.Popen(command, shell=True, env=environment, stdout=2, start_new_session=True)
    try:
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    if code:
        raise WriteError(
            f"{finished.path}: the command for finished files ended with {code}: {command!r:.200}; "
            "the same conversion goes on from here, with this file first"
        )


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
