"""Sources that change, shrink or vanish while they are read: an error, and nothing published that was read from them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazyzero
from lazyzero.container import mapped
from lazyzero.container.reader import READERS
from lazyzero.container.source import Source
from lazyzero.errors import LazyZeroError, OutputRefused, ReadError, SourceChanged
from lazyzero.export import run, stream
from lazyzero.export.options import make_options
from tests.files import contents
from tests.generator.simple import usual

pytestmark = pytest.mark.usefixtures("without_fsync")


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _emptied(path: Path) -> None:
    os.truncate(path, 0)


def _appended_to(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _rewritten(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))


def _replaced(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes()[::-1])
    new.replace(path)


def _replaced_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replaced_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES = (
    _truncated, _emptied, _appended_to, _rewritten, _replaced, Path.unlink, _replaced_by_a_directory, _replaced_by_a_fifo
)  # fmt: skip


def at_window(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object], *, after: bool = False) -> None:
    """Has something happen just before the `number`-th window of the run is read, or just after."""
    fill, calls = stream.Buffers.fill, count(1)

    def counting(self: Any, *args: Any, **named: Any) -> memoryview:
        here = next(calls) == number
        if here and not after:
            act()
        data = fill(self, *args, **named)
        if here and after:
            act()
        return data

    monkeypatch.setattr(stream.Buffers, "fill", counting)


@pytest.mark.parametrize("io", READERS)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_during_a_conversion(
    change: Callable[[Path], None], workers: int, io: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard that was being written does not appear, those before it stay whole; nothing else is left behind."""
    truth = usual(tmp_path / "ckpt")
    options: dict[str, Any] = {"max_shard_size": 700, "workers": workers, "io": io}
    lazyzero.convert(truth.root, tmp_path / "undisturbed", **options)
    victim = min(truth.tag.glob("*optim*"))
    at_window(monkeypatch, 2, lambda: change(victim))
    with pytest.raises((SourceChanged, ReadError), match=victim.name):
        lazyzero.convert(truth.root, tmp_path / "out", **options)
    found, whole = contents(tmp_path / "out"), contents(tmp_path / "undisturbed")
    assert list(found) == ["model-00001-of-00004.safetensors"]
    assert found.items() <= whole.items()


@pytest.mark.parametrize("change", [_truncated, _rewritten, Path.unlink])
def test_a_file_that_is_not_read_any_more(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change is noticed even where everything of that file had been read: the sources are looked at before each file
    appears, for a `.bin` too."""
    truth = usual(tmp_path / "ckpt")
    victim = truth.tag / "mp_rank_00_model_states.pt"
    shutil.copy2(victim, tmp_path / "kept")
    for format, windows in (("safetensors", 1), ("bin", 6)):
        with monkeypatch.context() as patch:
            at_window(patch, windows, lambda: change(victim), after=True)
            with pytest.raises(SourceChanged, match="mp_rank_00"):
                lazyzero.convert(truth.root, tmp_path / "out", format=format)
            assert not (tmp_path / "out").exists()
            shutil.copy2(tmp_path / "kept", victim)


def test_a_stream_that_nobody_takes_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output cannot be taken back: its last byte is only written when the sources were found unchanged."""
    truth = usual(tmp_path / "ckpt")
    lazyzero.convert(truth.root, tmp_path / "out", max_shard_size=None)
    whole = (tmp_path / "out" / "model.safetensors").read_bytes()
    for change in (None, _rewritten):
        if change is not None:
            at_window(monkeypatch, 1, lambda: _rewritten(truth.tag / "mp_rank_00_model_states.pt"), after=True)
        with (
            lazyzero.open_checkpoint(truth.root) as checkpoint,
            (tmp_path / "stream").open("wb") as file,
        ):
            if change is None:
                assert run.to_pipe(checkpoint, file.fileno(), make_options()) == len(whole)
                assert (tmp_path / "stream").read_bytes() == whole
                continue
            with pytest.raises(SourceChanged):
                run.to_pipe(checkpoint, file.fileno(), make_options(self_check=False))
    data = (tmp_path / "stream").read_bytes()
    size = int.from_bytes(data[:8], "little")
    ends = [
        entry["data_offsets"][1] for name, entry in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"
    ]
    assert len(data) == 8 + size + max(ends) - 1


def test_between_the_files_of_a_stream(tmp_path: Path) -> None:
    """A consumer may take its time: what changes meanwhile is noticed with the next file, and going on is refused."""
    truth = usual(tmp_path / "ckpt")
    files = lazyzero.stream(truth.root, tmp_path / "out", max_shard_size=700)
    first = next(files)
    _appended_to(min(truth.tag.glob("*optim*")))
    with pytest.raises(SourceChanged):
        next(files)
    assert first.path.exists()
    with pytest.raises(LazyZeroError) as refused:
        lazyzero.convert(truth.root, tmp_path / "out", max_shard_size=700)
    assert isinstance(refused.value, OutputRefused) or "optim_states" in str(refused.value)


def test_after_the_change_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files back as they were, times too, the same command goes on and gives the whole."""
    truth = usual(tmp_path / "ckpt")
    shutil.copytree(truth.root, tmp_path / "copy", copy_function=shutil.copy2)
    lazyzero.convert(truth.root, tmp_path / "undisturbed", max_shard_size=700)
    with monkeypatch.context() as patch:
        at_window(patch, 3, lambda: _truncated(min(truth.tag.glob("*optim*"))))
        with pytest.raises(SourceChanged):
            lazyzero.convert(truth.root, tmp_path / "out", max_shard_size=700)
    shutil.rmtree(truth.root)
    (tmp_path / "copy").rename(truth.root)
    report = lazyzero.convert(truth.root, tmp_path / "out", max_shard_size=700)
    assert report.resumed == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A file of a million bytes."""
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(250_000, dtype=np.uint32).tobytes())
    return Source.open(path)


