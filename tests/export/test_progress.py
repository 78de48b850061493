"""What a run shows: a bar on a terminal, lines in a log, nothing when asked to be quiet; a trace of its memory."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

import lazyzero
from lazyzero.cli import main
from lazyzero.errors import WriteError
from lazyzero.export import progress
from lazyzero.export.progress import Bar, Lines, Silent, for_stream
from lazyzero.export.trace import MemoryTrace
from tests.generator.simple import usual

pytestmark = pytest.mark.usefixtures("without_fsync")


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_the_stream_decides() -> None:
    """A bar for a terminal, lines for a file, silence for --quiet; standard error unless another is given."""
    assert isinstance(for_stream(Terminal()), Bar)
    assert isinstance(for_stream(io.StringIO()), Lines)
    assert isinstance(for_stream(Terminal(), quiet=True), Silent)
    assert isinstance(for_stream(), Lines | Bar)


def test_silence_takes_every_call() -> None:
    """And shows nothing."""
    silent = Silent()
    silent.start(10)
    silent.advance(5)
    silent.note("x")
    silent.close()


def test_lines_come_every_few_seconds(clock: Clock) -> None:
    """Share, bytes, rate and time left, no more often than every five seconds, whole lines, flushed."""
    log = io.StringIO()
    lines = Lines(log)
    lines.note("warning: x")
    lines.start(1_000_000_000)
    for _ in range(10):
        clock.now += 1
        lines.advance(50_000_000)
    lines.close()
    assert log.getvalue().splitlines() == [
        "warning: x",
        "25%  250 MB of 1.0 GB  50.0 MB/s  15.0 s left",
        "50%  500 MB of 1.0 GB  50.0 MB/s  10.0 s left",
    ]


def test_nothing_done_has_no_time_left(clock: Clock) -> None:
    """A rate of zero, a total of zero: no division."""
    log = io.StringIO()
    lines = Lines(log)
    lines.start(0)
    clock.now += 6
    lines.advance(0)
    assert log.getvalue() == "0%  0 B of 0 B  0 B/s  ? left\n"


def test_a_bar_goes_away_and_its_notes_stay() -> None:
    """Bytes with a rate while it goes; afterwards only the notes are left on the last line."""
    screen = Terminal()
    bar = Bar(screen)
    bar.note("before")
    bar.start(1000)
    bar.advance(500)
    bar.note("meanwhile")
    bar.close()
    shown = screen.getvalue()
    assert shown.startswith("before\n")
    assert "meanwhile\n" in shown
    assert "500/1.00k" in shown
    assert shown.endswith("\r")
    Bar(screen).close()


class Counting(Silent):
    """Adds up what it is told."""

    def __init__(self) -> None:
        self.total = self.done = self.closed = 0

    def start(self, total: int) -> None:
        self.total = total

    def advance(self, count: int) -> None:
        self.done += count

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("format", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_bytes_are_told(format: str, dtype: str, tmp_path: Path) -> None:
    """The sum of what is told is the total that was announced: the tensors' bytes in the output."""
    truth = usual(tmp_path / "ckpt", stage=3, world=3)
    shown = Counting()
    lazyzero.convert(truth.root, tmp_path / "out", format=format, dtype=dtype, max_shard_size=700, progress=shown)
    assert shown.done == shown.total > 0
    assert shown.closed == 1


def test_a_trace_of_memory_is_a_table(tmp_path: Path) -> None:
    """--memory-trace writes seconds and bytes, rising in time, at least one row, whatever happens inside."""
    truth = usual(tmp_path / "ckpt")
    words = [
        "convert",
        str(truth.root),
        str(tmp_path / "out"),
        "--quiet",
        "--memory-trace",
        str(tmp_path / "trace.csv"),
    ]
    assert main(words) == 0
    with (tmp_path / "trace.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["seconds", "rss", "anon", "file", "peak"]
    assert int(rows[0]["peak"]) >= int(rows[0]["rss"]) > 1 << 20
    assert sorted(rows, key=lambda row: float(row["seconds"])) == rows
    with pytest.raises(ZeroDivisionError), MemoryTrace(tmp_path / "other.csv"):
        raise ZeroDivisionError
    assert len((tmp_path / "other.csv").read_text().splitlines()) >= 2


def test_a_trace_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    """It names the file."""
    with (
        pytest.raises(WriteError, match=r"nothing/trace\.csv: could not be opened"),
        MemoryTrace(tmp_path / "nothing" / "trace.csv"),
    ):
        pass
