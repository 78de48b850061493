"""What a run shows while it goes: a bar on a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Protocol, TextIO

from lazyzero.export.units import show_size, show_time

_EVERY = 5.0  # seconds between lines where there is no terminal


class Progress(Protocol):
    """Told about bytes as they are written; calls may come from several threads."""

    def start(self, total: int) -> None:
        """`total` bytes are to be written."""

    def advance(self, count: int) -> None:
        """`count` more bytes are written."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def close(self) -> None:
        """No more calls."""


class Silent:
    """Shows nothing."""

    def start(self, total: int) -> None:
        """Ignored."""

    def advance(self, count: int) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""

    def close(self) -> None:
        """Ignored."""


class Bar:
    """tqdm's bar, in bytes with rate and time left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None
        self._lock = threading.Lock()

    def start(self, total: int) -> None:
        """Draws the empty bar."""
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="B", unit_scale=True, file=self._stream, leave=False, dynamic_ncols=True)

    def advance(self, count: int) -> None:
        """Moves the bar."""
        with self._lock:
            self._bar.update(count)

    def note(self, text: str) -> None:
        """Prints above the bar."""
        if self._bar is None:
            print(text, file=self._stream)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()


class Lines:
    """A line every few seconds, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._began = self._told = time.monotonic()

    def start(self, total: int) -> None:
        """Begins to count."""
        self._total = total
        self._began = self._told = time.monotonic()

    def advance(self, count: int) -> None:
        """Says how far it is, unless it did so just now."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._told < _EVERY:
                return
            self._told = now
            rate = self._done / (now - self._began)
            left = show_time((self._total - self._done) / rate) if rate else "?"
            share = 100 * self._done // max(self._total, 1)
            line = f"{share}%  {show_size(self._done)} of {show_size(self._total)}  {show_size(rate)}/s  {left} left"
            print(line, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Prints a line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to take away."""


def for_stream(stream: TextIO | None = None, *, quiet: bool = False) -> Progress:
    """What suits `stream` (standard error): a bar on a terminal, lines elsewhere, nothing when `quiet`."""
    chosen = sys.stderr if stream is None else stream
    if quiet:
        return Silent()
    return Bar(chosen) if chosen.isatty() else Lines(chosen)
