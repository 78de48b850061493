"""What a user may ask for, and how much memory the window gets of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyzero import memory
from lazyzero.dtypes import BFLOAT16, FLOAT16, FLOAT32, requested
from lazyzero.errors import InvalidRequest
from lazyzero.export.budget import DEFAULT, LEAST_WINDOW, MOST_WINDOW, allot
from lazyzero.export.options import make_options

SLACK = 5 << 20  # bytes the process may grow beside the windows


def test_the_defaults_are_those_of_the_command_line() -> None:
    """fp32 safetensors in shards of 5GB, ties cloned, checked, nothing replaced."""
    options = make_options()
    assert (options.dtype, options.format, options.max_shard_size) == (FLOAT32, "safetensors", 5_000_000_000)
    assert (options.tied, options.self_check, options.overwrite, options.force) == ("clone", True, False, False)
    assert (options.max_memory, options.workers, options.checksum) == (None, None, False)


def test_dtypes_have_the_names_people_use() -> None:
    """Short, long, with torch's prefix, in any case; keep is none of them."""
    for names, dtype in (
        (["fp32", "float32", "torch.float32", "FP32"], FLOAT32),
        (["fp16", "float16", "half", "torch.float16"], FLOAT16),
        (["bf16", "bfloat16", "torch.bfloat16", "BF16"], BFLOAT16),
        (["keep"], None),
    ):
        assert [requested(name) for name in names] == [dtype] * len(names)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of fp32, fp16, bf16, keep"),
        ({"format": "onnx"}, "format 'onnx' is not one of safetensors, bin"),
        ({"tied": "share"}, "tied 'share' is not one of clone, drop"),
        ({"format": "bin", "tied": "drop"}, "keeps tied tensors as one storage anyway"),
        ({"max_shard_size": "0GB"}, "must be above 0"),
        ({"max_shard_size": -5}, "must be above 0"),
        ({"max_memory": "lots"}, "'lots' is not a number with a unit"),
        ({"workers": 0}, "workers 0 is not 'auto' or a number from 1 to 256"),
        ({"workers": "257"}, "workers '257'"),
        ({"workers": "two"}, "workers 'two'"),
        ({"io": "uring"}, "io 'uring' is not one of auto, "),
        ({"checksum": "md5"}, "checksum 'md5' is not sha256"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(asked: dict[str, object], told: str) -> None:
    """The value that was given and what would do."""
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        make_options(**asked)  # type: ignore[arg-type]


def test_none_means_one_file_and_auto_means_choose() -> None:
    """As a word or as None."""
    assert make_options(max_shard_size="none").max_shard_size is None
    assert make_options(max_shard_size=" NONE ").max_shard_size is None
    assert make_options(max_shard_size=None).max_shard_size is None
    assert make_options(workers="auto").workers is None
    assert make_options(workers="3").workers == 3
    assert make_options(checksum="sha256").checksum is True


@given(
    asked=st.one_of(st.none(), st.integers(1 << 20, 1 << 34)),
    workers=st.one_of(st.none(), st.integers(1, 64)),
    held=st.integers(1 << 20, 1 << 31),
    torch=st.booleans(),
)
def test_windows_stay_within_what_was_asked_for(asked: int | None, workers: int | None, held: int, torch: bool) -> None:
    """All buffers of all workers fit beside what the process holds, or the request ends with the least that would do."""
    try:
        budget = allot(asked, workers, torch=torch, resident=held)
    except InvalidRequest as error:
        assert asked is not None
        least = int(re.search(r"the least that would do here is ([0-9]+)MB", str(error))[1]) * 1_000_000  # type: ignore[index]
        assert least > asked
        assert allot(least, workers, torch=torch, resident=held).window >= LEAST_WINDOW
        return
    assert LEAST_WINDOW <= budget.window <= MOST_WINDOW
    assert budget.window % 4096 == 0
    assert budget.workers == workers or (workers is None and budget.workers in (1, 2))
    taken = held + 2 * budget.window * budget.workers + SLACK
    if asked is not None:
        assert taken <= asked
    elif budget.window > LEAST_WINDOW:
        assert taken <= DEFAULT + (held if torch else 0)


def test_memory_is_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """VmHWM and VmRSS in bytes; without /proc, what psutil knows."""
    found = memory.status()
    assert found["VmHWM"] >= found["VmRSS"] > 1 << 20
    assert memory.peak_rss() >= found["VmRSS"]
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    assert memory.status() == {}
    assert memory.peak_rss() > 1 << 20
