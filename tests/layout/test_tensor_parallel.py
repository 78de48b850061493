"""Tensor parallelism: shards of any stage below, joined as the metadata or the user's rules say, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from made import DATA, assert_tensors, assert_truth, save, values
from made_parallel import stage0, stage1, stage3

from lazyzero import Checkpoint, open_checkpoint
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout
from lazyzero.selfcheck import check

REAL = ["j_z1_autotp_w4", "j_z3_autotp_uneven_w4"]
MEGATRON = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm\.weight"],
    "parameter_to_average_patterns": [r".*drift\.weight"],
    "parameter_with_row_parallelism_patterns": [r"layers\.\d+\.out\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gated\.weight"],
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "parameter_with_sub_params": [{"patterns": [r".*qkv\.weight"], "shape": ((4, 2, 2), 3), "partition_dim": 0}],
    "original_vocab_size": 9,
}


def _model() -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """A Megatron-like model with every kind of split, whole and in the shards of two ranks."""
    whole = {
        "embed.weight": values(1, 9, 3),
        "layers.0.qkv.weight": values(2, 8, 3),
        "layers.0.gated.weight": values(3, 8, 3),
        "layers.0.out.weight": values(4, 3, 8),
        "layers.0.in.bias": values(5, 6),
        "layers.0.norm.weight": values(6, 3),
    }
    padded = torch.cat([whole["embed.weight"], torch.full((3, 3), 7.0)])
    drift = [values(7, 3), values(8, 3)]
    shards = []
    for rank in range(2):
        qkv = [part.chunk(2)[rank] for part in whole["layers.0.qkv.weight"].split([4, 2, 2])]
        gated = [part.chunk(2)[rank] for part in whole["layers.0.gated.weight"].chunk(2)]
        shards.append(
            {
                "embed.weight": padded.chunk(2)[rank],
                "layers.0.qkv.weight": torch.cat(qkv),
                "layers.0.gated.weight": torch.cat(gated),
                "layers.0.out.weight": whole["layers.0.out.weight"].chunk(2, dim=1)[rank],
                "layers.0.in.bias": whole["layers.0.in.bias"].chunk(2)[rank],
                "layers.0.norm.weight": whole["layers.0.norm.weight"],
                "layers.0.drift.weight": drift[rank],
            }
        )
    whole["layers.0.drift.weight"] = (drift[0] + drift[1]) / 2
    return whole, [{name: tensor.clone() for name, tensor in shard.items()} for shard in shards]


Write = Callable[[Path, Any, Mapping[str, Any] | None], None]
STAGES: dict[str, Write] = {
    "0": stage0,
    "1": lambda path, shards, info: stage1(path, shards, 3, info),
    "3": lambda path, shards, info: stage3(path, shards, 3, info),
}


@pytest.mark.parametrize("case", REAL)
def test_real(case: str) -> None:
    """AutoTP's checkpoints give the truth, by its maps, without warnings, and agree with the copies in `module`."""
    with open_checkpoint(DATA / case / "checkpoint") as checkpoint:
        assert_truth(checkpoint, case)
        assert checkpoint.warnings == ()
        assert "2 tensor-parallel ranks" in checkpoint.layout
        assert check(checkpoint.checks, full=True) == len(checkpoint.checks)
        assert len(checkpoint.checks) == (21 if "z1" in case else 0)


def _rewritten(case: str, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a real case whose model files say something else in `universal_checkpoint_info`."""
    shutil.copytree(DATA / case / "checkpoint", tmp_path / case)
    for path in (tmp_path / case).rglob("*model_states.pt"):
        root = torch.load(path, weights_only=False)
        change(root["universal_checkpoint_info"])
        torch.save(root, path)
    return tmp_path / case


def _without_maps(info: dict[str, Any]) -> None:
    del info["affine_map"]


def _before_0_19_4(info: dict[str, Any]) -> None:
    del info["affine_map"], info["tp_replicated_parameter_patterns"]
    info["universal_checkpoint_version"] = 0.3


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real files name classes of DeepSpeed, which is not installed here: inert stand-ins let torch rewrite them."""
    stand_in = type("ZeroStageEnum", (), {"__init__": lambda self, *args: None})
    for module in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.zero.config"):
        made = type(pytest)(module)
        made.__dict__["ZeroStageEnum"] = stand_in
        monkeypatch.setitem(__import__("sys").modules, module, made)


@pytest.mark.usefixtures("loading")
@pytest.mark.parametrize("case", REAL)
def test_patterns_give_what_maps_do(case: str, tmp_path: Path) -> None:
    """Before 0.19.7 there are no maps: the lists of patterns and widths give the same tensors."""
    with open_checkpoint(_rewritten(case, tmp_path, _without_maps)) as checkpoint:
        assert_truth(checkpoint, case)
        assert checkpoint.warnings == ()


@pytest.mark.usefixtures("loading")
@pytest.mark.parametrize("case", REAL)
def test_what_autotp_left_whole_without_saying_so(case: str, tmp_path: Path) -> None:
    """Before 0.19.4 parameters that AutoTP did not split are in no list: that all ranks have them alike shows it."""
    with open_checkpoint(_rewritten(case, tmp_path, _before_0_19_4)) as checkpoint:
        assert_truth(checkpoint, case)
        assert "did not record" in checkpoint.warnings[0]


@pytest.mark.parametrize("stage", STAGES)
def test_every_kind_of_split(stage: str, tmp_path: Path) -> None:
    """Replicated, averaged, rows, columns, halves, sub-parameters and a padded vocabulary, over stages 0, 1 and 3."""
    whole, shards = _model()
    STAGES[stage](tmp_path, shards, MEGATRON)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, whole)
        assert checkpoint.world_size == (2 if stage == "0" else 6)
        assert checkpoint.warnings == ()
        # Means of fp32 do not round to means of 16-bit copies, so an averaged parameter has nothing to compare with.
        assert len(checkpoint.checks) == (len(whole) - 1 if stage == "1" else 0)
        assert check(checkpoint.checks, full=True) == len(checkpoint.checks)


