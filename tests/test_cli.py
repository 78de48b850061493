"""The command line: exit codes, messages, signals, pipes; no user error ends in a traceback."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lazyzero
from lazyzero.cli import main
from tests import oracle
from tests.files import contents, state
from tests.generator.simple import module_only, usual
from tests.generator.spec import Param, Spec
from tests.generator.stages import write

pytestmark = pytest.mark.usefixtures("without_fsync")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return usual(tmp_path / "checkpoint-500", world=3).root


def run(*words: object) -> int:
    return main([str(word) for word in words])


def started(*words: object, **more: object) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    line = [sys.executable, "-m", "lazyzero", *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)  # type: ignore[call-overload, no-any-return]


# -- what works ------------------------------------------------------------------------------------------------


def test_convert_says_what_it_wrote(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """Exit 0; the last lines tell files, tensors, bytes, rate, peak memory and the self-check."""
    assert run("convert", root, tmp_path / "out", "--dtype", "bf16", "--max-shard-size", "700B") == 0
    told = capsys.readouterr()
    assert told.out.startswith("wrote 5 files, 8 tensors, ")
    assert f"to {tmp_path / 'out'} in " in told.out
    assert "/s), peak RSS " in told.out
    assert "self-check: samples of 4 tensors agree with the training copy" in told.out
    assert told.err == ""
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_convert_again_has_nothing_to_do(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """The same command over its own finished output writes nothing and says so."""
    assert run("convert", root, tmp_path / "out") == 0
    before = state(tmp_path / "out")
    assert run("convert", root, tmp_path / "out") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert state(tmp_path / "out") == before


def test_quiet_says_nothing(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """--quiet: not a byte on either stream."""
    assert run("convert", root, tmp_path / "out", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_json_is_the_report(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """--json prints the report and nothing else on standard output."""
    assert run("convert", root, tmp_path / "out", "--json", "--max-shard-size", "none") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == ["model.safetensors"]
    assert report["nbytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert report["tied"] == {"head.weight": "embed.weight"}
    assert (report["tensors"], report["missing"], report["checked"], report["resumed"]) == (8, {}, 4, 0)
    assert report["seconds"] > 0 < report["peak_rss"]


@pytest.mark.parametrize("option", [[], ["--format", "bin"], ["--json"]])
def test_dry_run_plans_and_writes_nothing(root: Path, tmp_path: Path, capsys: Capture, option: list[str]) -> None:
    """--dry-run shows the files that would be written; the output directory does not appear."""
    assert run("convert", root, tmp_path / "out", "--dry-run", "--max-shard-size", "700", *option) == 0
    assert "shards and an index" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_inspect_shows_what_a_conversion_would_give(root: Path, capsys: Capture) -> None:
    """Layout, ranks, roles, dtypes, ties, missing names, and the output's files with their sizes."""
    assert run("inspect", root, "--tensors", "--max-shard-size", "1KB") == 0
    told = capsys.readouterr().out
    for part in (
        "ZeRO-2, 3 ranks, written by DeepSpeed 0.19.8",
        "8 tensors, 500 parameters",
        "tied: head.weight = embed.weight",
        "4 trained, 465 elements",
        "1 frozen, 35 elements",
        "2 buffers",
        "float32 (",
        "model-00001-of-00003.safetensors",
        "layer.weight  [16, 8]  float32  trainable",
        "head.weight  [40, 8]  float32  trainable  tied to embed.weight",
        "of memory",
    ):
        assert part in told, part


def test_inspect_json_has_the_same_facts(root: Path, capsys: Capture) -> None:
    """Every fact as a plain value."""
    assert run("inspect", root, "--json", "--tensors", "--dtype", "bf16", "--max-shard-size", "none") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layout"] == "ZeRO-2"
    assert facts["ranks"] == 3
    assert facts["output"]["files"] == [{"name": "model.safetensors", "tensors": 8, "bytes": facts["output"]["bytes"]}]
    assert [row["name"] for row in facts["entries"]] == list(lazyzero.open_checkpoint(root))
    assert facts["roles"]["frozen"] == {"tensors": 1, "elements": 35, "bytes": 70}


