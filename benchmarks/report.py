"""What was found, as plain values for JSON, and as a Markdown table. Nothing in it tells whose machine it was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lazyzero
from benchmarks.bounds import GB, MIB
from benchmarks.cases import SOURCES
from benchmarks.measure import Run, Sample
from benchmarks.run import Outcome
from benchmarks.spec import Spec
from benchmarks.tools import REPOSITORY, Tools

_MARKS = {True: "yes", False: "**no**", None: "-"}


def machine(scratch: Path) -> dict[str, Any]:
    """What the numbers depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = subprocess.run(["stat", "-f", "-c", "%T", str(scratch)], capture_output=True, text=True, check=False)
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / GB),
        "file_system": found.stdout.strip(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "lazyzero": lazyzero.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def as_dict(outcomes: Iterable[Outcome], facts: dict[str, Any], tools: Tools, scratch: Path) -> dict[str, Any]:
    """Everything, for JSON. Of each label's runs the first keeps its samples."""
    return {"machine": facts, "cases": [_case(outcome, tools, scratch) for outcome in outcomes]}


def _case(outcome: Outcome, tools: Tools, scratch: Path) -> dict[str, Any]:
    case, spec = outcome.case, SOURCES[outcome.case.source]
    return {
        "name": case.name,
        "checkpoint": _source(spec),
        "cache": case.cache,
        "scratch_bytes": outcome.scratch,
        "skipped": outcome.skipped,
        "runs": {
            label: [_run(run, tools, scratch, samples=place == 0) for place, run in enumerate(runs)]
            for label, runs in outcome.runs.items()
        },
        "verdicts": [
            {"promise": v.promise, "bound": v.bound, "found": v.found, "kept": v.kept} for v in outcome.verdicts
        ],
    }


def _source(spec: Spec) -> dict[str, Any]:
    return {
        "model": spec.model.name,
        "parameters": spec.model.numel,
        "fp32_bytes": 4 * spec.model.numel,
        "stage": spec.stage,
        "ranks": spec.world,
        "sparse": spec.sparse,
    }


def _run(run: Run, tools: Tools, scratch: Path, *, samples: bool) -> dict[str, Any]:
    rows = run.as_dict()
    rows["command"] = [_anonymous(word, tools, scratch) for word in run.command]
    rows["samples"] = _columns(run.samples) if samples else None
    rows["output"] = _anonymous(run.output, tools, scratch) if run.exit else ""
    return rows


def _anonymous(text: str, tools: Tools, scratch: Path) -> str:
    known = [(str(scratch), "SCRATCH"), (tools.python, "python"), (tools.deepspeed, "python"), (str(REPOSITORY), ".")]
    for path, name in known:
        text = text.replace(path, name) if path else text
    return text


def _columns(samples: Sequence[Sample]) -> dict[str, list[float]]:
    return {
        "seconds": [round(sample.seconds, 3) for sample in samples],
        "rss": [sample.rss for sample in samples],
        "anonymous": [sample.anonymous for sample in samples],
        "file": [sample.file for sample in samples],
        "cache": [sample.cache for sample in samples],
        "dirty": [sample.dirty for sample in samples],
        "charged": [sample.charged for sample in samples],
    }


def markdown(results: dict[str, Any]) -> str:
    """The promises and what became of them, then every run."""
    facts = results["machine"]
    lines = [
        f"Measured on {facts['cores']} cores ({facts['processor']}), {facts['memory_gb']} GB of memory, "
        f"{facts['file_system']}, Linux {facts['kernel']}, Python {facts['python']}, numpy {facts['numpy']}, "
        f"lazyzero {facts['lazyzero']}.",
        "",
        "| promise | case | bound | found | kept |",
        "|---|---|---|---|---|",
    ]
    for case in results["cases"]:
        for verdict in case["verdicts"]:
            cells = (verdict["promise"], case["name"], verdict["bound"], verdict["found"], _MARKS[verdict["kept"]])
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| case | what | runs | time | and sync | peak RSS | read | written |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in results["cases"]:
        for label, runs in case["runs"].items():
            lines.append(f"| {case['name']} | {label} | {_row(runs)} |")
        lines += [f"| {case['name']} | {label or 'all'} | {reason} ||||||" for label, reason in case["skipped"].items()]
    return "\n".join(lines) + "\n"


def _row(runs: list[dict[str, Any]]) -> str:
    def median(key: str) -> float:
        return float(statistics.median(run[key] for run in runs))

    times = sorted(run["seconds"] for run in runs)
    read = max(max(run["read_calls_bytes"], run["read_disk_bytes"]) for run in runs)
    cells = (
        str(len(runs)),
        f"{median('seconds'):.2f} s ({times[0]:.2f}-{times[-1]:.2f})" if len(runs) > 1 else f"{times[0]:.2f} s",
        f"{median('sync_seconds'):.2f} s",
        f"{max(run['peak_rss'] for run in runs) / MIB:.1f} MiB",
        f"{read / GB:.2f} GB",
        f"{median('written_bytes') / GB:.2f} GB",
    )
    return " | ".join(cells)


def broken(results: dict[str, Any]) -> int:
    """How many promises were not kept."""
    return sum(verdict["kept"] is False for case in results["cases"] for verdict in case["verdicts"])
