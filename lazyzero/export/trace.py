"""Samples the process's memory while an export runs, into a CSV file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType

from lazyzero.export.sink import write_error
from lazyzero.memory import status

_EVERY = 0.05  # seconds
_COLUMNS = ("VmRSS", "RssAnon", "RssFile", "VmHWM")


class MemoryTrace:
    """A context in which `seconds,rss,anon,file,peak` (bytes) is written to `path` twenty times a second."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._stop = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="lazyzero-trace", daemon=True)

    def __enter__(self) -> MemoryTrace:
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise write_error(self._path, "opened", error) from None
        self._file.write("seconds,rss,anon,file,peak\n")
        self._began = time.monotonic()
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            while True:
                now = status()
                row = ",".join(str(now.get(column, 0)) for column in _COLUMNS)
                self._file.write(f"{time.monotonic() - self._began:.3f},{row}\n")
                if self._stop.wait(_EVERY):
                    return
        except OSError as error:
            self._error = error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self._file.close()
        except OSError as late:
            self._error = self._error or late
        if self._error is not None and error is None:
            raise write_error(self._path, "written", self._error)
