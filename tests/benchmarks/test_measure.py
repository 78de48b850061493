"""The benchmarks measure what they say, and notice wrong values."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import report
from benchmarks.bounds import MIB, Bound, judge
from benchmarks.cases import CASES, SOURCES
from benchmarks.check import WrongOutput, check_notes, check_output
from benchmarks.generate import generate
from benchmarks.limits import memory_group, why_no_groups
from benchmarks.measure import Run, in_turn, measure
from benchmarks.models import llama, with_lora
from benchmarks.run import Outcome
from benchmarks.spec import Spec
from benchmarks.tools import REPOSITORY, Tools

ALLOCATE = "import sys; held = bytearray(int(sys.argv[1]) << 20)"
SPEC = Spec(with_lora(llama("tiny"), rank=3), 3, 3)


def python(label: str, *arguments: str) -> Run:
    """A small process, measured."""
    return measure(label, [sys.executable, "-S", "-c", *arguments], sync=False)


def test_peak_memory_is_the_childs_own() -> None:
    """The peak is that of the process, not of the far larger one that started it."""
    ballast = np.ones(300 << 17)  # 300 MiB
    small, large = python("small", ALLOCATE, "1"), python("large", ALLOCATE, "101")
    assert ballast.nbytes == 300 * MIB
    assert small.peak_rss < 60 * MIB
    assert 98 * MIB < large.peak_rss - small.peak_rss < 104 * MIB


def test_children_of_the_process_count() -> None:
    """A process that a measured one started counts too, and a failure is told, not raised."""
    nested = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-S', '-c', 'x = bytearray(200 << 20); raise SystemExit(3)']).returncode)"
    run = python("nested", nested)
    assert run.exit == 3
    assert run.peak_rss > 200 * MIB


def test_bytes_and_output_are_kept(tmp_path: Path) -> None:
    """Bytes read and written by the process are counted, its first megabyte is timed, its output is kept."""
    (tmp_path / "in").write_bytes(bytes(5 * MIB))
    copy = "import sys, time; d = open(sys.argv[1], 'rb').read(); open(sys.argv[2], 'wb').write(d); print('done'); time.sleep(0.3)"
    run = python("copy", copy, str(tmp_path / "in"), str(tmp_path / "out"))
    assert 5 * MIB <= run.read_calls_bytes < 7 * MIB
    assert 5 * MIB <= run.written_bytes < 6 * MIB
    assert run.first_write is not None
    assert run.first_write <= run.seconds
    assert run.samples
    assert run.output == "done\n"


def test_in_turn() -> None:
    """Runs take turns: A B A B."""
    order: list[str] = []

    def noted(label: str) -> Run:
        order.append(label)
        return python(label, "pass")

    found = in_turn([lambda: noted("a"), lambda: noted("b")], 2)
    assert order == ["a", "b", "a", "b"]
    assert [[run.label for run in runs] for runs in found] == [["a", "a"], ["b", "b"]]


@pytest.mark.skipif(why_no_groups() is not None, reason=why_no_groups() or "")
def test_a_memory_cgroup_holds_the_child() -> None:
    """A process in the group cannot have more than the limit; one that needs less is not harmed; the group is removed."""
    with memory_group(64 * MIB) as group:
        fits = measure("fits", [sys.executable, "-S", "-c", ALLOCATE, "20"], group=group, sync=False)
        path = group.path
        assert fits.exit == 0
        assert fits.group is not None
        assert 20 * MIB < fits.group["peak"] <= 64 * MIB
        assert measure("not", [sys.executable, "-S", "-c", ALLOCATE, "200"], group=group, sync=False).exit != 0
    assert not path.exists()


def convert(checkpoint: Path, output: Path, *options: str) -> None:
    """Runs the command line."""
    command = [sys.executable, "-m", "lazyzero", "convert", str(checkpoint), str(output), "--quiet", *options]
    subprocess.run(command, check=True, cwd=REPOSITORY)


@pytest.mark.parametrize(
    "options", [["--dtype", "fp32"], ["--dtype", "bf16"], ["--dtype", "fp16"], ["--dtype", "keep"]]
)
def test_right_values_pass_and_wrong_ones_do_not(options: list[str], tmp_path: Path) -> None:
    """A conversion passes in every dtype, one element changed by one bit does not, nor does a missing tensor."""
    dtype = options[1]
    convert(generate(tmp_path / "checkpoint", SPEC), tmp_path / "out", *options)
    assert check_output(tmp_path / "out", SPEC, dtype, full=True) == SPEC.model.numel
    assert check_output(tmp_path / "out", SPEC, dtype, full=False) > 0
    path = tmp_path / "out" / "model.safetensors"
    good = path.read_bytes()
    name = SPEC.model.parameters[1].name
    begin = 8 + int.from_bytes(good[:8], "little")
    place = begin + json.loads(good[8:begin])[name]["data_offsets"][0]
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    with pytest.raises(WrongOutput, match=name):
        check_output(tmp_path / "out", SPEC, dtype, full=False)
    path.write_bytes(good.replace(name.encode(), b"x" * len(name), 1))
    with pytest.raises(WrongOutput, match="names are missing"):
        check_output(tmp_path / "out", SPEC, dtype, full=False)


def test_bin_files_are_checked_too(tmp_path: Path) -> None:
    """A .bin output is read by torch and compared."""
    pytest.importorskip("torch")
    convert(generate(tmp_path / "checkpoint", SPEC), tmp_path / "out", "--format", "bin", "--dtype", "bf16")
    assert check_output(tmp_path / "out", SPEC, "bf16", full=True) == SPEC.model.numel


def test_consumed_shards_are_checked_by_what_was_noted(tmp_path: Path) -> None:
    """Shards handed to the consumer are gone afterwards; its notes show every tensor, and a wrong or missing one."""
    source, out, notes = generate(tmp_path / "checkpoint", SPEC), tmp_path / "out", tmp_path / "notes"
    options = ("--dtype", "bf16", "--max-shard-size", "20KB", "--on-shard", "TAKE")
    command = Tools().command("lazyzero convert", options, source, out, notes)
    subprocess.run(command, check=True, cwd=REPOSITORY)
    assert not list(out.glob("*.safetensors"))
    assert check_notes(notes, SPEC, "bf16") > 0
    lines = notes.read_text().splitlines()
    notes.write_text("\n".join(lines[:-1]))
    with pytest.raises(WrongOutput, match="never written"):
        check_notes(notes, SPEC, "bf16")
    row = json.loads(lines[0])
    row["places"][0][1] = "ff" + row["places"][0][1][2:]
    notes.write_text("\n".join([json.dumps(row), *lines[1:]]))
    with pytest.raises(WrongOutput, match=row["name"]):
        check_notes(notes, SPEC, "bf16")


def a_run(label: str, seconds: float, peak: int, code: int = 0) -> Run:
    """A run made up."""
    return Run(label, ["x"], code, seconds, 0.5, peak, peak, 0, 0, 0, 0, 0, None, None, [], "")


def test_bounds() -> None:
    """Bounds are judged alone, as a ratio of medians, and as a difference; what is missing or failed is told."""
    runs = {
        "a": [a_run("a", seconds, 50 * MIB) for seconds in (1.0, 1.5, 9.0)],
        "b": [a_run("b", 3.5, 100 * MIB)],
        "failed": [a_run("failed", 1, 1, 137)],
    }
    kept = [
        (Bound("p", "a", "peak RSS", 64 * MIB), True),
        (Bound("p", "b", "peak RSS", 64 * MIB), False),
        (Bound("p", "a", "durable time", 0.5, "times", "b"), True),
        (Bound("p", "a", "durable time", 0.49, "times", "b"), False),
        (Bound("p", "b", "peak RSS", 50 * MIB, "over", "a"), True),
        (Bound("p", "b", "peak RSS", 49 * MIB, "over", "a"), False),
        (Bound("p", "failed", "peak RSS", 64 * MIB), False),
        (Bound("p", "absent", "peak RSS", 64 * MIB), None),
    ]
    for bound, expected in kept:
        assert judge(bound, runs, {}).kept is expected, bound
    assert "no root" in judge(Bound("p", "absent", "time", 1), runs, {"absent": "no root"}).found


def test_the_table_of_cases_is_whole() -> None:
    """Every bound speaks of entrants of its case, every checkpoint is used, and names are not used twice."""
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.source for case in CASES} == set(SOURCES)
    for case in CASES:
        labels = [entrant.label for entrant in case.entrants]
        assert len(set(labels)) == len(labels)
        assert {label for bound in case.bounds for label in bound.labels} <= set(labels)


def test_reports_do_not_tell_whose_machine_it_was(tmp_path: Path) -> None:
    """Paths of the scratch directory, of Python and of the project are replaced; broken promises are counted."""
    tools = Tools(deepspeed=str(tmp_path / "venv" / "python"))
    case = dataclasses.replace(CASES[0], bounds=CASES[0].bounds[-3:])
    command = [tools.python, "-m", "lazyzero", "convert", str(tmp_path / "scratch" / "checkpoint"), str(REPOSITORY)]
    run = dataclasses.replace(a_run("fp32", 1, 100 * MIB), command=command)
    outcome = Outcome(case, runs={"fp32": [run]}, skipped={"bf16": "why not"})
    results = report.as_dict([outcome], report.machine(tmp_path), tools, tmp_path / "scratch")
    text = json.dumps(results) + report.markdown(results)
    assert not any(path in text for path in (str(tmp_path), sys.executable, str(REPOSITORY)))
    assert "SCRATCH/checkpoint" in text
    assert "why not" in text
    assert report.broken(results) == 1


def test_disk_is_given_back(tmp_path: Path) -> None:
    """An interrupted run leaves nothing in the scratch directory."""
    if shutil.disk_usage(tmp_path).free < 10_000_000_000:
        pytest.skip("needs 10 GB of free disk")
    command = [
        sys.executable,
        "-u",
        "-m",
        "benchmarks",
        "small",
        "--only",
        "10,000",
        "--dir",
        str(tmp_path / "scratch"),
    ]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "10,000" in process.stdout.readline()  # the checkpoint is being made
    process.terminate()
    assert process.wait(timeout=60) == 130
    process.stdout.close()
    assert not list((tmp_path / "scratch").iterdir())
