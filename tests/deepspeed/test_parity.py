"""Where DeepSpeed's converter gives a result, `lazyzero.compat` gives the same one.

LAZYZERO_CORPUS may name a further folder of cases. A case where DeepSpeed's converter fails is skipped; one where it
leaves out weights that the live model had must be equal in all the rest.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lazyzero import compat
from tests.oracle import DATA, same_bits
from tests.test_compat import shim

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("without_fsync")]

CORPORA = [Path(folder) for folder in (os.environ.get("LAZYZERO_CORPUS"), DATA) if folder]
CASES = {path.parent.name: path.parent for corpus in reversed(CORPORA) for path in sorted(corpus.glob("*/case.json"))}

# output dtype, shard size
SIZES: dict[str, tuple[Any, str | None]] = {
    "default": ("float32", "5GB"),
    "sharded": ("fp32", "3KB"),
    "bf16": ("bfloat16", "3KB"),
    "fp16": (torch.float16, None),
}
FUNCTIONS = [name for name in compat.__all__ if name.endswith("_checkpoint") or name.startswith("convert_")]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Path:
    """The folder of one case."""
    return CASES[request.param]


@pytest.mark.parametrize("lazy", [False, True], ids=["whole", "lazy"])
@pytest.mark.parametrize("exclude", [False, True], ids=["all", "exclude-frozen"])
def test_the_state_dict_is_the_same(
    case: Path, exclude: bool, lazy: bool, theirs: ModuleType, verdict: Callable[[str], None]
) -> None:
    """Names, order, dtypes, shapes, bits, and which names are one object."""
    what = f"state dict{', frozen excluded' if exclude else ''}{', lazy' if lazy else ''}"
    arguments = {"exclude_frozen_parameters": exclude, "lazy_mode": lazy}
    path = str(case / "checkpoint")
    expected = _or_skip(
        lambda: theirs.get_fp32_state_dict_from_zero_checkpoint(path, **arguments), lambda: verdict(f"{what}: it fails")
    )
    got = compat.get_fp32_state_dict_from_zero_checkpoint(path, **arguments)
    assert [name for name in got if name in expected] == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, tuple(got[name].shape)) == (tensor.dtype, tuple(tensor.shape))
        assert same_bits(tensor.contiguous(), got[name].contiguous()), name
    assert _shared(expected) <= _shared(got)
    verdict(f"{what}: {_judge(case, expected, got)}")


@pytest.mark.parametrize("size", SIZES)
def test_safetensors_files_are_the_same(
    case: Path, size: str, theirs: ModuleType, tmp_path: Path, verdict: Callable[[str], None]
) -> None:
    """File names, every byte of the shards, and the index."""
    what = f"safetensors {size}"
    a, b = _convert_both(case, theirs, tmp_path, size, safe=True, failed=lambda: verdict(f"{what}: it fails"))
    judged = _judge(case, _tensors(a), _tensors(b))
    if judged == "equal":
        assert _contents(a) == _contents(b)
    verdict(f"{what}: {judged}")


@pytest.mark.parametrize("size", SIZES)
def test_bin_files_hold_the_same(
    case: Path, size: str, theirs: ModuleType, tmp_path: Path, verdict: Callable[[str], None]
) -> None:
    """File names, the tensors in each file, and the index; the archives themselves differ, theirs are larger."""
    what = f"bin {size}"
    a, b = _convert_both(case, theirs, tmp_path, size, safe=False, failed=lambda: verdict(f"{what}: it fails"))
    judged = _judge(case, _tensors(a), _tensors(b))
    if judged == "equal" and size != "default" and _has_shared_buffers(case):
        judged = "equal but for the sizes of shared buffers, which it counts under every name"
    elif judged == "equal":
        assert _contents(a, ".json") == _contents(b, ".json")
        assert {name: set(file) for name, file in _bins(a).items()} == {n: set(file) for n, file in _bins(b).items()}
    verdict(f"{what}: {judged}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signatures_are_the_same(name: str, theirs: ModuleType) -> None:
    """Parameters, their order, kinds and defaults; torch.float32 is written "float32", as torch need not be there."""
    expected = inspect.signature(getattr(theirs, name)).parameters.values()
    got = inspect.signature(getattr(compat, name)).parameters.values()
    assert [(p.name, p.kind) for p in got] == [(p.name, p.kind) for p in expected]
    assert [str(p.default) for p in got] == [str(p.default).removeprefix("torch.") for p in expected]


@pytest.mark.parametrize("script", ["zero_to_fp32.py", "zero_to_torch.py"])
def test_every_flag_of_both_scripts_is_known(script: str, theirs: ModuleType, tmp_path: Path) -> None:
    """What their --help lists, ours takes."""
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        shutil.copy(_script(theirs, name), tmp_path)
    told = _python(script, "--help", cwd=tmp_path)
    flags = set(re.findall(r"(?<![\w-])--?[a-z_]+", told))
    known = {flag for action in compat.build_parser()._actions for flag in action.option_strings}
    assert flags <= known
    assert set(theirs.OUTPUT_DTYPE_NAMES) == set(compat.OUTPUT_DTYPE_NAMES)


def test_their_second_script_runs_on_the_shim(theirs: ModuleType, tmp_path: Path) -> None:
    """`zero_to_torch.py` imports what lies beside it as `zero_to_fp32`: with the shim there it converts as before."""
    root = tmp_path / "checkpoint-12"
    shutil.copytree(DATA / "k_z3_mics_w4" / "checkpoint", root)
    (root / "zero_to_fp32.py").write_text(shim())
    shutil.copy(_script(theirs, "zero_to_torch.py"), root)
    _python("zero_to_torch.py", ".", "out", "--dtype", "bf16", "--safe_serialization", cwd=root)
    theirs.convert_zero_checkpoint_to_state_dict(str(root), str(tmp_path / "a"), "bf16", safe_serialization=True)
    assert _contents(root / "out") == _contents(tmp_path / "a")


def _script(theirs: ModuleType, name: str) -> Path:
    return Path(str(theirs.__file__)).with_name(name)


def _python(*arguments: str, cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(DATA.parent.parent)}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _or_skip(run: Callable[[], Any], failed: Callable[[], None]) -> Any:
    try:
        return run()
    except Exception as error:
        failed()
        pytest.skip(f"DeepSpeed fails: {type(error).__name__}: {str(error)[:100]}")


def _convert_both(
    case: Path, theirs: ModuleType, tmp_path: Path, size: str, *, safe: bool, failed: Callable[[], None]
) -> tuple[Path, Path]:
    dtype, shard = SIZES[size]
    arguments = {"dtype": dtype, "max_shard_size": shard, "safe_serialization": safe}
    a, b, path = tmp_path / "theirs", tmp_path / "ours", str(case / "checkpoint")
    _or_skip(lambda: theirs.convert_zero_checkpoint_to_state_dict(path, str(a), **arguments), failed)
    compat.convert_zero_checkpoint_to_state_dict(path, str(b), **arguments)
    return a, b


def _judge(case: Path, expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    """Asserts that ours has all of theirs, bit for bit, and beyond it only what the live model had."""
    assert set(expected) <= set(got)
    for name, tensor in expected.items():
        assert same_bits(tensor.contiguous(), got[name].contiguous()), name
    more = set(got) - set(expected)
    facts = json.loads((case / "case.json").read_text())
    live = {*facts["tied"], *facts["optional_names"], *_names(case, facts)}
    assert more <= live - set(facts["absent"])
    if not more:
        return "equal"
    return f"equal in what it has, it leaves out {_kinds(facts, more)}"


def _names(case: Path, facts: dict[str, Any]) -> set[str]:
    with safe_open(case / facts["truths"][0], "pt") as truth:
        return set(truth.keys())


def _kinds(facts: dict[str, Any], names: set[str]) -> str:
    kinds = {
        "frozen parameters": names & set(facts["frozen"]),
        "tied names": names & (set(facts["tied"]) | set(facts["buffers"])),
        "extra state": {name for name in names if name.endswith("_extra_state")},
    }
    rest = names.difference(*kinds.values())
    return " and ".join(kind for kind, found in {**kinds, "parameters outside the optimizer": rest}.items() if found)


def _has_shared_buffers(case: Path) -> bool:
    path = str(case / "checkpoint")
    lazy = compat.get_fp32_state_dict_from_zero_checkpoint(path, lazy_mode=True)
    buffers = json.loads((case / "case.json").read_text())["buffers"]
    return any(one in buffers for one, _ in _shared(lazy))


def _shared(tensors: Mapping[str, Any]) -> set[tuple[str, str]]:
    first: dict[int, str] = {}
    return {(first.setdefault(id(value), name), name) for name, value in tensors.items()} - {(n, n) for n in tensors}


def _contents(folder: Path, suffix: str = "") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.endswith(suffix)}


def _bins(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.bin")}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in folder.glob("*.safetensors")] + list(_bins(folder).values())
    return {name: tensor for file in files for name, tensor in file.items()}
