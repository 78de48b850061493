"""Each row of broken or hostile input ends in one line that names the file, soon and in little memory."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import lazyzero
from lazyzero.cli import main
from lazyzero.errors import CheckpointNotFound, LazyZeroError, ReadError
from tests.forge import Tensor, archive, text, write
from tests.hostile.bombs import BOMBS
from tests.hostile.checkpoints import TAG, stage0, zero2, zero3
from tests.hostile.rows import MODEL, ROWS, named

# Two seconds where nothing else runs, as in `make soak`; a tracer that measures coverage, or a busy machine, takes a multiple
# of it. What has no limit takes minutes.
SECONDS = 2 if os.environ.get("SOAK") else 20
MEMORY = 256 << 20  # bytes of the whole process, Python and numpy included

# Opens a checkpoint in a process of its own: what came out, how long it took, the most memory it ever had.
ALONE = """
import sys, time
import numpy, lazyzero
start = time.process_time()
try:
    lazyzero.open_checkpoint(sys.argv[1])
    told = ""
except lazyzero.LazyZeroError as error:
    told = str(error)
took = time.process_time() - start
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.stdout.write(f"{took} {peak} {told}")
"""


def assert_one_line(message: str, path: Path, told: str) -> None:
    """One printable line that begins with the file and says what is wrong."""
    assert message.startswith(f"{path}: "), message
    assert message.isprintable()
    assert len(message) < 2000
    assert re.search(told, message), message


def test_honest_checkpoints_open(tmp_path: Path) -> None:
    """The checkpoints that the rows are made from are fine: every tensor of theirs is read."""
    for make, count in ((zero2, 3), (zero3, 3), (stage0, 2)):
        checkpoint = lazyzero.open_checkpoint(make(tmp_path / make.__name__))
        assert len(checkpoint) == count
        assert not any(np.any(tensor.numpy().astype(np.float32)) for tensor in checkpoint.values())


@pytest.mark.parametrize("row", ROWS)
def test_broken_input(tmp_path: Path, row: str) -> None:
    """The row is refused within SECONDS, by one line that names the file."""
    path = ROWS[row].make(tmp_path / "root")
    start = time.process_time()
    with pytest.raises(LazyZeroError) as caught:
        lazyzero.open_checkpoint(tmp_path / "root")
    assert time.process_time() - start < SECONDS
    assert_one_line(str(caught.value), path, ROWS[row].told)


@pytest.mark.parametrize("command", ["inspect", "convert"])
@pytest.mark.parametrize("row", ROWS)
def test_broken_input_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, command: str
) -> None:
    """The row ends in exit code 1, one line on standard error, nothing on standard output, and no output directory."""
    path = ROWS[row].make(tmp_path / "root")
    out = tmp_path / "out"
    assert main([command, str(tmp_path / "root"), *([str(out)] if command == "convert" else [])]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert str(path) in line
    assert line.isprintable()
    assert printed.out == ""
    assert not out.exists()


@pytest.mark.parametrize("row", BOMBS)
def test_bombs(tmp_path: Path, row: str) -> None:
    """What asks for memory or time is refused within SECONDS of work and 256 MiB."""
    path = BOMBS[row].make(tmp_path / "root")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path / "root"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    took, peak, told = done.stdout.split(" ", 2)
    assert_one_line(told, path, BOMBS[row].told)
    assert int(peak) << 10 < MEMORY
    assert float(took) < SECONDS


def test_unreadable_file(tmp_path: Path) -> None:
    """A file without read permission is named, for a user who is not root."""
    path = zero2(tmp_path) / TAG / MODEL
    path.chmod(0)
    code = (
        "import os, sys, lazyzero, lazyzero.gather\n"
        "os.chdir(sys.argv[1])\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: lazyzero.open_checkpoint('.')\n"
        "except lazyzero.LazyZeroError as error: sys.stdout.write(f'{type(error).__name__}: {error}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path.parent], capture_output=True, text=True, check=False)
    assert done.stdout == f"ReadError: ./{MODEL}: cannot be opened: Permission denied", done.stderr


def test_unreadable_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be listed is named; one that merely lies beside the checkpoint does not matter."""

    zero2(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "secret").mkdir()
    listdir = os.listdir

    def refuse(path: object) -> list[str]:
        if Path(str(path)).name in refused:
            raise PermissionError(13, "Permission denied")
        return listdir(path)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "listdir", refuse)
    refused = {"secret"}
    assert len(lazyzero.open_checkpoint(tmp_path)) == 3
    refused = {tmp_path.name}
    with pytest.raises(ReadError, match="cannot be listed: Permission denied"):
        lazyzero.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["a/b", "a b", "A.weight", "…", "w" * 1024, "..", "/etc/passwd", "x.", "%s"], ids=repr)
def test_names_that_are_legal(tmp_path: Path, name: str) -> None:
    """Slashes, blanks, dots and any printable letter are names that safetensors can hold, and are kept."""
    named(name)(tmp_path)
    assert list(lazyzero.open_checkpoint(tmp_path)) == [name, "b"]


