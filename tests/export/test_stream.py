"""The bounded window: however it is cut and however many share it, the bytes are the same."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyzero
from lazyzero.container.objects import Storage
from lazyzero.container.reader import Want, read_all
from lazyzero.container.source import Source
from lazyzero.dtypes import BFLOAT16, DTYPES, FLOAT32, DType
from lazyzero.errors import ReadError
from lazyzero.export import run
from lazyzero.export.budget import Budget
from lazyzero.export.stream import Segment, _cast_bytes, pump, windows
from lazyzero.tensor import LazyTensor, Piece
from tests.files import contents
from tests.generator.simple import module_only, usual
from tests.generator.spec import Spec
from tests.generator.stages import write
from tests.strategies import specs

pytestmark = pytest.mark.usefixtures("without_fsync")
WIDEST = 8  # bytes of the widest element in these checkpoints


def converted(root: Path, output: Path, budget: Budget, **options: object) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "allot", lambda *args, **more: budget)
        lazyzero.convert(root, output, **options)  # type: ignore[arg-type]
    return contents(output)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [WIDEST, 24, 100, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("form", [("safetensors", "fp32"), ("safetensors", "bf16"), ("bin", "fp16")])
def test_windows_and_workers_do_not_show(form: tuple[str, str], window: int, workers: int, tmp_path: Path) -> None:
    """From one element at a time by one thread to everything at once by four: the same files."""
    truth = usual(tmp_path / "ckpt", stage=3, world=3)
    options = {"format": form[0], "dtype": form[1], "max_shard_size": 900}
    slow = converted(truth.root, tmp_path / "slow", Budget(1 << 22, 1), **options)
    fast = converted(truth.root, tmp_path / "fast", Budget(window, workers), **options)
    assert fast == slow
    assert len(fast) > 2


@settings(max_examples=40)
@given(
    spec=specs(),
    window=st.integers(WIDEST, 2000),
    workers=st.integers(1, 4),
    dtype=st.sampled_from(["fp32", "bf16", "keep"]),
)
def test_windows_do_not_show_in_any_checkpoint(spec: Spec, window: int, workers: int, dtype: str) -> None:
    """The same for checkpoints of all kinds, tensors of many dtypes in one window among them."""
    with tempfile.TemporaryDirectory() as work:
        truth = write(spec, Path(work) / "ckpt")
        slow = converted(truth.root, Path(work) / "slow", Budget(1 << 22, 1), dtype=dtype)
        fast = converted(truth.root, Path(work) / "fast", Budget(window, workers), dtype=dtype)
        assert fast == slow


def test_strided_tensors_are_cut_anywhere(tmp_path: Path) -> None:
    """A transposed and a stepped tensor, streamed through windows that end within their rows."""
    grid = torch.arange(7 * 11 * 3, dtype=torch.float32).reshape(7, 11, 3)
    tensors = {"t": grid.permute(2, 0, 1), "s": grid[1:6:2, ::3], "f": grid[:, :, 1].t()}
    root = module_only(tmp_path / "ckpt", tensors)
    for window in (8, 12, 40, 100, 1 << 20):
        got = converted(root, tmp_path / str(window), Budget(window, 2), dtype="fp32")
        assert got == converted(root, tmp_path / f"{window}-whole", Budget(1 << 22, 1), dtype="fp32")
    loaded = torch.frombuffer(bytearray(got["model.safetensors"][-tensors["t"].nbytes :]), dtype=torch.float32)
    assert torch.equal(loaded, tensors["t"].reshape(-1))


def test_gaps_between_tiny_tensors_of_mixed_types_find_room(tmp_path: Path) -> None:
    """Hundreds of scalars, double and half in turn, in one window: aligning each takes more than their bytes."""
    kinds = (torch.float64, torch.bfloat16)
    tensors = {f"t{number:03d}": torch.tensor(number / 3, dtype=kinds[number % 2]) for number in range(400)}
    root = module_only(tmp_path / "ckpt", tensors)
    got = converted(root, tmp_path / "out", Budget(1200, 1), dtype="fp32")
    want = torch.stack([tensor.float() for tensor in tensors.values()])
    assert torch.equal(torch.frombuffer(bytearray(got["model.safetensors"][-1600:]), dtype=torch.float32), want)


@pytest.mark.parametrize("shift", range(4))
def test_a_cast_lands_at_any_address(shift: int) -> None:
    """The bytes are the same wherever the window begins."""
    values = np.arange(5, dtype=np.float32) / 3
    target = np.zeros(10 + shift, np.uint8)
    _cast_bytes(values, target[shift:], BFLOAT16)
    assert target[shift:].tobytes() == values.astype(BFLOAT16.numpy).tobytes()
    assert not target[:shift].any()


class Nowhere:
    """Data that is never read."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def pieces(self, start: int, stop: int) -> object:
        raise AssertionError("not to be read")


