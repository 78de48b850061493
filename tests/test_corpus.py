"""Real checkpoints of DeepSpeed 0.3.16 to 0.19.8, each with the values its engine had, converted every way."""

from __future__ import annotations

from pathlib import Path

import pytest

import lazyzero
from tests import oracle

pytestmark = pytest.mark.usefixtures("without_fsync")

CONVERTIBLE = [name for name in oracle.cases() if oracle.case(name).get("convertible", True) is True]
PERHAPS = [name for name in oracle.cases() if oracle.case(name).get("convertible", True) == "or refused"]
DAMAGED = [name for name in oracle.cases() if oracle.case(name).get("convertible", True) is False]


def _faults(name: str, tmp_path: Path, dtype: str, form: str) -> list[str]:
    format, shard = oracle.FORMS[form]
    output = tmp_path / "out"
    lazyzero.convert(oracle.DATA / name / "checkpoint", output, dtype=dtype, format=format, max_shard_size=shard)
    facts = oracle.case(name)
    found = []
    for which in facts["truths"]:
        want, tied = oracle.truth(name, which)
        optional = frozenset(facts["optional_names"])
        found.append(oracle.faults(want, tied, output, format=format, dtype=oracle.DTYPES[dtype], optional=optional))
    return min(found, key=len)


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_a_real_checkpoint_gives_the_bits_its_engine_had(name: str, dtype: str, form: str, tmp_path: Path) -> None:
    """Names, shapes, dtypes, bits, ties, files and index are those of the truth recorded from the live engine."""
    assert _faults(name, tmp_path, dtype, form) == []


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("name", PERHAPS)
def test_a_checkpoint_too_old_to_say_its_order_is_right_or_refused(name: str, form: str, tmp_path: Path) -> None:
    """Where the order of parameters may be lost, the output is right or there is none; never wrong values."""
    try:
        assert _faults(name, tmp_path, "fp32", form) == []
    except lazyzero.LazyZeroError:
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", oracle.FORMS)
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_leaves_nothing_behind(name: str, form: str, tmp_path: Path) -> None:
    """A file that two ranks wrote at once is refused, named, and no output directory appears."""
    with pytest.raises(lazyzero.LazyZeroError, match=r"\.pt"):
        _faults(name, tmp_path, "fp32", form)
    assert not (tmp_path / "out").exists()


def test_the_cases_cover_every_stage_and_the_old_versions() -> None:
    """The data of this suite has stages 0 to 3, worlds 1 to 4, and ten of DeepSpeed's releases."""
    facts = [oracle.case(name) for name in oracle.cases()]
    assert {fact["stage"] for fact in facts} >= {0, 1, 2, 3}
    assert {fact["world_size"] for fact in facts} >= {1, 2, 3, 4}
    assert len({fact["deepspeed"] for fact in facts}) >= 9
    assert {fact["precision"] for fact in facts} >= {"bf16", "fp16", "fp32"}