@pytest.mark.parametrize("stage", STAGES)
def test_rules_of_the_user(stage: str, tmp_path: Path) -> None:
    """Without metadata, rules join what is split along one dimension."""
    whole, shards = _model()
    kept = ["layers.0.out.weight", "layers.0.in.bias", "layers.0.norm.weight"]
    STAGES[stage](tmp_path / "tag", [{name: shard[name] for name in kept} for shard in shards], None)
    (tmp_path / "rules").write_text("out 1\nnorm replicated\nbias 0\n")
    with open_checkpoint(tmp_path / "tag", tp_rules=tmp_path / "rules") as checkpoint:
        assert_tensors(checkpoint, {name: whole[name] for name in kept})


def test_rules_go_before_the_metadata(tmp_path: Path) -> None:
    """A rule replaces what the checkpoint says of the parameters it is about, and of no other."""
    whole, shards = _model()
    stage0(tmp_path / "tag", shards, {**MEGATRON, "parameter_with_row_parallelism_patterns": []})
    (tmp_path / "rules").write_text("out 1\n")
    with open_checkpoint(tmp_path / "tag", tp_rules=tmp_path / "rules") as checkpoint:
        assert_tensors(checkpoint, whole)


def _refused(path: Path, kind: type[Exception], *said: str, **opening: Any) -> None:
    with pytest.raises(kind) as caught:
        open_checkpoint(path, **opening)
    for part in (*said, str(path)):
        assert part in str(caught.value)


def test_without_metadata_it_is_refused(tmp_path: Path) -> None:
    """The refusal says what is missing, of which parameters, and the way out; so it does where rules leave some out."""
    _, shards = _model()
    stage0(tmp_path / "tag", shards, None)
    _refused(tmp_path / "tag", UnsupportedLayout, "universal_checkpoint_info", "'embed.weight'", "3 more", "--tp-rules")
    (tmp_path / "rules").write_text("weight 0\n")
    _refused(tmp_path / "tag", UnsupportedLayout, "no rule matches", "'layers.0.in.bias'", tp_rules=tmp_path / "rules")


def test_a_rule_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Shards that differ in another dimension than the rule's are an error with the rule in it."""
    stage0(tmp_path / "tag", [{"w": values(1, 2, 3)}, {"w": values(2, 3, 3)}], None)
    (tmp_path / "rules").write_text("w 1\n")
    _refused(tmp_path / "tag", InconsistentCheckpoint, "'w'", "`w 1`", "[2, 3]", tp_rules=tmp_path / "rules")


def test_what_deepspeed_marks_as_impossible_is_refused(tmp_path: Path) -> None:
    """AutoTP records layouts that it cannot describe, with the reason."""
    info = {"autotp_unsupported_parameter_patterns": {r"^w$": "an interleaved layout"}}
    stage0(tmp_path, [{"w": values(1, 2)}, {"w": values(2, 2)}], info)
    _refused(tmp_path, UnsupportedLayout, "'w'", "an interleaved layout", "--tp-rules")


@pytest.mark.parametrize("pattern", ["(a+)+$", "a*" * 9, "a(", 7])
def test_patterns_that_could_run_forever_are_refused(tmp_path: Path, pattern: object) -> None:
    """Patterns come from a file nobody vouches for: what is no simple pattern is never run."""
    stage0(
        tmp_path, [{"a" * 60: values(1, 2)}, {"a" * 60: values(2, 2)}], {"tp_replicated_parameter_patterns": [pattern]}
    )
    _refused(tmp_path, UnsupportedLayout, "simple pattern", "--tp-rules")


