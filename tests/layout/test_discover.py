"""Which directory a user means: a root, a tag, or a place one level too high."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import lazyzero
from lazyzero.errors import AmbiguousCheckpoint, CheckpointNotFound, InconsistentCheckpoint, ReadError
from lazyzero.layout.discover import find_tag_dir, list_files
from tests.generator.simple import usual


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with `latest` and one tag."""
    return usual(tmp_path / "run").root


def test_a_root_with_latest(root: Path) -> None:
    """The tag `latest` names is taken, whatever other tags there are; a newline at its end does not matter."""
    shutil.copytree(root / "global_step3", root / "global_step9")
    assert find_tag_dir(root) == root / "global_step3"
    (root / "latest").write_text("global_step9\n")
    assert find_tag_dir(str(root)) == root / "global_step9"


def test_the_tag_directory_itself(root: Path) -> None:
    """Given where the files lie, `latest` is not asked for."""
    (root / "latest").unlink()
    assert find_tag_dir(root / "global_step3") == root / "global_step3"


def test_a_tag_that_is_named(root: Path) -> None:
    """--tag wins over `latest`, and may be repeated beside the tag directory itself."""
    shutil.copytree(root / "global_step3", root / "other tag é")
    assert find_tag_dir(root, "other tag é") == root / "other tag é"
    assert find_tag_dir(root / "other tag é", "other tag é") == root / "other tag é"
    with pytest.raises(CheckpointNotFound, match="no tag 'nope'; it has global_step3, other tag é"):
        find_tag_dir(root, "nope")
    with pytest.raises(CheckpointNotFound, match="no tag 'x'; it has no other tag"):
        find_tag_dir(root / "global_step3", "x")


def test_no_latest_and_one_tag(root: Path) -> None:
    """The only directory with DeepSpeed's files in it is the one."""
    (root / "latest").unlink()
    (root / "logs").mkdir()
    assert find_tag_dir(root) == root / "global_step3"


def test_no_latest_and_several_tags_are_listed(root: Path) -> None:
    """Nothing is guessed: the tags are named, and how to choose."""
    (root / "latest").unlink()
    shutil.copytree(root / "global_step3", root / "global_step10")
    with pytest.raises(AmbiguousCheckpoint, match="several tags: global_step10, global_step3; choose one with --tag"):
        find_tag_dir(root)


def test_a_trainers_folder(root: Path, tmp_path: Path) -> None:
    """checkpoint-500 is a root like any other; one level above, the folders to choose from are named."""
    output = tmp_path / "output"
    shutil.copytree(root, output / "checkpoint-500")
    shutil.copytree(root, output / "checkpoint-1000")
    (output / "runs").mkdir()
    assert find_tag_dir(output / "checkpoint-500") == output / "checkpoint-500" / "global_step3"
    with pytest.raises(CheckpointNotFound, match=r"give one of checkpoint-1000, checkpoint-500$"):
        find_tag_dir(output)


def test_nothing_there(tmp_path: Path, root: Path) -> None:
    """No such directory, a file, an empty directory, and a file of a tag each have their own sentence."""
    with pytest.raises(CheckpointNotFound, match="no such directory"):
        find_tag_dir(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        lazyzero.open_checkpoint(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match="no DeepSpeed checkpoint here"):
        find_tag_dir(tmp_path / "empty")
    file = root / "global_step3" / "mp_rank_00_model_states.pt"
    with pytest.raises(CheckpointNotFound, match=r"is a file; give the checkpoint's directory, .*global_step3 perhaps"):
        find_tag_dir(file)
    with pytest.raises(CheckpointNotFound, match="no such directory"):
        list_files(file)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected the name of a tag"),
        ("..", "expected the name of a tag"),
        ("global_step3/../global_step3", "expected the name of a tag"),
        ("/etc", "expected the name of a tag"),
        ("a\tb", "expected the name of a tag"),
        ("x" * 5000, "expected the name of a tag"),
        ("global_step4", "names tag 'global_step4', which is not there; found global_step3"),
        ("logs", "no DeepSpeed files in it; found global_step3"),
    ],
)
def test_a_latest_that_names_no_tag(text: str, told: str, root: Path) -> None:
    """Whatever `latest` holds, it never leads elsewhere; the message says what it held and what there is."""
    (root / "logs").mkdir()
    (root / "latest").write_text(text)
    with pytest.raises(CheckpointNotFound, match=told):
        find_tag_dir(root)


def test_a_latest_that_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system is a ReadError that names the file."""

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ReadError, match="latest: cannot be read: Permission denied"):
        find_tag_dir(root)


def test_a_link_out_of_the_root_is_not_followed(root: Path, tmp_path: Path) -> None:
    """A tag that is a symbolic link to another place is only taken when that place itself is given."""
    shutil.move(root / "global_step3", tmp_path / "elsewhere")
    (root / "global_step3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointNotFound, match="leads out of"):
        find_tag_dir(root)
    assert find_tag_dir(tmp_path / "elsewhere") == tmp_path / "elsewhere"


def test_a_directory_that_cannot_be_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the directory and the system's reason."""
    import os

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ReadError, match="global_step3: cannot be listed: Permission denied"):
        list_files(root / "global_step3")


def test_names_of_every_version_are_known(tmp_path: Path) -> None:
    """Prefixes, the missing underscore up to 0.3.13, ranks of any width; other names are passed over."""
    names = {
        "zero_pp_rank_0_mp_rank_00optim_states.pt": ("optim", ""),
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": ("optim", "bf16_"),
        "fp16_zero_pp_rank_12_mp_rank_00_optim_states.pt": ("optim", "fp16_"),
        "zero_pp_rank_1023_mp_rank_00_model_states.pt": ("zero_model", ""),
        "mp_rank_00_model_states.pt": ("model", ""),
    }
    for name in (
        *names,
        "scheduler.pt",
        "mp_rank_00_model_states.pt.bak",
        "zero_to_fp32.py",
        "mp_rank_x_model_states.pt",
    ):
        (tmp_path / name).touch()
    files = list_files(tmp_path)
    assert {prefix: sorted(ranks) for prefix, ranks in files.optim.items()} == {
        "": [(0, 0)],
        "bf16_": [(1, 0)],
        "fp16_": [(12, 0)],
    }
    assert sorted(files.zero_model) == [(1023, 0)]
    assert sorted(files.model) == [0]


def test_a_rank_written_in_two_ways_is_refused(root: Path) -> None:
    """mp_rank_0 beside mp_rank_00: one of them would be passed over in silence."""
    shutil.copy(
        root / "global_step3" / "mp_rank_00_model_states.pt", root / "global_step3" / "mp_rank_0_model_states.pt"
    )
    with pytest.raises(InconsistentCheckpoint, match="one file for each rank"):
        lazyzero.open_checkpoint(root)