def segments(counts: list[tuple[int, DType, DType, int]]) -> list[Segment]:
    """Segments of (elements, stored dtype, output dtype, bytes of gap in front)."""
    made, at = [], 0
    for number, (count, stored, output, gap) in enumerate(counts):
        at += gap
        tensor = LazyTensor(str(number), (count,), Nowhere(stored), "trainable")  # type: ignore[arg-type]
        made.append(Segment(tensor, output, at))
        at += count * output.itemsize
    return made


KINDS = st.sampled_from([FLOAT32, BFLOAT16, DTYPES["int64"], DTYPES["bool"]])


@given(
    counts=st.lists(st.tuples(st.integers(0, 40), KINDS, KINDS, st.sampled_from([0, 0, 0, 64])), max_size=12),
    size=st.integers(WIDEST, 200),
)
def test_windows_cover_every_element_once_in_order(counts: list[tuple[int, DType, DType, int]], size: int) -> None:
    """Each element of each segment in exactly one part; no window over its size on either side, none over a gap."""
    wanted = segments(counts)
    covered = [0] * len(wanted)
    for window in windows(wanted, size):
        assert sum(part.source_bytes for part in window) <= size
        assert sum(part.output_bytes for part in window) <= size
        end = None
        for part in window:
            number = int(part.segment.tensor.name)
            assert part.start == covered[number] < part.stop
            covered[number] = part.stop
            begin = part.segment.offset + part.start * part.segment.dtype.itemsize
            assert end in (None, begin)
            end = begin + part.output_bytes
    assert covered == [count for count, *_ in counts]


class Memory:
    """A sink into a byte array."""

    def __init__(self, size: int, *, sequential: bool = False) -> None:
        self.data = bytearray(size)
        self.sequential = sequential
        self.order: list[int] = []

    def write(self, offset: int, data: memoryview) -> None:
        self.order.append(offset)
        self.data[offset : offset + len(data)] = data

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def from_file(path: Path, values: np.ndarray) -> LazyTensor:
    path.write_bytes(values.tobytes())
    storage = Storage(Source.open(path), "0", FLOAT32, values.nbytes)
    storage.place(0)

    class Plain:
        dtype = FLOAT32

        def pieces(self, start: int, stop: int) -> object:
            yield Piece(storage, 4 * start, stop - start)

    return LazyTensor("w", values.shape, Plain(), "trainable")


def test_a_pipe_is_given_its_bytes_in_order(tmp_path: Path) -> None:
    """A sequential sink is written by one worker however many were asked for."""
    values = np.arange(1000, dtype=np.float32)
    sink = Memory(4000, sequential=True)
    told: list[int] = []
    pump([Segment(from_file(tmp_path / "f", values), FLOAT32, 0)], sink, window=64, workers=4, wrote=told.append)
    assert sink.order == sorted(sink.order)
    assert bytes(sink.data) == values.tobytes()
    assert sum(told) == 4000


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_of_any_worker_is_raised_once_all_have_ended(workers: int, tmp_path: Path) -> None:
    """A sink that fails stops every worker; nobody writes after the call has returned."""
    values = np.arange(4000, dtype=np.float32)

    class Failing(Memory):
        def write(self, offset: int, data: memoryview) -> None:
            super().write(offset, data)
            if offset >= 1024:
                raise ReadError(f"failed at {offset}")

    sink = Failing(values.nbytes)
    with pytest.raises(ReadError, match="failed at"):
        pump([Segment(from_file(tmp_path / "f", values), FLOAT32, 0)], sink, window=64, workers=workers)
    assert len(sink.order) <= 16 + 2 * workers


def test_observers_see_what_is_stored(tmp_path: Path) -> None:
    """`observe` is shown the values as read, before any cast, each once."""
    values = np.arange(100, dtype=np.float32) / 3
    seen: list[np.ndarray] = []
    tensor = from_file(tmp_path / "f", values)
    pump([Segment(tensor, BFLOAT16, 0)], Memory(200), window=64, observe=lambda name, part: seen.append(part.copy()))
    assert np.array_equal(np.concatenate(seen), values)


@pytest.mark.parametrize("quick", [0.0, 1.0])
def test_workers_take_turns_at_quick_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: float) -> None:
    """A worker whose last reads were quick reads while no other such worker does, one that had to wait does not mind; the
    bytes are the same."""
    monkeypatch.setattr("lazyzero.export.stream._QUICK", quick)
    values = np.arange(4000, dtype=np.float32)
    known, reading, met = set[int](), set[int](), list[int]()

    def watched(wants: Iterable[Want], *, io: str, release: bool) -> int:
        me = threading.get_ident()
        if me in known:
            reading.add(me)
            time.sleep(0.001)
            met.append(len(reading))
        reads = read_all(wants, io=io, release=release)
        reading.discard(me)
        known.add(me)
        return reads

    monkeypatch.setattr("lazyzero.export.stream.read_all", watched)
    sink = Memory(values.nbytes)
    pump([Segment(from_file(tmp_path / "f", values), FLOAT32, 0)], sink, window=64, workers=3)
    assert set(met) == {1} if quick else max(met) > 1
    assert bytes(sink.data) == values.tobytes()
