"""DeepSpeed's names over real checkpoints, without DeepSpeed."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lazyzero.pseudo
from lazyzero import LazyZeroError, compat
from lazyzero.errors import InvalidRequest, MissingDependency, WriteError
from lazyzero.export import run
from tests import oracle

pytestmark = pytest.mark.usefixtures("without_fsync")

TIED = "b_z3_tied_triple"
STAGE2 = "a_z2_bf16_w2"
STAGE1 = "c_z1_lora"
UNTIED = "k_z3_mics_w4"
SHARED_BUFFERS = "d_z3_sharedbuf"
DOCS = Path(__file__).parent.parent / "docs" / "compat.md"


def checkpoint(name: str) -> Path:
    """A real checkpoint."""
    return oracle.DATA / name / "checkpoint"


def shim() -> str:
    """The script that docs/compat.md tells to put over a checkpoint's own."""
    found = re.search(r"```python\n(#!.*?)```", DOCS.read_text(), re.DOTALL)
    assert found
    return found[1]


def python(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter; the package is found wherever it runs."""
    env = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def without_torch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from lazyzero.compat import main; sys.exit(main(sys.argv[1:]))"
    return python("-c", code, *arguments)


def expected(name: str) -> dict[str, torch.Tensor]:
    """The state dict of a case: its truth, floating buffers in fp32 and the rest as stored."""
    want, _ = oracle.truth(name)
    buffers = oracle.case(name)["buffers"]
    return {
        key: tensor.float() if key in buffers and tensor.is_floating_point() else tensor for key, tensor in want.items()
    }


class Tree(torch.nn.Module):
    """A module with the given names as parameters, or buffers where they are no floating tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            if tensor.is_floating_point():
                module.register_parameter(last, torch.nn.Parameter(torch.zeros(tensor.shape)))
            else:
                module.register_buffer(last, torch.zeros_like(tensor))


# The state dict


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", [TIED, STAGE2, STAGE1, UNTIED, SHARED_BUFFERS, "e_z2_fp16master"])
def test_the_state_dict_has_the_live_models_values(name: str, lazy: bool) -> None:
    """Every name, bit for bit; buffers in fp32, frozen parameters and 16-bit masters in the dtype they have."""
    got = compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint(name), lazy_mode=lazy)
    want = expected(name)
    assert set(got) == set(want)
    for key, tensor in want.items():
        assert oracle.same_bits(tensor, got[key].contiguous()), key


def test_names_come_in_deepspeeds_order() -> None:
    """Buffers (shared ones among them), frozen parameters, trained ones in the order of their groups, tied names."""
    facts = oracle.case(SHARED_BUFFERS)
    names = list(compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint(SHARED_BUFFERS)))
    trained = [name for group in facts["param_groups"] for name in group]
    rest = names[len(facts["buffers"]) :]
    assert set(names[: len(facts["buffers"])]) == set(facts["buffers"])
    assert rest == [*facts["frozen"], *sorted(trained, key=rest.index), *facts["tied"]]
    assert names.index("b2.tab") == names.index("b1.tab") + 1


@pytest.mark.parametrize("lazy", [False, True])
def test_tied_names_have_one_object(lazy: bool) -> None:
    """As DeepSpeed's; nothing else is shared."""
    got = compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint(TIED), lazy_mode=lazy)
    tied = oracle.case(TIED)["tied"]
    assert all(got[alias] is got[owner] for alias, owner in tied.items())
    assert len({id(value) for value in got.values()}) == len(got) - len(tied)


def test_a_whole_state_dict_does_not_depend_on_the_files(tmp_path: Path) -> None:
    """The next save of training may truncate them: the tensors keep their values, and writing to them changes no file."""
    root = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(STAGE2), root)
    got = compat.get_fp32_state_dict_from_zero_checkpoint(root)
    for path in root.rglob("*.pt"):
        path.write_bytes(b"")
    assert all(oracle.same_bits(tensor, got[key]) for key, tensor in expected(STAGE2).items())
    for tensor in got.values():
        tensor.zero_()


@pytest.mark.parametrize("name", [STAGE1, STAGE2])
def test_frozen_parameters_can_be_left_out(name: str) -> None:
    """At stage 1 too, where the files do not say which they are; names tied to them go with them, buffers stay."""
    got = compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint(name), exclude_frozen_parameters=True)
    facts = oracle.case(name)
    aliases = {alias for alias, owner in facts["tied"].items() if owner in facts["frozen"]}
    assert set(got) == set(expected(name)) - set(facts["frozen"]) - aliases


