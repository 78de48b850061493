"""--check-finite: NaN, infinities and matrices of zeros are told of, with their names, and written all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lazyzero
from lazyzero.cli import main
from lazyzero.dtypes import DTYPES
from lazyzero.export.finite import FiniteWatch
from lazyzero.tensor import LazyTensor
from tests.edit import edit
from tests.generator.spec import Param, Spec, Truth
from tests.generator.stages import write

pytestmark = pytest.mark.usefixtures("without_fsync")


def made(root: Path, **values: float) -> Truth:
    """Parameters a, b, c of 4x3 and d of 5, one element of which has the value given; `zero_x` fills x with zeros."""
    params = (Param("a", (4, 3)), Param("b", (4, 3)), Param("c", (4, 3)), Param("d", (5,)))
    truth = write(Spec(stage=3, world=2, params=params, precision="fp32"), root)

    def change(state: object) -> None:
        flat = state["optimizer_state_dict"]["fp32_flat_groups"][0]  # type: ignore[index]
        names = {name: at for at, name in zip(offsets, order, strict=True)}
        for key, value in values.items():
            name, size = key.removeprefix("zero_"), 3 if key.endswith("d") else 6
            if key.startswith("zero_"):
                flat[names[name] : names[name] + size] = 0
            else:
                flat[names[name] + 1] = value

    first = next(truth.tag.glob("*rank_0_*model*"))
    order = list(torch.load(first, weights_only=True)["param_shapes"][0])
    sizes = [3 if name == "d" else 6 for name in order]
    offsets = [sum(sizes[:number]) for number in range(4)]
    for rank in (0, 1):
        edit(next(truth.tag.glob(f"*rank_{rank}_*optim*")), change)
    return truth


def findings(root: Path, output: Path, **options: object) -> list[str]:
    return list(lazyzero.convert(root, output, check_finite=True, **options).warnings)  # type: ignore[arg-type]


def test_what_no_trained_weight_should_be_is_told(tmp_path: Path) -> None:
    """One line for each kind, names sorted; a vector of zeros is usual and passed over."""
    truth = made(tmp_path / "ckpt", b=float("nan"), a=float("inf"), zero_c=0, zero_d=0)
    assert findings(truth.root, tmp_path / "out") == [
        "NaN or infinity in a, b",
        "nothing but zeros in the trained matrix c",
    ]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_nothing_is_said_of_sound_weights(tmp_path: Path) -> None:
    """Nor without the flag."""
    params = (Param("a", (4, 3)),)
    sound = write(Spec(stage=3, world=2, params=params, seed=3), tmp_path / "sound")
    for rank, value in ((0, 2), (1, -2)):  # a sum of zero proves nothing either way

        def fill(state: object, value: int = value) -> None:
            state["optimizer_state_dict"]["fp32_flat_groups"][0].fill_(value)  # type: ignore[index]

        edit(next(sound.tag.glob(f"*rank_{rank}_*optim*")), fill)
    assert findings(sound.root, tmp_path / "out") == []
    bad = made(tmp_path / "bad", a=float("nan"))
    assert lazyzero.convert(bad.root, tmp_path / "bad-out").warnings == ()


def test_the_command_warns_in_a_file_and_in_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, a warning on standard error."""
    truth = made(tmp_path / "ckpt", d=float("-inf"))
    assert main(["convert", str(truth.root), str(tmp_path / "out"), "--check-finite"]) == 0
    assert "warning: NaN or infinity in d" in capsys.readouterr().err


@given(
    values=st.lists(st.floats(width=16), min_size=1, max_size=20),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    cut=st.integers(0, 20),
)
def test_any_values_in_any_parts(values: list[float], dtype: str, cut: int) -> None:
    """Told in two parts, it knows what numpy knows of the whole."""
    kind = DTYPES[dtype]
    with np.errstate(over="ignore"):
        array = np.array(values).astype(kind.numpy)
    tensor = LazyTensor("w", (len(values), 1), type("Data", (), {"dtype": kind})(), "trainable")
    watch = FiniteWatch()
    for part in (array[:cut], array[cut:]):
        if len(part):
            watch(tensor, part)
    wide = array.astype(np.float64)
    told = watch.findings()
    assert ("NaN or infinity in w" in told) == (not np.isfinite(wide).all())
    assert ("nothing but zeros in the trained matrix w" in told) == (not wide.any())


def test_integers_are_not_looked_at() -> None:
    """A mask of zeros is a mask."""
    watch = FiniteWatch()
    watch(LazyTensor("m", (2, 2), type("Data", (), {"dtype": DTYPES["int64"]})(), "trainable"), np.zeros(4, np.int64))
    assert watch.findings() == []


def test_many_names_are_counted(tmp_path: Path) -> None:
    """Eight names, and how many more."""
    watch = FiniteWatch()
    for number in range(11):
        tensor = LazyTensor(f"w{number:02d}", (1,), type("Data", (), {"dtype": DTYPES["float32"]})(), "buffer")
        watch(tensor, np.array([np.nan], np.float32))
    assert watch.findings() == ["NaN or infinity in w00, w01, w02, w03, w04, w05, w06, w07 and 3 more"]