def test_names_that_differ_by_case(tmp_path: Path) -> None:
    """Names that differ by case, or in how an accent is written, are two parameters: names never become paths."""
    first, second = {"w": "a", "W": "b"}, {"\xe9": "a", "e\u0301": "b"}
    for number, names in enumerate((first, second)):
        upper, lower = names
        root = zero2(
            tmp_path / str(number),
            model={
                "module": {
                    upper: Tensor("0", (2, 3), kind="BFloat16Storage"),
                    lower: Tensor("1", (2,), kind="BFloat16Storage"),
                },
                "param_shapes": [{upper: (2, 3), lower: (2,)}],
                "buffer_names": [],
            },
        )
        checkpoint = lazyzero.open_checkpoint(root)
        assert {name: tensor.shape for name, tensor in checkpoint.items()} == {upper: (2, 3), lower: (2,)}


def test_file_names_that_steer_terminals(tmp_path: Path) -> None:
    """Paths come from the outside too: in a message they stand on one printable line."""
    for name in ("a\nb", "\x1b[2J", "\udcff\udcfe"):
        root = tmp_path / name
        write(zero2(root) / TAG / MODEL, b"nothing")
        with pytest.raises(LazyZeroError) as caught:
            lazyzero.open_checkpoint(root)
        assert str(caught.value).isprintable()
        assert "\\x1b" in str(caught.value) or "\\n" in str(caught.value) or "\\udcff" in str(caught.value)
        assert caught.value.args[0].startswith(f"{root}/")


def test_directories_of_long_names(tmp_path: Path) -> None:
    """Many directories whose names are all escapes do not make a message of pages."""
    for number in range(30):
        (tmp_path / ("\udcff" * 250 + str(number)) / "inner").mkdir(parents=True)
        write(tmp_path / ("\udcff" * 250 + str(number)) / "latest", b"inner")
    with pytest.raises(CheckpointNotFound, match="holds no checkpoint itself") as caught:
        lazyzero.open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 3000


def test_paths_that_are_none(tmp_path: Path) -> None:
    """Paths and tags no system has are not found, whatever they are."""
    zero2(tmp_path)
    for path in ("\0", "a" * 5000, tmp_path / "none", tmp_path / "latest", tmp_path / ("b" * 300)):
        with pytest.raises(CheckpointNotFound):
            lazyzero.open_checkpoint(path)
    for tag in ("\0", "a" * 5000, "none", "latest", ""):
        with pytest.raises(CheckpointNotFound, match="has no tag"):
            lazyzero.open_checkpoint(tmp_path, tag=tag)


def test_latest_that_is_no_file(tmp_path: Path) -> None:
    """A FIFO named `latest` does not hang, and a link to nothing does not matter: the one tag is taken."""

    zero2(tmp_path)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    assert len(lazyzero.open_checkpoint(tmp_path)) == 3
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("/dev/zero")
    assert len(lazyzero.open_checkpoint(tmp_path)) == 3


def test_tensors_that_are_not_plain_are_reported(tmp_path: Path) -> None:
    """A sparse or quantized weight in `module` is listed as missing, not passed over."""
    from tests.forge import Call

    sparse = Call("torch._utils", "_rebuild_sparse_tensor", (None, ()))
    root = zero2(
        tmp_path,
        model={
            "module": {
                "w": Tensor("0", (2, 3), kind="BFloat16Storage"),
                "b": Tensor("1", (2,), kind="BFloat16Storage"),
                "table": sparse,
                "half": Tensor("3", (2,), kind="ComplexHalfStorage"),
            }
        },
    )
    checkpoint = lazyzero.open_checkpoint(root)
    assert list(checkpoint) == ["w", "b"]
    assert set(checkpoint.missing) == {"table", "half"}
    assert "no plain tensor" in checkpoint.missing["table"]


def test_aliases_in_one_long_chain(tmp_path: Path) -> None:
    """Fifty thousand aliases, each of the next, and as many in a circle, are followed once."""
    chain = {f"a{index}": f"a{index + 1}" for index in range(50_000)}
    start = time.process_time()
    for end in ("w", "a0"):
        chain["a50000"] = end
        checkpoint = lazyzero.open_checkpoint(zero2(tmp_path / end, model={"shared_params": chain}))
        assert len(checkpoint.tied) == (50_001 if end == "w" else 0)
        assert set(checkpoint.tied.values()) <= {"w"}
    assert time.process_time() - start < SECONDS


def test_masters_that_are_all_alike(tmp_path: Path) -> None:
    """Ten thousand equal tensors and their masters without names: not compared all with all, the 16-bit values are used."""
    count = 10_000
    module = {f"p{i}": Tensor("0", (1,), (1,), i, count, "HalfStorage") for i in range(count)}
    root = stage0(tmp_path, model={"module": module, "optimizer": {"fp32_groups_flat": [Tensor("1", (count,))]}})
    start = time.process_time()
    checkpoint = lazyzero.open_checkpoint(root)
    assert time.process_time() - start < SECONDS
    assert {str(tensor.dtype) for tensor in checkpoint.values()} == {"float16"}
    assert "have no fp32 master that is theirs alone" in checkpoint.warnings[0]


def test_opening_holds_little_memory() -> None:
    """This very process, having opened everything above, is far from the limit in what it still holds."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20


def test_archives_of_other_encodings_of_text(tmp_path: Path) -> None:
    """A byte-order mark or blanks around the tag are not part of it."""
    zero2(tmp_path)
    write(tmp_path / "latest", b"global_step3\r\n")
    assert len(lazyzero.open_checkpoint(tmp_path)) == 3
    assert text("a") in archive({"a": 1})