def test_at_stage_0_nothing_is_left_out_and_a_warning_says_so() -> None:
    """Which parameters were frozen is not recorded: better all than none."""
    with pytest.warns(UserWarning, match="16-bit tensors"), pytest.warns(UserWarning, match="stage 0 does not record"):
        got = compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint("g_z0_fp16"), exclude_frozen_parameters=True)
    assert set(oracle.case("g_z0_fp16")["frozen"]) < set(got)


def test_names_without_values_are_warned_of() -> None:
    """What DeepSpeed leaves out without a word is named, by a warning that points at the caller."""
    with pytest.warns(UserWarning, match="no file holds the values of") as caught:
        got = compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint("c_z3_lora_excl"))
    assert not set(got) & set(oracle.case("c_z3_lora_excl")["absent"])
    assert caught[0].filename == __file__


# Pseudo tensors


def test_a_lazy_value_tells_what_it_is_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape, dtype, device and size are there; bytes are read by `contiguous`, and only then."""
    reads: list[str] = []
    read = lazyzero.pseudo.read
    monkeypatch.setattr(lazyzero.pseudo, "read", lambda tensor, *a: [reads.append(tensor.name), read(tensor, *a)][1])
    got = compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint(STAGE2), lazy_mode=True)
    value, want = got["embed.weight"], expected(STAGE2)["embed.weight"]
    assert isinstance(value.shape, torch.Size)
    assert (value.shape, value.dtype, value.device) == (want.shape, want.dtype, want.device)
    assert (value.size(), value.size(0), value.dim(), value.numel()) == (want.size(), want.size(0), 2, want.numel())
    assert "embed.weight" in repr(value)
    assert reads == []
    assert torch.equal(value.contiguous(), want)
    assert reads == ["embed.weight"]


def test_a_lazy_value_does_what_a_tensor_does() -> None:
    """Other attributes and methods of tensors, and torch's functions, also within lists; nothing a tensor has not."""
    got = compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint(STAGE2), lazy_mode=True)
    value, want = got["embed.weight"], expected(STAGE2)["embed.weight"]
    assert value.half().dtype == torch.float16
    assert value.T.shape == want.T.shape
    assert torch.equal(torch.stack([value, want]), torch.stack([want, want]))
    assert torch.equal(torch.add(value, want, alpha=2), want * 3)
    assert torch.equal(torch.nn.functional.linear(want, value, bias=None), want @ want.T)
    for name in ("no_such_thing", "_private"):
        with pytest.raises(AttributeError, match=name):
            getattr(value, name)


def test_a_module_loads_a_lazy_state_dict() -> None:
    """`load_state_dict` takes pseudo tensors for tensors, strictly."""
    want = expected(TIED)
    model = Tree(want)
    model.load_state_dict(compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint(TIED), lazy_mode=True))
    state = model.state_dict()
    assert all(oracle.same_bits(tensor.to(state[key].dtype), state[key]) for key, tensor in want.items())


@pytest.mark.parametrize("name", [TIED, STAGE2, STAGE1])
def test_a_model_is_filled(name: str) -> None:
    """The model comes back with the checkpoint's values; names that only one of them has do not matter."""
    want = expected(name)
    model = Tree({**want, "head_of_mine.weight": torch.ones(3)})
    dropped = next(iter(oracle.case(name)["frozen"]))
    delattr(model.get_submodule(dropped.rpartition(".")[0]), dropped.rpartition(".")[2])
    assert compat.load_state_dict_from_zero_checkpoint(model, checkpoint(name)) is model
    state = model.state_dict()
    assert not state.pop("head_of_mine.weight").any()
    assert set(state) == set(want) - {dropped}
    assert all(oracle.same_bits(want[key].to(tensor.dtype), tensor) for key, tensor in state.items())


# Files


@pytest.mark.parametrize("form", ["5GB", "3KB", None, 3000])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bf16", "torch.float16", torch.bfloat16, torch.float32])
def test_files_are_those_of_convert(dtype: Any, safe: bool, form: Any, tmp_path: Path) -> None:
    """Names, index and tensors are right in each dtype DeepSpeed knows, by name or as torch's own."""
    compat.convert_zero_checkpoint_to_state_dict(checkpoint(TIED), tmp_path / "out", dtype, form, safe)
    want, tied = oracle.truth(TIED)
    torch_dtype = oracle.DTYPES[compat.OUTPUT_DTYPE_NAMES[str(dtype).removeprefix("torch.")]]
    format = "safetensors" if safe else "bin"
    assert oracle.faults(want, tied, tmp_path / "out", format=format, dtype=torch_dtype) == []
    assert (len(oracle.weight_files(tmp_path / "out")) > 1) == (form in ("3KB", 3000))


