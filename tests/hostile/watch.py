"""Opens paths given on standard input under an audit hook and reports what Python was asked to do meanwhile.

Run as a process of its own: an audit hook cannot be taken away again. A line of output for each path: what came out and
every audited event but the opening of that very file, or of files in that very directory, for reading.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import lazyzero
from lazyzero.container.archive import open_archive

# What reading a file does itself: listing the directory, mapping a range, telling objects apart.
QUIET = {"os.listdir", "mmap.__new__", "builtins.id"}


class Watch:
    """The events while one path is open."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.events: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.path is None or event in QUIET:
            return
        if (
            event == "open"
            and isinstance(args[0], str)
            and args[0].startswith(self.path)
            and not args[2] & os.O_ACCMODE
        ):
            return
        self.events.append(f"{event} {args!r:.200}")


def opened(path: str) -> str:
    """What comes out of a file or a directory; every tensor of a directory is read."""
    try:
        if not os.path.isdir(path):
            return type(open_archive(path).root).__name__
        for tensor in lazyzero.open_checkpoint(path).values():
            tensor.numpy()
    except lazyzero.LazyZeroError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def main() -> None:
    """Warms up on the first path, watches the others."""
    paths = sys.stdin.read().split("\0")
    opened(paths[0])
    for codec in ("raw_unicode_escape", "latin-1", "ascii"):  # Python imports its codecs when they are first used
        b"a".decode(codec)
    watch, modules = Watch(), set(sys.modules)
    sys.addaudithook(watch)
    for path in paths[1:]:
        watch.path, watch.events = path, []
        outcome = opened(path)
        watch.path = None
        new = sorted(set(sys.modules) - modules)
        modules.update(new)
        sys.stdout.write(json.dumps({"path": path, "outcome": outcome, "events": watch.events, "modules": new}) + "\n")


if __name__ == "__main__":
    main()