def test_inspect_shortens_long_lists_of_files(tmp_path: Path, capsys: Capture) -> None:
    """Fifteen shards: the first ten, dots, the last."""
    root = module_only(tmp_path / "ckpt", {f"t{number}": torch.ones(4) for number in range(15)})
    assert run("inspect", root, "--max-shard-size", "16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("-of")[0].strip() for line in lines[-3:]] == ["model-00010", "...", "model-00015"]


def test_verify_says_right_or_what_differs(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """Exit 0 and the number of elements, or exit 1 and a line for each difference."""
    run("convert", root, tmp_path / "out")
    capsys.readouterr()
    assert run("verify", root, tmp_path / "out") == 0
    assert "right: 8 tensors, 832 elements compared" in capsys.readouterr().out
    assert run("verify", root, tmp_path / "out", "--json", "--workers", "1") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert run("verify", root, tmp_path / "out", "--dtype", "bf16") == 1
    told = capsys.readouterr()
    assert "differs: layer.weight: is float32 in model.safetensors, should be bfloat16" in told.out
    assert "differences from" in told.err


def test_warnings_and_missing_names_are_told(tmp_path: Path, capsys: Capture) -> None:
    """What is left out is named on standard error, with the reason, and again in inspect."""
    params = (Param("a", (3,)), *(Param(f"unused{number}", (2,), kind="left out") for number in range(7)))
    truth = write(Spec(stage=3, world=2, params=params), tmp_path / "ckpt")
    assert run("convert", truth.root, tmp_path / "out") == 0
    told = capsys.readouterr().err
    assert "warning: " in told
    assert "unused0, unused1, unused2, unused3, unused4 and 2 more" in told
    assert "in no file" in told
    assert run("inspect", truth.root) == 0
    assert "missing: unused6" in capsys.readouterr().out


def test_no_self_check_goes_on(tmp_path: Path, capsys: Capture) -> None:
    """The flag the message names does what it says."""
    from tests.test_selfcheck import swapped

    truth = swapped(tmp_path / "ckpt", 2)
    assert run("convert", truth.root, tmp_path / "out") == 1
    assert "--no-self-check" in capsys.readouterr().err
    assert run("convert", truth.root, tmp_path / "out", "--no-self-check") == 0


def test_verify_is_not_promised_for_what_was_taken_away(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--verify with --on-shard is refused before anything is written: at the end the files may be gone."""
    assert run("convert", root, tmp_path / "out", "--verify", "--on-shard", "true") == 2
    assert "run `lazyzero verify` where the files are" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_command_for_each_shard(root: Path, tmp_path: Path) -> None:
    """--on-shard runs with the path, number and count of each file, the index last, and may take it away."""
    line = f'echo "$LAZYZERO_INDEX/$LAZYZERO_COUNT $(basename $LAZYZERO_PATH)" >> {tmp_path}/log; rm "$LAZYZERO_PATH"'
    assert run("convert", root, tmp_path / "out", "--max-shard-size", "1KB", "--on-shard", line, "--quiet") == 0
    assert (tmp_path / "log").read_text().splitlines() == [
        "1/4 model-00001-of-00003.safetensors",
        "2/4 model-00002-of-00003.safetensors",
        "3/4 model-00003-of-00003.safetensors",
        "4/4 model.safetensors.index.json",
    ]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lazyzero.json"]


def test_a_failing_command_keeps_the_file_and_says_so(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """Exit 1, the command's code, and the way on; the next run goes on from there."""
    words = ("convert", root, tmp_path / "out", "--max-shard-size", "1KB")
    assert run(*words, "--on-shard", "exit 7") == 1
    assert "ended with 7" in capsys.readouterr().err
    assert (tmp_path / "out" / "model-00001-of-00003.safetensors").exists()
    assert run(*words) == 0
    assert "1 of them were finished by an earlier run" in capsys.readouterr().out


def test_python_dash_m_is_the_command(root: Path, tmp_path: Path) -> None:
    """`python -m lazyzero` and its exit code."""
    process = started("convert", root, tmp_path / "out", "--json")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["files"] == ["model.safetensors"]


# -- standard output -------------------------------------------------------------------------------------------


def test_dtypes_have_torchs_names_as_well(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--dtype bfloat16` is bf16; a name that is none is a wrong command line, told in one line."""
    assert run("convert", root, tmp_path / "out", "--dtype", "bfloat16") == 0
    assert run("verify", root, tmp_path / "out", "--dtype", "torch.bfloat16") == 0
    capsys.readouterr()
    for words in (("convert", root, tmp_path / "other"), ("verify", root, tmp_path / "out")):
        assert run(*words, "--dtype", "int8") == 2
        assert capsys.readouterr().err == "lazyzero: error: dtype 'int8' is not one of fp32, fp16, bf16, keep\n"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "keep"])
def test_a_pipe_gets_the_bytes_of_the_file(root: Path, tmp_path: Path, dtype: str) -> None:
    """`convert CKPT -` into a pipe equals the single file, byte for byte."""
    process = started("convert", root, "-", "--dtype", dtype, "--max-shard-size", "10B", "--tied", "drop")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    run("convert", root, tmp_path / "out", "--dtype", dtype, "--max-shard-size", "none", "--tied", "drop", "--quiet")
    assert out == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_stream_warns_on_the_other_stream(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Notes about a checkpoint go to standard error, the weights alone to standard output."""
    root = module_only(tmp_path / "ckpt", {"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(3)})
    assert run("convert", root, "-", "--check-finite") == 0
    told = capfdbinary.readouterr()
    assert told.err == b"warning: NaN or infinity in a\n"
    assert run("convert", root, tmp_path / "out") == 0
    assert told.out == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_terminal_is_not_a_pipe(root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are never written to a screen."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("convert", root, "-") == 2
    assert "redirect it" in capsys.readouterr().err


def test_bin_needs_a_file(root: Path) -> None:
    """A .bin archive cannot be streamed."""
    with started("convert", root, "-", "--format", "bin") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, b"")
    assert b"need a directory" in err


@pytest.mark.parametrize("words", [["convert", "{root}", "-"], ["inspect", "{root}", "--tensors", "--json"]])
def test_a_reader_that_goes_away_is_no_traceback(words: list[str], tmp_path: Path) -> None:
    """Exit 1 in silence or one line, when whoever reads our output stops reading."""
    root = module_only(tmp_path / "ckpt", {f"tensor.{number}": torch.zeros(300) for number in range(2000)})
    with started(*[word.format(root=root) for word in words]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait(timeout=60) == 1
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 1


# -- what goes wrong -------------------------------------------------------------------------------------------


def wrong(root: Path) -> list[tuple[list[str], int, str]]:
    """Command lines that cannot be honoured: exit code and a part of the message."""
    out = str(root.parent / "out")
    damaged = root.parent / "damaged"
    damaged.mkdir()
    (damaged / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04 and no more")
    return [
        (["convert", "/no/such/place", out], 1, "no such directory"),
        (["inspect", str(root / "latest")], 1, "is a file"),
        (["verify", str(root), str(root / "nothing")], 1, "no such directory"),
        (["verify", str(root), str(root)], 1, "to verify"),
        (["convert", str(root), str(root / "global_step3")], 1, "never written to"),
        (["convert", str(root), str(root / "latest")], 1, "is a file"),
        (["convert", str(root), str(root.parent)], 1, "not empty"),
        (["convert", str(root), out, "--tag", "x"], 1, "has no tag 'x'; it has global_step3"),
        (["convert", str(root), out, "--max-shard-size", "five"], 2, "'five' is not a number with a unit"),
        (["convert", str(root), out, "--max-memory", "1MB"], 2, "the least that would do here is"),
        (["convert", str(root), out, "--max-memory", "x"], 2, "'x' is not a number"),
        (["convert", str(root), out, "--workers", "0"], 2, "workers '0'"),
        (["convert", str(root), out, "--workers", "many"], 2, "workers 'many'"),
        (["convert", str(root), out, "--format", "bin", "--tied", "drop"], 2, "'drop' is for safetensors"),
        (["convert", str(root), "-", "--json"], 2, "need a directory"),
        (["inspect", str(damaged)], 1, "mp_rank_00_model_states.pt: "),
    ]


def test_every_user_error_is_one_line(root: Path, capsys: Capture) -> None:
    """The exit code, one line on standard error that says what is wrong, nothing on standard output, nothing written."""
    cases = wrong(root)
    before = state(root.parent)
    for words, code, part in cases:
        assert main(words) == code, words
        told = capsys.readouterr()
        assert told.out == "", words
        assert told.err.startswith("lazyzero: error: "), words
        assert part in told.err, told.err
        assert told.err.count("\n") == 1, told.err
        assert state(root.parent) == before, words


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["transmogrify"],
        ["convert"],
        ["convert", "x"],
        ["convert", "x", "y", "--format", "pt"],
        ["inspect", "--frob", "x"],
    ],
)
def test_usage_errors_end_with_2(words: list[str], capsys: Capture) -> None:
    """What argparse refuses: its usage and exit code."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: lazyzero" in capsys.readouterr().err


def test_help_and_version(capsys: Capture) -> None:
    """They end with 0."""
    for words in (["--help"], ["--version"], ["convert", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
    told = capsys.readouterr().out
    assert "examples:" in told
    assert f"lazyzero {lazyzero.__version__}" in told


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("12 GB")])
def test_what_nobody_expected_of_the_system_is_still_one_line(
    error: Exception, root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare OSError or MemoryError becomes a message with its class."""

    def fail(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr("lazyzero.cli.open_checkpoint", fail)
    assert run("inspect", root) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"lazyzero: error: {type(error).__name__}: ")
    assert told.count("\n") == 1


# -- signals ---------------------------------------------------------------------------------------------------


def sparse(root: Path, count: int, size: int) -> Path:
    """A checkpoint of `count` tensors of `size` float32 zeros each, whose file is all holes."""
    with torch.serialization.skip_data():
        return module_only(root, {f"t{number:02d}": torch.empty(size) for number in range(count)})


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_it_cleanly_and_the_same_command_goes_on(
    number: signal.Signals, code: int, word: str, tmp_path: Path, capsys: Capture
) -> None:
    """130 or 143, one line, no traceback, no temporary file; finished shards stay and are not written again."""
    root = sparse(tmp_path / "ckpt", 24, 1 << 20)
    words = ("convert", root, tmp_path / "out", "--max-shard-size", "4MiB", "--workers", "1")
    process = started(*words)
    first, second = (tmp_path / "out" / f"model-0000{number}-of-00024.safetensors" for number in (1, 2))
    deadline = time.monotonic() + 60
    while not second.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, b"")
    lines = [line for line in err.decode().splitlines() if line]
    assert lines[-1] == f"lazyzero: {word}; finished shards are kept, give the same command to go on"
    assert b"Traceback" not in err
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert not [name for name in left if "tmp" in name]
    assert "model-00024-of-00024.safetensors" not in left
    before = first.stat().st_mtime_ns
    assert run(*words) == 0
    assert re.search(r"[0-9]+ of them were finished by an earlier run", capsys.readouterr().out)
    assert first.stat().st_mtime_ns == before
    assert not load_file(tmp_path / "out" / "model-00024-of-00024.safetensors")["t23"].any()


@pytest.mark.parametrize(
    ("error", "code", "told"), [(KeyboardInterrupt, 130, "\nlazyzero: interrupted"), (BrokenPipeError, 1, "")]
)
def test_interruptions_inside_the_process(
    error: type[BaseException], code: int, told: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, and a reader that is gone, as `main` sees them: a code and at most one line."""
    import contextlib

    def fail(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr("lazyzero.cli.open_checkpoint", fail)
    monkeypatch.setattr(os, "dup2", lambda *args: None)
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        assert run("convert", root, root.parent / "out") == code
    assert stream.getvalue().startswith(told)
    assert stream.getvalue().count("\n") == 2 * bool(told)


def test_a_signal_while_inspecting_gives_no_hint(root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to go on with; the handler that was there before is put back."""
    before = signal.getsignal(signal.SIGTERM)

    def interrupt(*args: object, **more: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("lazyzero.cli.open_checkpoint", interrupt)
    assert run("inspect", root) == 143
    assert capsys.readouterr().err == "\nlazyzero: terminated\n"
    assert signal.getsignal(signal.SIGTERM) is before


# -- imports ---------------------------------------------------------------------------------------------------


def python(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_lazyzero_imports_no_torch() -> None:
    """`python -X importtime -c "import lazyzero"` has no line of torch."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import lazyzero"], capture_output=True, text=True, check=True
    )
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "lazyzero" in modules
    assert not [module for module in modules if module.partition(".")[0] in ("torch", "deepspeed", "tqdm", "psutil")]


@pytest.mark.parametrize(
    "words", [["inspect", "{root}"], ["convert", "{root}", "{out}", "--dtype", "bf16"], ["verify", "{root}", "{out}"]]
)
def test_safetensors_need_no_torch_at_any_step(words: list[str], root: Path, tmp_path: Path) -> None:
    """After inspect, convert and verify, torch was never imported."""
    run("convert", root, tmp_path / "done", "--dtype", "bf16", "--quiet")
    out = tmp_path / ("done" if words[0] == "verify" else "out")
    code = (
        "import sys; from lazyzero.cli import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = python(code, *[word.format(root=root, out=out) for word in words])
    assert done.returncode == 0, done.stdout + done.stderr


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from lazyzero.cli import main; sys.exit(main(['convert', sys.argv[1], sys.argv[2], '--format', 'bin']))",
         "lazyzero: error: .bin files need torch: pip install 'lazyzero[torch]'; safetensors files do not"),
        ("from lazyzero.cli import main; sys.exit(main(['verify', sys.argv[1], sys.argv[3]]))",
         "lazyzero: error: reading .bin files needs torch: pip install 'lazyzero[torch]'"),
    ],
)  # fmt: skip
def test_without_torch_one_line_says_what_to_install(code: str, told: str, root: Path, tmp_path: Path) -> None:
    """Asked for .bin without torch: one line, exit 1, nothing written."""
    run("convert", root, tmp_path / "bin", "--format", "bin", "--quiet")
    done = python(WITHOUT_TORCH + code, root, tmp_path / "out", tmp_path / "bin")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told + "\n")
    assert not (tmp_path / "out").exists()


def test_without_torch_everything_else_works(root: Path, tmp_path: Path) -> None:
    """Conversion to safetensors and numpy values; `.torch()` says what is missing, as an ImportError too."""
    code = WITHOUT_TORCH + (
        "import lazyzero\n"
        "lazyzero.convert(sys.argv[1], sys.argv[2])\n"
        "tensor = lazyzero.open_checkpoint(sys.argv[1])['layer.weight']\n"
        "assert tensor.numpy().shape == (16, 8)\n"
        "try: tensor.torch()\n"
        "except ImportError as error: print(error)\n"
    )
    done = python(code, root, tmp_path / "out")
    assert done.stdout == "torch tensors need torch: pip install 'lazyzero[torch]'\n", done.stderr
    run("convert", root, tmp_path / "with", "--quiet")
    assert contents(tmp_path / "out") == contents(tmp_path / "with")


def test_progress_on_a_terminal_and_in_a_log(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets a bar that is taken away again; notes stand above it."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert run("convert", root, tmp_path / "out") == 0
    assert "B/s" in screen.getvalue()
    assert screen.getvalue().endswith("\r")


def test_corpus_cases_convert_from_the_command_line(tmp_path: Path) -> None:
    """The command gives what the library does."""
    case = oracle.DATA / "b_z3_tied_frozen"
    assert run("convert", case / "checkpoint", tmp_path / "out", "--dtype", "keep", "--quiet") == 0
    want, tied = oracle.truth("b_z3_tied_frozen")
    assert oracle.faults(want, tied, tmp_path / "out", format="safetensors", dtype=None) == []