def test_the_default_is_one_bin_file_in_fp32(tmp_path: Path) -> None:
    """As DeepSpeed's; nothing else is in the directory, which is made with its parents."""
    compat.convert_zero_checkpoint_to_fp32_state_dict(checkpoint(STAGE2), tmp_path / "deep" / "out")
    assert [path.name for path in (tmp_path / "deep" / "out").iterdir()] == ["pytorch_model.bin"]
    want, tied = oracle.truth(STAGE2)
    assert oracle.faults(want, tied, tmp_path / "deep" / "out", format="bin", dtype=torch.float32) == []


def test_files_of_the_same_name_are_replaced_and_others_left(tmp_path: Path) -> None:
    """A second run, with other options, into a directory with other things in it, as scripts have always done."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (out / name).write_text("mine")
    compat.convert_zero_checkpoint_to_state_dict(checkpoint(STAGE2), out)
    compat.convert_zero_checkpoint_to_state_dict(checkpoint(STAGE2), out, "bf16")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "pytorch_model.bin"]
    assert (out / "config.json").read_text() == (out / "model.safetensors").read_text() == "mine"
    assert torch.load(out / "pytorch_model.bin", weights_only=True)["l1.weight"].dtype == torch.bfloat16


def test_weights_that_stay_beside_the_new_ones_are_warned_of(tmp_path: Path) -> None:
    """A loader may prefer them, and DeepSpeed says nothing."""
    out = tmp_path / "out"
    compat.convert_zero_checkpoint_to_state_dict(checkpoint(UNTIED), out, safe_serialization=True)
    with pytest.warns(UserWarning, match=r"holds other weights.*: model\.safetensors"):
        compat.convert_zero_checkpoint_to_state_dict(checkpoint(UNTIED), out, "fp32", "3KB", True)
    assert len(load_file(out / "model.safetensors")) == len(expected(UNTIED))


def test_output_may_go_into_the_checkpoints_root(tmp_path: Path) -> None:
    """`zero_to_fp32.py . .` is what many do."""
    root = tmp_path / "checkpoint-3"
    shutil.copytree(checkpoint(STAGE2), root)
    before = sorted(path.name for path in root.iterdir())
    compat.convert_zero_checkpoint_to_fp32_state_dict(root, root)
    assert sorted(path.name for path in root.iterdir()) == sorted([*before, "pytorch_model.bin"])


def _fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Lets `write_shard` fail once it has written `count` files; the names of those it was asked for."""
    asked: list[str] = []
    write = run.write_shard

    def writing(work: Any, shard: Any, path: Path) -> Any:
        asked.append(path.name)
        if len(asked) > count:
            raise WriteError("the disk went away")
        return write(work, shard, path)

    monkeypatch.setattr(run, "write_shard", writing)
    return asked


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished is kept, an index of an earlier run is not left beside it, and no trace of all this at the end."""
    out = tmp_path / "out"
    arguments: tuple[Any, ...] = (checkpoint(UNTIED), out, "fp32", "3KB", True)
    compat.convert_zero_checkpoint_to_state_dict(*arguments)
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    with monkeypatch.context() as patch:
        _fail_after(patch, 2)
        with pytest.raises(WriteError):
            compat.convert_zero_checkpoint_to_state_dict(*arguments)
    assert not (out / "model.safetensors.index.json").exists()
    asked = _fail_after(monkeypatch, 100)
    compat.convert_zero_checkpoint_to_state_dict(*arguments)
    assert asked == sorted(name for name in whole if name.endswith(".safetensors"))[2:]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole


def test_an_interrupted_run_with_other_options_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished files of another dtype are not taken for ours."""
    with monkeypatch.context() as patch:
        _fail_after(patch, 2)
        with pytest.raises(WriteError):
            compat.convert_zero_checkpoint_to_state_dict(checkpoint(UNTIED), tmp_path, "fp32", "4KB", True)
    with pytest.warns(UserWarning, match="model-00001-of-00004"):
        compat.convert_zero_checkpoint_to_state_dict(checkpoint(UNTIED), tmp_path, "bf16", "5GB", True)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} >= {torch.bfloat16}
    assert not (tmp_path / ".lazyzero.json").exists()


@pytest.mark.parametrize("dtype", ["keep", "int8", torch.float64, None])
def test_other_dtypes_are_refused(dtype: Any, tmp_path: Path) -> None:
    """As a ValueError, before anything is made."""
    with pytest.raises(ValueError, match="is not one of bf16, bfloat16") as caught:
        compat.convert_zero_checkpoint_to_state_dict(checkpoint(STAGE2), tmp_path / "out", dtype)
    assert isinstance(caught.value, InvalidRequest)
    assert not (tmp_path / "out").exists()


# The command


