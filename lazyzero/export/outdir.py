"""The output directory: made, locked against a second run, and looked through before anything is written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from lazyzero.errors import NotEnoughSpace, OutputRefused
from lazyzero.export import journal
from lazyzero.export.sink import TEMPORARY, write_error
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

    Raises OutputRefused for a place inside the tag directory `tag`, a file, or one another run is writing to.
    """
    _refuse_place(output, tag)
    made = _make(output)
    try:
        with _locked(output):
            yield
    finally:
        for directory in made:
            with contextlib.suppress(OSError):  # not empty: it has our files
                directory.rmdir()


def _refuse_place(output: Path, tag: Path) -> None:
    where = output.resolve()
    if where == tag.resolve() or tag.resolve() in where.parents:
        raise OutputRefused(
            f"{output}: lies in the checkpoint's tag directory, which is never written to; choose another"
        )
    if output.exists() and not output.is_dir():
        raise OutputRefused(f"{output}: is a file; give a directory to write to")


def _make(output: Path) -> list[Path]:
    """Creates the directory and its parents; those that were created, innermost first."""
    missing = [path for path in (output, *output.parents) if not path.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(output, "created", error) from None
    return missing


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    try:
        fd = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise write_error(output, "opened", error) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputRefused(
                f"{output}: another conversion is writing there; wait for it, or choose another"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


def clear(output: Path) -> None:
    """Removes the files of our naming, the index first: a directory must never look finished that is not."""
    names = sorted((entry.name for entry in output.iterdir() if is_ours(entry.name)), key=_removal_order)
    for name in names:
        remove(output / name)


def sweep(output: Path) -> None:
    """Removes the temporary files of an interrupted run."""
    for path in output.glob(f"*{TEMPORARY}"):
        if is_ours(path.name.removesuffix(TEMPORARY)):
            remove(path)


def remove(path: Path) -> None:
    """Removes a file, if it is there. Raises WriteError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, "removed", error) from None


def _removal_order(name: str) -> tuple[bool, bool, str]:
    # The journal goes last: without it the rest would be no longer ours to replace.
    return name == journal.NAME, not name.endswith(".index.json"), name


def refuse_strangers(output: Path, *, root: Path) -> None:
    """Refuses a directory that holds anything, except the checkpoint's own root, where only our names are in the way."""
    names = sorted(entry.name for entry in output.iterdir())
    if output.resolve() == root.resolve():
        names = [name for name in names if is_ours(name)]
    if names:
        shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        raise OutputRefused(
            f"{output}: is not empty ({shown}); choose another place, or replace weight files there with --overwrite"
        )


def check_space(output: Path, needed: int, *, force: bool) -> None:
    """Raises NotEnoughSpace unless the file system has `needed` bytes left, or `force`."""
    free = shutil.disk_usage(output).free
    if needed + _SLACK > free and not force:
        raise NotEnoughSpace(
            f"{output}: needs {show_size(needed)} ({needed} bytes), {show_size(free)} are free; nothing was written; "
            "free some space, take each shard away as it is finished with --on-shard, or try anyway with --force"
        )
