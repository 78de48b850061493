"""Runs the user's command for a finished file."""

from __future__ import annotations

import os
import subprocess

from lazyzero.errors import WriteError
from lazyzero.export.report import Finished


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
    # Its output must not mix with ours on standard output.
    done = subprocess.run(command, shell=True, env=environment, stdout=2, check=False)
    if done.returncode:
        raise WriteError(
            f"{finished.path}: the command for finished files ended with {done.returncode}: {command!r:.200}; "
            "the file is kept, and the same conversion goes on from here"
        )
