"""The system fails at any call: the right error naming the file and a clean directory, or the right bytes all the same."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lazyzero
from lazyzero.container import source
from lazyzero.errors import LazyZeroError, NotEnoughSpace, ReadError, SourceChanged, WriteError
from lazyzero.export import kernel, outdir, run, sink, torch_bin
from lazyzero.export.options import make_options
from tests.files import contents
from tests.generator.simple import usual

pytestmark = pytest.mark.usefixtures("without_fsync")
KINDS: list[dict[str, Any]] = [
    {"workers": 1, "checksum": "sha256"},
    {"workers": 2},
    {"workers": 2, "format": "bin", "checksum": "sha256"},
]
FULL = (errno.ENOSPC, errno.EDQUOT)
# `make soak` has every call fail, one after the other; without it some of them do, evenly taken.
EVERY_CALL = bool(os.environ.get("SOAK"))

Fault = Callable[[Callable[..., Any], tuple[Any, ...]], Any]


class Faulty:
    """The module `os`, one function of which misbehaves from its `first`-th call on, `times` times; `hit` counts them."""

    def __init__(self, name: str, fault: Fault, first: int = 1, times: int = 10**9) -> None:
        self._name = name
        self._fault = fault
        self._first = first
        self._times = times
        self._calls = 0
        self.hit = 0

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._name else getattr(os, name)

    def _call(self, *args: Any, **named: Any) -> Any:
        self._calls += 1
        if self._first <= self._calls < self._first + self._times:
            self.hit += 1
            return self._fault(getattr(os, self._name), (*args, *named.values()))
        return getattr(os, self._name)(*args, **named)


def fails(code: int) -> Fault:
    """The call fails (EINTR as InterruptedError: what Python's retries let through when told to)."""

    def fault(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        raise OSError(code, os.strerror(code))

    fault.__name__ = errno.errorcode[code]
    return fault


def fails_afterwards(code: int) -> Fault:
    """The call does its work, and fails: close() on a network file system, or a rename whose answer was lost."""

    def fault(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        call(*args)
        raise OSError(code, os.strerror(code))

    fault.__name__ = f"done-{errno.errorcode[code]}"
    return fault


def short(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Transfers a part of what it was asked for."""
    fd, data, *rest = args
    if isinstance(data, int):  # pread
        return call(fd, max(1, data // 3), *rest)
    if isinstance(data, list):  # preadv
        return call(fd, [data[0][: max(1, len(data[0]) // 3)]], *rest)
    return call(fd, data[: max(1, len(data) // 3)], *rest)


def nothing(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Transfers nothing, as at the end of a file."""
    return b"" if isinstance(args[1], int) else 0


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A test that waits for ever is a failure, not a wait."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(3600 if EVERY_CALL else 60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, `ckpt`, and for each kind what an undisturbed run gives, `0`, `1`, ..."""
    place = tmp_path_factory.mktemp("faults")
    usual(place / "ckpt")
    for number, kind in enumerate(KINDS):
        lazyzero.convert(place / "ckpt", place / str(number), max_shard_size=700, **kind)
    return place


def attempt(place: Path, kind: int, output: Path) -> LazyZeroError | None:
    """A conversion. Nothing but whole files must be left by a failure, and all of them by a success."""
    failure = None
    try:
        lazyzero.convert(place / "ckpt", output, max_shard_size=700, **KINDS[kind])
    except LazyZeroError as error:
        failure = error
    found = contents(output) if output.exists() else {}
    whole = contents(place / str(kind))
    assert found.items() <= whole.items()
    if failure is None:
        assert found == whole
    else:
        assert set(found) != set(whole), "failed, and looks finished"
        assert not list(output.parent.rglob("*.tmp"))
    return failure


def every(
    place: Path,
    kind: int,
    tmp_path: Path,
    module: ModuleType,
    name: str,
    fault: Fault,
    most: int = 8,
    times: int = 10**9,
) -> list[LazyZeroError | None]:
    """What comes of it when the first call fails, the second, and so on: all of them, or some `most` evenly taken."""
    results: list[LazyZeroError | None] = []
    tmp_path.mkdir(exist_ok=True)  # to make it counts as well
    with pytest.MonkeyPatch.context() as patch:
        counting = Faulty(name, lambda call, args: call(*args))
        patch.setattr(module, "os", counting)
        attempt(place, kind, tmp_path / "counted")
        total = counting.hit
    for first in range(1, total + 1, 1 if EVERY_CALL else max(1, total // most)):
        with pytest.MonkeyPatch.context() as patch:
            faulty = Faulty(name, fault, first, times)
            patch.setattr(module, "os", faulty)
            results.append(attempt(place, kind, tmp_path / f"{first}"))
            assert faulty.hit or not results[-1]
        assert attempt(place, kind, tmp_path / f"{first}") is None, "the next run does not bring it to its end"
    assert results
    return results


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (0, errno.ENOSPC),
        (1, errno.ENOSPC),
        (2, errno.ENOSPC),
        (0, errno.EDQUOT),
        (1, errno.EIO),
        (2, errno.EIO),
        (1, errno.EINTR),
    ],
)
@pytest.mark.parametrize("name", ["open", "pwrite", "fsync", "close", "replace", "fstat"])
def test_writing(name: str, code: int, kind: int, place: Path, tmp_path: Path) -> None:
    """Each call of the sink failing, one after the other: NotEnoughSpace for a full disk or quota, else WriteError."""
    for error in every(place, kind, tmp_path, sink, name, fails(code), most=3):
        if error is None:
            assert name in ("open", "close")  # of a directory that cannot be opened to be flushed: not reached below
            continue
        assert type(error) is (NotEnoughSpace if code in FULL else WriteError)
        assert f"{tmp_path}/" in str(error)
        assert os.strerror(code) in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["close", "fsync", "replace"])
def test_failing_after_the_work_is_done(name: str, place: Path, tmp_path: Path) -> None:
    """A call that did its work and reports an error is an error, and a file that was renamed after all does no harm."""
    for error in every(place, 0, tmp_path, sink, name, fails_afterwards(errno.EIO)):
        assert type(error) is WriteError


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize(("module", "name"), [(sink, "pwrite"), (sink, "pread"), (source, "preadv")])
def test_short_transfers(module: ModuleType, name: str, kind: int, place: Path, tmp_path: Path) -> None:
    """Calls that transfer less than they were asked for are given the rest: the bytes are the same."""
    if name == "pread" and kind != 2:
        pytest.skip("nothing is read back in this format")
    assert not any(every(place, kind, tmp_path, module, name, short, most=3))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_transfers_of_nothing(kind: int, place: Path, tmp_path: Path) -> None:
    """A write that never gets on, or an end of file where there is none, is an error, never an endless loop."""
    assert {type(error) for error in every(place, kind, tmp_path, sink, "pwrite", nothing)} == {WriteError}
    assert {type(error) for error in every(place, kind, tmp_path / "r", source, "preadv", nothing)} == {SourceChanged}
    if kind == 2:
        assert {type(error) for error in every(place, kind, tmp_path / "b", sink, "pread", nothing)} == {WriteError}


@pytest.mark.parametrize(
    ("kind", "code"), [(0, errno.EIO), (1, errno.EIO), (2, errno.EIO), (1, errno.EINTR), (0, errno.ESTALE)]
)
@pytest.mark.parametrize(("name", "expected"), [("preadv", ReadError), ("open", ReadError), ("stat", SourceChanged)])
def test_reading(
    name: str, expected: type[LazyZeroError], code: int, kind: int, place: Path, tmp_path: Path
) -> None:  # fmt: skip
    """Each call of the reader failing, one after the other: an error that names the source."""
    source.POOL.close()
    for error in every(place, kind, tmp_path, source, name, fails(code), most=4):
        if error is None and name == "open":
            continue  # the pool had the file open already
        assert type(error) in (expected, ReadError)
        # In a .bin file the places for the data are read back from what torch wrote.
        assert str(place / "ckpt") in str(error) or (kind == 2 and ".bin" in str(error))
        assert os.strerror(code) in str(error)
        source.POOL.close()


def test_one_fault_that_passes(place: Path, tmp_path: Path) -> None:
    """An error is an error even if the next try would have done: nothing is tried again behind the user's back."""
    for name in ("pwrite", "fsync"):
        assert all(every(place, 1, tmp_path / name, sink, name, fails(errno.EIO), times=1, most=4))
    assert all(every(place, 1, tmp_path / "r", source, "preadv", fails(errno.EIO), times=1, most=4))


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE, None])
def test_a_file_system_that_can_do_little(
    code: int | None, kind: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fallocate, sync_file_range, fadvise, locks, or flushing of directories the result is the same."""

    def unable(*args: Any) -> int:
        kernel.ctypes.set_errno(code or 0)
        return -1

    calls = count()
    monkeypatch.setattr(kernel, "_function", lambda *signature: unable if next(calls) >= 0 and code else None)
    refuse = fails(code or errno.ENOSYS)
    advice = Faulty("posix_fadvise", refuse)
    monkeypatch.setattr(sink, "os", advice)
    monkeypatch.setattr(sink, "_LAG", 0)
    monkeypatch.setattr(source, "os", Faulty("posix_fadvise", refuse))
    monkeypatch.setattr(outdir.fcntl, "flock", lambda fd, how: refuse(os.close, (fd,)))
    monkeypatch.setattr(os, "fsync", lambda fd: refuse(os.close, ()) if os.path.isdir(f"/proc/self/fd/{fd}") else None)
    assert attempt(place, kind, tmp_path / "out") is None
    assert next(calls) > 0
    assert advice.hit or not code


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("name", ["allocate", "start_writeback", "wait_writeback"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_the_kernels_own_calls(
    code: int, name: str, kind: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocation that finds the disk full, write-back that finds it broken; interrupted they are tried again."""
    monkeypatch.setattr(sink, "_LAG", 0)
    real = getattr(kernel, name)
    calls = count()
    with monkeypatch.context() as patch:
        patch.setattr(kernel, name, lambda *args: next(calls) < 0 or real(*args))
        assert attempt(place, kind, tmp_path / "counted") is None
    total = next(calls)
    for first in range(1, total + 1) if EVERY_CALL else (1, 2, 4, 9):
        calls = count(1)

        def failing(*args: int, first: int = first, calls: Iterator[int] = calls) -> bool:
            if next(calls) >= first:
                raise OSError(code, os.strerror(code))
            return bool(real(*args))

        with monkeypatch.context() as patch:
            patch.setattr(kernel, name, failing)
            error = attempt(place, kind, tmp_path / str(first))
        if first == 1 or next(calls) > first:
            assert type(error) is (NotEnoughSpace if code in FULL else WriteError)
            assert f"{tmp_path}/" in str(error)
    answers = iter([(-1, errno.EINTR), (-1, errno.EINTR), (0, 0)])

    def interrupted(*args: Any) -> int:
        result, number = next(answers)
        kernel.ctypes.set_errno(number)
        return result

    monkeypatch.setattr(kernel, "_function", lambda *signature: interrupted)
    assert kernel.start_writeback(0, 0, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_the_frame_of_a_bin_file(code: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, which writes it, goes on after a failed write and ends with an error of its own: ours tells the cause."""
    for first in (1, 2, 3, 5, 9, 20, 40):
        calls = count(1)
        real = torch_bin._Remembering.write

        def write(self: Any, data: Any, first: int = first, calls: Iterator[int] = calls, real: Any = real) -> int:
            if next(calls) >= first and self.error is None:
                self.error = OSError(code, os.strerror(code))
                raise self.error
            return int(real(self, data))

        with monkeypatch.context() as patch:
            patch.setattr(torch_bin._Remembering, "write", write)
            error = attempt(place, 2, tmp_path / str(first))
        assert type(error) is (NotEnoughSpace if code in FULL else WriteError)
        assert os.strerror(code) in str(error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EPIPE])
def test_standard_output(code: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that went away, or a full disk behind a redirection; short writes are completed."""
    with lazyzero.open_checkpoint(place / "ckpt") as checkpoint, (tmp_path / "stream").open("wb") as file:
        for first in (1, 2, 3):
            with monkeypatch.context() as patch:
                patch.setattr(sink, "os", Faulty("write", fails(code), first))
                with pytest.raises(WriteError, match="standard output: could not be written") as raised:
                    run.to_pipe(checkpoint, file.fileno(), make_options())
            assert type(raised.value) is (NotEnoughSpace if code in FULL else WriteError)
        os.truncate(file.fileno(), 0)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        with monkeypatch.context() as patch:
            patch.setattr(sink, "os", Faulty("write", short))
            assert run.to_pipe(checkpoint, file.fileno(), make_options()) == (tmp_path / "stream").stat().st_size
        with monkeypatch.context() as patch:
            patch.setattr(sink, "os", Faulty("write", nothing))
            with pytest.raises(WriteError, match="nothing more was accepted"):
                run.to_pipe(checkpoint, file.fileno(), make_options())
    lazyzero.convert(place / "ckpt", tmp_path / "out", max_shard_size=None)
    assert (tmp_path / "stream").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_is_flushed_before_what(kind: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is on disk before it gets its name, the directory after it; the journal knows of it first; the index is last."""
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def flushing(fd: int) -> None:
        events.append(("flush", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renaming(old: Path, new: Path) -> None:
        events.append(("rename", str(new)))
        assert events[-2:] and ("flush", str(old)) in events, "renamed before it was on disk"
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(os, "replace", renaming)
    output = tmp_path / "out"
    assert attempt(place, kind, output) is None
    assert events[0] == ("flush", str(tmp_path)), "the directory itself"
    names = [Path(name).name for what, name in events if what == "rename"]
    assert names[0::2] == [".lazyzero.json"] * (len(names) // 2)
    assert sorted(names[1::2]) == sorted(contents(output))
    assert names[-1].endswith(".index.json")
    for at, (what, _) in enumerate(events):
        if what == "rename":
            assert events[at + 1] == ("flush", str(output))


def test_cleaning_up_fails_too(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where temporary files cannot be removed either, the first error is the one that is told."""
    refuse = fails(errno.EPERM)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: path.exists() and refuse(os.close, ()))
        patch.setattr(sink, "os", Faulty("pwrite", fails(errno.ENOSPC)))
        with pytest.raises(NotEnoughSpace):
            lazyzero.convert(place / "ckpt", tmp_path / "out", max_shard_size=700)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model-00001-of-00004.safetensors.lazyzero.tmp"]
    lazyzero.convert(place / "ckpt", tmp_path / "out", max_shard_size=700)


def test_a_foreign_file_under_a_temporary_name(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks do not work another run may put its unfinished file under the same name: it is not published."""
    real = run.write_shard

    def replaced(*args: Any) -> Any:
        sealed = real(*args)
        temporary = sink.temporary(sealed.draft.path)
        temporary.unlink()
        temporary.write_bytes(b"half")
        return sealed

    monkeypatch.setattr(run, "write_shard", replaced)
    with pytest.raises(WriteError, match="another process replaced the unfinished file"):
        lazyzero.convert(place / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fewer_threads_than_asked_for(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more threads, those there are do the work."""
    import threading

    real = threading.Thread.start
    for given in (0, 1):
        calls = count()

        def start(thread: threading.Thread, given: int = given, calls: Iterator[int] = calls) -> None:
            if next(calls) >= given:
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        assert attempt(place, 1, tmp_path / str(given)) is None
        assert next(calls) > 1
