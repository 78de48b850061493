"""The output directory: made, locked against a second run, and looked through before anything is written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from lazyzero.errors import InvalidRequest, NotEnoughSpace, OutputRefused
from lazyzero.export import journal
from lazyzero.export.sink import TEMPORARY, sync_directory, write_errors
from lazyzero.export.units import show_size

# Files this program writes, and the only ones `overwrite` removes.
_OURS = re.compile(
    r"(model|pytorch_model)(-\d{5,}-of-\d{5,})?\.(safetensors|bin)(\.index\.json)?|SHA256SUMS|"
    + re.escape(journal.NAME)
)
_SLACK = 1 << 20  # bytes kept free beside the shards, for the index, the journal and the file system's own


def is_ours(name: str) -> bool:
    """Whether a file name is one of ours."""
    return _OURS.fullmatch(name) is not None


@contextlib.contextmanager
def opened(output: Path, *, tag: Path) -> Iterator[None]:
    """Makes `output` and holds it locked. A directory that was made here and stayed empty is taken away again.

    Raises OutputRefused for a place inside the tag directory `tag`, a file, or one another run is writing to, and
    WriteError for one that cannot be made.
    """
    made: list[Path] = []
    fd = -1
    try:
        with write_errors(output, "created"):
            _refuse_place(output, tag)
            _make(output, made)
            fd = _lock(output)
        yield
    finally:
        # While the lock is held: the next run must not find a directory that is about to vanish.
        for directory in reversed(made):
            with contextlib.suppress(OSError):  # not empty: it has our files
                directory.rmdir()
        if fd >= 0:
            os.close(fd)


def _refuse_place(output: Path, tag: Path) -> None:
    if "\0" in str(output):
        raise InvalidRequest(f"{str(output)!r:.200}: has a NUL in it; no file name does")
    where, forbidden = Path(os.path.realpath(output)), Path(os.path.realpath(tag))
    if where == forbidden or forbidden in where.parents:
        raise OutputRefused(
            f"{output}: lies in the checkpoint's tag directory, which is never written to; choose another"
        )
    if os.path.lexists(output) and not output.is_dir():
        raise OutputRefused(f"{output}: is a file; give a directory to write to")


def _make(output: Path, made: list[Path]) -> None:
    """Creates the directory and its parents; those that were created go to `made`, outermost first."""
    for path in [*reversed(output.parents), output]:
        if not path.exists():
            path.mkdir(exist_ok=True)
            made.append(path)
            with contextlib.suppress(PermissionError):  # a parent that may be entered, not read
                sync_directory(path.parent)


def _lock(output: Path) -> int:
    """The directory's descriptor, locked as long as it is open. Whoever held it and was killed holds it no longer."""
    while True:
        fd = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise OutputRefused(
                f"{output}: another conversion is writing there; wait for it, or choose another"
            ) from None
        except OSError:
            return fd  # a file system without locks
        if _is_at(fd, output):
            return fd
        os.close(fd)  # the run that held it has removed it: make it again
        output.mkdir(parents=True, exist_ok=True)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def our_files(output: Path) -> list[str]:
    """The files of our naming in `output`."""
    return [name for name in _listing(output) if is_ours(name)]


def _listing(output: Path) -> list[str]:
    with write_errors(output, "listed"):
        return sorted(os.listdir(output))


def remove(output: Path, names: Iterable[str]) -> None:
    """Removes files that are there, the index first: a directory must never look finished that is not."""
    for name in sorted(names, key=_removal_order):
        with write_errors(output / name, "removed"):
            (output / name).unlink(missing_ok=True)
            if name.endswith(".index.json"):
                sync_directory(output)


def sweep(output: Path) -> None:
    """Removes the temporary files of an interrupted run."""
    for name in _listing(output):
        if name.endswith(TEMPORARY) and is_ours(name.removesuffix(TEMPORARY)):
            with write_errors(output / name, "removed"):
                (output / name).unlink()


def _removal_order(name: str) -> tuple[bool, bool, str]:
    # The journal goes last: without it the rest would be no longer ours to replace.
    return name == journal.NAME, not name.endswith(".index.json"), name


def refuse_strangers(output: Path, *, root: Path) -> None:
    """Refuses a directory that holds anything, except the checkpoint's own root, where only our names are in the way."""
    names = _listing(output)
    if os.path.realpath(output) == os.path.realpath(root):
        names = [name for name in names if is_ours(name)]
    if names:
        shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        raise OutputRefused(
            f"{output}: is not empty ({shown}); choose another place, or replace weight files there with --overwrite"
        )


def check_space(output: Path, needed: int, *, force: bool) -> None:
    """Raises NotEnoughSpace unless the file system has `needed` bytes left, or `force`."""
    with write_errors(output, "looked at"):
        free = shutil.disk_usage(output).free
    if needed + _SLACK > free and not force:
        raise NotEnoughSpace(
            f"{output}: needs {show_size(needed)} ({needed} bytes), {show_size(free)} are free; nothing was written; "
            "free some space, take each shard away as it is finished with --on-shard, or try anyway with --force"
        )
