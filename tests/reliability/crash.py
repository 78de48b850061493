"""Kills a conversion at every single call it makes to the system, one after the other, and goes on after each.

    python -m tests.reliability.crash CHECKPOINT DIRECTORY MODE STEP '{"format": "safetensors", ...}'

A process of its own, without threads, so that it can fork: importing once makes a kill cost milliseconds. MODE is `plain`,
`taken` (each file is moved away as it is finished), `overwrite` or `merge` (over a finished export of another kind); of all the calls every
STEP-th is taken. It prints how many kills there were; an assertion fails when a guarantee does not hold.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import lazyzero
from lazyzero.export import journal, kernel, outdir, torch_bin
from lazyzero.export.api import export
from lazyzero.export.options import make_options
from lazyzero.export.sink import TEMPORARY

_CALLS = (
    *((os, name) for name in ("open", "pwrite", "pread", "fsync", "close", "replace", "unlink", "mkdir", "rmdir")),
    (kernel, "allocate"),
    (torch_bin, "write_skeleton"),
)


def kill_at(number: int) -> None:
    """From now on: this process dies by SIGKILL at the `number`-th edge, before a call or after it."""
    passed = 0

    def edge() -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            edge()
            result = call(*args, **named)
            edge()
            return result

        return wrapped

    for module, name in _CALLS:
        setattr(module, name, deadly(getattr(module, name)))


def convert(checkpoint: str, output: Path, taken: Path | None, options: dict[str, Any]) -> None:
    """One run; with `taken` each finished file is moved there."""
    if options.get("merge"):
        chosen = {name: value for name, value in options.items() if name != "merge"}
        with lazyzero.open_checkpoint(checkpoint) as opened:
            export(opened, output, replace(make_options(**chosen), merge=True))
        return
    hook = None if taken is None else lambda file: os.replace(file.path, taken / file.path.name)
    lazyzero.convert(checkpoint, output, on_shard=hook, **options)


def in_child(run: Callable[[], None]) -> bool:
    """Runs in a forked process; False when it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a run failed"
    return not os.WIFSIGNALED(status)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def hold(found: dict[str, bytes], *whole: dict[str, bytes]) -> None:
    """At any moment: a final name has a whole file, an index means that all is there, the rest is recognisable."""
    names = {name for name in found if outdir.is_ours(name) and name != journal.NAME}
    for name in names:
        assert any(found[name] == export.get(name) for export in whole), f"{name} is not whole"
    strangers = [name for name in found if name not in names and name != journal.NAME]
    assert all(name.endswith(TEMPORARY) and outdir.is_ours(name.removesuffix(TEMPORARY)) for name in strangers), (
        strangers
    )
    for index in (name for name in names if name.endswith(".index.json")):
        assert any(found[index] == export.get(index) and set(export) <= {*found, journal.NAME} for export in whole), (
            "looks finished"
        )
    if journal.NAME in found:
        json.loads(found[journal.NAME])


def main(checkpoint: str, directory: Path, mode: str, step: int, options: dict[str, Any]) -> int:
    """The number of times that the conversion was killed."""
    if options.get("format") == "bin":
        torch_bin.require_torch()
    os.fsync = lambda fd: None  # a killed process loses nothing that it wrote; waiting for the disk shows nothing
    reference, other = directory / "reference", directory / "other"
    in_child(lambda: convert(checkpoint, reference, None, options))
    in_child(lambda: convert(checkpoint, other, None, {**options, "dtype": "fp16"}))
    whole, before = contents(reference), contents(other)
    output, taken = directory / "output", directory / "taken"
    moved = taken if mode == "taken" else None
    over = mode in ("overwrite", "merge")
    again = {**options, mode: True} if over else options
    for number in count(1, step):
        shutil.rmtree(output, ignore_errors=True)
        shutil.rmtree(taken, ignore_errors=True)
        taken.mkdir()
        if over:
            shutil.copytree(other, output)

        def killed(number: int = number) -> None:
            kill_at(number)
            convert(checkpoint, output, moved, again)

        done = in_child(killed)
        found = contents(output) if output.exists() else {}
        hold(found | contents(taken), whole, before if over else {})
        in_child(lambda: convert(checkpoint, output, moved, again))
        after = contents(output) | contents(taken)
        expected = before | whole if mode == "merge" else whole
        assert {**after, journal.NAME: b""} == {**expected, journal.NAME: b""}, (
            f"another result after a kill at {number}"
        )
        if mode in ("plain", "overwrite"):
            assert after == whole, f"another journal after a kill at {number}"
        if done:
            return number // step
    raise AssertionError("unreachable")


if __name__ == "__main__":
    warnings.simplefilter("error")
    kills = main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5]))
    sys.stdout.write(f"{kills}\n")