def filled(source: Source, offset: int, *sizes: int) -> bytes | None:
    """What `copy_out` gives for places of these sizes."""
    places = [bytearray(size) for size in sizes]
    done = mapped.copy_out(source, offset, [memoryview(place) for place in places])
    return b"".join(places) if done else None


def test_copies_out_of_a_mapping(source: Source) -> None:
    """At any offset, into empty places, into more places than one call takes."""
    data = Path(source.path).read_bytes()
    for offset, sizes in ((0, [5]), (4095, [1, 0, 2, 70_000]), (999_999, [1]), (3, [7] * 3000), (0, [1_000_000])):
        assert filled(source, offset, *sizes) == data[offset : offset + sum(sizes)]


@pytest.mark.parametrize("left", [0, 4096, 300_000])
def test_truncated_under_the_mapping(left: int, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between mapping and copying, where a touch would be SIGBUS, it is SourceChanged."""
    call = mapped._kernel_copy()

    def late(*args: Any) -> Any:
        os.truncate(source.path, left)
        return call(*args)

    monkeypatch.setattr(mapped, "_kernel_copy", lambda: late)
    with pytest.raises(SourceChanged, match=r"a\.bin"):
        filled(source, 200_000, 500_000)


def test_truncated_before_the_mapping(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking and mapping."""
    os.truncate(source.path, 10)
    monkeypatch.setattr(Source, "check", lambda self: None)
    monkeypatch.setattr(Source, "_compare", lambda self, now: None)
    with pytest.raises(SourceChanged, match="ends before"):
        filled(source, 200_000, 500_000)


def test_a_page_that_the_disk_does_not_deliver(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's refusal for a file that did not change is ReadError."""
    monkeypatch.setattr(mapped, "_kernel_copy", lambda: lambda *args: -1)
    with pytest.raises(ReadError, match=r"a\.bin: reading at byte 100 failed"):
        filled(source, 100, 500)


def test_without_the_kernels_help(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the call is missing or forbidden, the file is read instead, never touched through a mapping."""
    data = Path(source.path).read_bytes()
    for call in (
        None,
        *(lambda *args, code=code: (mapped.ctypes.set_errno(code), -1)[1] for code in (errno.ENOSYS, errno.EPERM)),
    ):
        monkeypatch.setattr(mapped, "_kernel_copy", lambda call=call: call)
        assert filled(source, 100, 500) is None
        place = bytearray(500)
        READERS["mmap"](source, 100, [memoryview(place)], True)
        assert place == data[100:600]


RACE = """
import os, sys, threading, time
import numpy as np
from lazyzero.container import reader
from lazyzero.container.source import Source
from lazyzero.errors import SourceChanged
Source.check = lambda self: None  # nothing but the copy itself stands between us and SIGBUS
path, size, end, failed = sys.argv[1], 4 << 20, time.monotonic() + 1, 0
source = Source.open(path)
def flap():
    while time.monotonic() < end:
        os.truncate(path, 0)
        os.truncate(path, size)
threading.Thread(target=flap).start()
place = np.empty(size, np.uint8)
while time.monotonic() < end:
    try:
        reader.READERS["mmap"](source, 0, [place.data], False)
    except OSError:
        failed += 1
    except Exception:
        failed += 1
print(failed)
"""


def test_a_file_that_is_truncated_all_the_time(tmp_path: Path) -> None:
    """A second of reading through mappings while the file shrinks and grows: many errors, no SIGBUS."""
    (tmp_path / "a.bin").write_bytes(bytes(4 << 20))
    race = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path / "a.bin")], check=False, capture_output=True, text=True
    )
    assert race.returncode == 0, race.stderr
    assert int(race.stdout) > 10