def test_the_flags_of_both_scripts_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spelled as DeepSpeed spells them, the short ones too; -d lists the tensors."""
    tag = (checkpoint(STAGE1) / "latest").read_text()
    flags = ["--max_shard_size", "3KB", "--safe_serialization", "-t", tag, "--exclude_frozen_parameters", "-d"]
    assert compat.main([str(checkpoint(STAGE1)), str(tmp_path / "a"), *flags]) == 0
    told = capsys.readouterr().out
    want = set(expected(STAGE1)) - set(oracle.case(STAGE1)["frozen"]) - set(oracle.case(STAGE1)["tied"])
    assert set(load_file(tmp_path / "a" / "model.safetensors")) == want
    assert all(name in told for name in want)
    assert "wrote 1 file" in told.splitlines()[-2]
    assert (
        compat.main([str(checkpoint(STAGE1)), str(tmp_path / "b"), "--dtype", "bfloat16", "--tag", tag, "--debug"]) == 0
    )
    assert (tmp_path / "b" / "pytorch_model.bin").exists()


def test_without_arguments_for_it_the_command_writes_fp32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`zero_to_fp32.py` has no --dtype; notices go to standard error, as lines."""
    assert compat.main([str(checkpoint("c_z3_lora_excl")), str(tmp_path), "--safe_serialization"]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    assert "warning: no file holds the values of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["{checkpoint}"], 2, "output_dir"),
        (["{checkpoint}", "{out}", "--dtype", "int8"], 2, "--dtype"),
        (["{checkpoint}", "{out}", "--max_shard_size", "much"], 2, "'much'"),
        (["{checkpoint}/nowhere", "{out}"], 1, "nowhere: no such directory"),
        (["{checkpoint}", "{out}", "--tag", "step9"], 1, "no tag 'step9'"),
        (["{checkpoint}", "{checkpoint}/global_step3"], 1, "never written to"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, told: str, tmp_path: Path) -> None:
    """Exit code 2 for what makes no sense, 1 for what cannot be done; never a traceback, nothing left behind."""
    filled = [word.format(checkpoint=checkpoint(STAGE2), out=tmp_path / "out") for word in arguments]
    done = python("-m", "lazyzero.compat", *filled)
    assert done.returncode == code
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


# Without torch


def test_safetensors_are_written_without_torch(tmp_path: Path) -> None:
    """The module imports without torch, and so does the command run that needs none."""
    done = without_torch(checkpoint(UNTIED), tmp_path / "out", "--safe_serialization", "--dtype", "bf16")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(expected(UNTIED))


def test_bin_files_without_torch_say_what_to_install(tmp_path: Path) -> None:
    """One line, with the command to give."""
    done = without_torch(checkpoint(UNTIED), tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'lazyzero[torch]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_torch_objects_without_torch_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MissingDependency, which is an ImportError."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=r"pip install 'lazyzero\[torch\]'") as caught:
        compat.get_fp32_state_dict_from_zero_checkpoint(checkpoint(STAGE2), lazy_mode=True)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, LazyZeroError)


# The documentation


def test_the_shim_in_the_docs_takes_the_scripts_place(tmp_path: Path) -> None:
    """Run where DeepSpeed's scripts lie, under either name; ten lines or so, and it offers the functions."""
    assert shim().count("\n") <= 10
    root = tmp_path / "checkpoint-3"
    shutil.copytree(checkpoint(STAGE2), root)
    for script, flags in (("zero_to_fp32.py", []), ("zero_to_torch.py", ["--dtype", "fp16"])):
        (root / script).write_text(shim())
        done = python(script, ".", script.removesuffix(".py"), "--safe_serialization", *flags, cwd=root)
        assert done.returncode == 0, done.stderr
    assert load_file(root / "zero_to_torch" / "model.safetensors")["l1.weight"].dtype == torch.float16
    namespace: dict[str, Any] = {"__name__": "zero_to_fp32"}
    exec(shim(), namespace)
    assert set(compat.__all__) <= set(namespace)


def test_the_lazy_example_in_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints a line for each name."""
    shutil.copytree(checkpoint(STAGE2), tmp_path / "checkpoint-500")
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(from lazyzero.*?)```", DOCS.read_text(), re.DOTALL)
    assert example
    exec(example[1], {})
    assert len(capsys.readouterr().out.splitlines()) == len(expected(STAGE2))


def test_the_docs_know_every_flag_and_function() -> None:
    """Each is named in docs/compat.md."""
    text = DOCS.read_text()
    flags = {flag for action in compat.build_parser()._actions for flag in action.option_strings} - {"-h", "--help"}
    functions = {name for name in compat.__all__ if inspect.isfunction(getattr(compat, name))} - {"main"}
    assert [word for word in sorted(flags | functions) if f"`{word}`" not in text and f"import {word}\n" not in text and f"import {word} " not in text] == []  # fmt: skip
