"""A pickle is data here: whatever it says, nothing is called, imported, opened or written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.forge import Raw, Tensor, Zip, legacy, parts, pickled, storages_of, write
from tests.hostile.checkpoints import zero2
from tests.hostile.pickles import BITES, PROTOCOLS, encoded, hostile


def watched(warm: Path, paths: Iterable[Path]) -> list[dict[str, Any]]:
    """What `watch.py` saw in a process of its own, path by path."""
    given = "\0".join(map(str, [warm, *paths]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.watch"], input=given, capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_inert(seen: list[dict[str, Any]], canary: Path, count: int) -> None:
    """All were opened or refused; the canary and the process are as they were."""
    assert len(seen) == count
    for each in seen:
        assert each["events"] == [], each
        assert each["modules"] == [], each
        assert "\n" not in each["outcome"]
    assert canary.read_bytes() == b"untouched"


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """The file that every hostile pickle is after."""
    return write(tmp_path / "canary", b"untouched")


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """A checkpoint with nothing wrong, read first so that what reading needs is imported."""
    return zero2(tmp_path / "honest")


def test_the_corpus_is_hostile(tmp_path: Path, canary: Path) -> None:
    """Python's own unpickler, given these, does touch the canary: the corpus is what it claims to be."""
    corpus = hostile(str(canary))
    assert len(corpus) >= 100
    load = "import pickle, sys\nfor path in sys.argv[1:2]: pickle.load(open(path, 'rb'))"
    for index, name in enumerate(BITES):
        canary.write_bytes(b"untouched")
        path = write(tmp_path / f"{index}.pkl", encoded(corpus[name], 4))
        subprocess.run([sys.executable, "-S", "-c", load, path], capture_output=True, check=False)
        assert not canary.exists() or canary.read_bytes() != b"untouched", name


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_archives(tmp_path: Path, canary: Path, honest: Path, container: str) -> None:
    """The whole corpus at every protocol, as the root of an archive and inside a model's dict, in both containers."""
    paths = []
    for number, value in enumerate(hostile(str(canary)).values()):
        for protocol in PROTOCOLS:
            evil = encoded(value, protocol)
            inside = pickled({"module": {"w": Tensor("0", (2,)), "x": Raw(bare(evil))}})
            for kind, pickle in (("root", evil), ("inside", inside)):
                path = tmp_path / "files" / f"{number}-{protocol}-{kind}.pt"
                if container == "zip":
                    data = Zip(parts(pickle, {"0": bytes(8)})).write()
                else:
                    data = legacy(Raw(bare(evil))) if kind == "root" else legacy({"w": Raw(bare(evil))})
                paths.append(write(path, data))
    assert_inert(watched(honest, paths), canary, len(paths))


def bare(pickle: bytes) -> bytes:
    """A pickle's opcodes without its header, frame and STOP, to stand inside another."""
    if pickle[:1] == b"\x80":
        pickle = pickle[2:]
    if pickle[:1] == b"\x95":
        pickle = pickle[9:]
    return pickle[:-1]


def test_checkpoints(tmp_path: Path, canary: Path, honest: Path) -> None:
    """The corpus in the places DeepSpeed leaves to users, in whole checkpoints: they open, or are refused, inertly."""
    places = (
        lambda evil: {"model": {"scheduler": evil, "client": {"deep": [evil, (evil,)]}}},
        lambda evil: {"model": {"ds_config": evil, "buffer_names": evil, "shared_params": {"a": evil}}},
        lambda evil: {"model": {"module": {"w": evil}}},
        lambda evil: {"model": {"param_shapes": [{"w": evil}]}},
        lambda evil: {"optim": {"loss_scaler": evil, "zero_stage": evil, "base_optimizer_state": {"state": {0: evil}}}},
        lambda evil: {"optim": {"partition_count": evil, "group_paddings": evil}},
        lambda evil: {"optim": {"single_partition_of_fp32_groups": [evil]}},
    )
    paths = []
    for number, value in enumerate(hostile(str(canary)).values()):
        evil = Raw(bare(encoded(value, 2)))
        paths.append(zero2(tmp_path / "checkpoints" / str(number), **places[number % len(places)](evil)))
    seen = watched(honest, paths)
    assert_inert(seen, canary, len(paths))
    assert sum(each["outcome"] == "opened" for each in seen[::7]) > 10


def test_storages_hold_the_tensors_beside_it(tmp_path: Path, canary: Path, honest: Path) -> None:
    """Honest weights beside a hostile client state are still there."""
    value = {"module": {"w": Tensor("0", (2,))}, "client": Raw(bare(encoded(hostile(str(canary))["os.system"], 2)))}
    path = write(tmp_path / "a.pt", Zip(parts(pickled(value), storages_of(value))).write())
    seen = watched(honest, [path])
    assert_inert(seen, canary, 1)
    assert seen[0]["outcome"] == "dict"