def test_a_vocabulary_without_its_size_is_refused(tmp_path: Path) -> None:
    """Nothing else tells rows from padding."""
    stage0(tmp_path, [{"w": values(1, 2, 2)}] * 2, {"vocabulary_parameter_patterns": ["w"]})
    _refused(tmp_path, InconsistentCheckpoint, "original_vocab_size")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """A rank whose files are not there is named; one rank's files alone never pass for the model."""
    _, shards = _model()
    stage1(tmp_path, [*shards, shards[0]], 1, MEGATRON)
    for path in tmp_path.glob("*mp_rank_01*"):
        path.unlink()
    _refused(tmp_path, MissingFiles, "have 0, 2", "need 0-2")
    for path in tmp_path.glob("*mp_rank_02*"):
        path.unlink()
    _refused(tmp_path, MissingFiles, "saved by 3 model-parallel ranks")


def test_files_of_a_larger_world_are_set_aside(tmp_path: Path) -> None:
    """What an earlier run with more ranks left is not part of this one."""
    whole, shards = _model()
    stage1(tmp_path, [*shards, shards[0]], 1, MEGATRON)
    stage1(tmp_path, shards, 1, MEGATRON)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, whole)
        assert "set aside the files of model-parallel ranks 2" in checkpoint.warnings[0]


def test_copies_that_differ_are_told(tmp_path: Path) -> None:
    """Where replicated parameters have drifted apart the first rank's are taken, and a warning says so."""
    stage0(tmp_path, [{"norm.weight": values(1, 4)}, {"norm.weight": values(2, 4)}], MEGATRON)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, {"norm.weight": values(1, 4)})
        assert "'norm.weight' first" in checkpoint.warnings[0]


def test_ties_and_buffers(tmp_path: Path) -> None:
    """A tied name follows its owner; a buffer is rank 0's, whatever patterns say of parameters."""
    shards = []
    for rank in range(2):
        head = values(rank, 3, 2)
        shards.append({"embed": head, "head": head, "rotary": values(9, 4)})
    stage0(
        tmp_path,
        shards,
        {"vocabulary_parameter_patterns": ["embed"], "original_vocab_size": 5},
        buffer_names=["rotary"],
    )
    with open_checkpoint(tmp_path) as checkpoint:
        embed = torch.cat([values(0, 3, 2), values(1, 3, 2)])[:5]
        assert_tensors(checkpoint, {"embed": embed, "head": embed, "rotary": values(9, 4)})
        assert checkpoint.tied == {"head": "embed"}


def test_a_parameter_on_one_rank_only(tmp_path: Path) -> None:
    """Ranks that disagree on what there is are of different models."""
    stage0(tmp_path, [{"a": values(1, 2)}, {"b": values(1, 2)}], {})
    _refused(tmp_path, InconsistentCheckpoint, "'a'", "none")


def test_sequence_parallel_ranks_are_one_model(tmp_path: Path) -> None:
    """Sequence parallelism numbers its ranks as model-parallel ones, but partitions over all of them."""
    tensors = {"w": values(1, 5, 3), "b": values(2, 7)}
    stage3(tmp_path, [tensors], 4)
    for rank in (1, 3):
        for path in tmp_path.glob(f"zero_pp_rank_{rank}_*"):
            path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, tensors)
        assert "sequence-parallel" in checkpoint.warnings[-1]


def test_a_master_known_on_one_rank_only(tmp_path: Path) -> None:
    """At stage 0 masters are named by their values; where that fails on one rank, all ranks' 16-bit values are used."""
    first = {"a": values(1, 4), "b": values(2, 4)}
    second = {"a": values(3, 4), "b": values(3, 4)}  # alike: no master is theirs alone
    for rank, masters in enumerate((first, second)):
        root = {
            "module": {name: tensor.bfloat16() for name, tensor in masters.items()}, "buffer_names": [],
            "mp_world_size": 2, "universal_checkpoint_info": {}, "optimizer": {"fp32_groups": [list(masters.values())]},
        }  # fmt: skip
        save(root, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    with open_checkpoint(tmp_path) as checkpoint:
        assert_tensors(checkpoint, {name: torch.cat([first[name], second[name]]).bfloat16() for name in ("a", "b")})
        assert any("on some tensor-parallel ranks only" in warning for warning in checkpoint.warnings)


def test_moments() -> None:
    """The optimizer's moments are joined as the weights are."""
    checkpoint = open_checkpoint(DATA / "j_z1_autotp_w4" / "checkpoint", state="exp_avg")
    weights = open_checkpoint(DATA / "j_z1_autotp_w4" / "checkpoint")
    assert _shapes(checkpoint) == _shapes(weights)
    assert any(not torch.equal(checkpoint[name].torch(), weights[name].torch()) for name in weights)


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in checkpoint.items()}


def test_shards_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    """Ranks that saved one parameter in two dtypes are of different runs."""
    stage0(tmp_path, [{"w": values(1, 2)}, {"w": values(2, 2).double()}], {})
    _refused(tmp_path, InconsistentCheckpoint, "'w'", "float64")
