"""The README's table of what was measured, made of the committed results. `python -m benchmarks.summary` writes it anew."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.bounds import GB, MIB
from benchmarks.tools import REPOSITORY

RESULTS: Final = REPOSITORY / "benchmarks" / "results"
README: Final = REPOSITORY / "README.md"
_MARKED: Final = re.compile(r"(<!-- measured -->\n).*?(<!-- end of measured -->)", re.DOTALL)

# What is shown of which case: a row's title, the case, the entrant, and the entrants beside it.
ROWS: Final[tuple[tuple[str, str, str, tuple[str, ...]], ...]] = (
    ("fp32", "ZeRO-3, warm cache", "fp32", ("cp",)),
    ("fp32, cold cache", "ZeRO-3, cold cache", "fp32", ("cp",)),
    ("fp32", "ZeRO-3, dtypes and DeepSpeed", "fp32", ("DeepSpeed",)),
    ("bf16", "ZeRO-3, dtypes and DeepSpeed", "bf16", ()),
    ("fp16", "ZeRO-3, dtypes and DeepSpeed", "fp16", ()),
    ("fp32 in a memory cgroup of 64 MiB, cold cache", "ZeRO-3 in 64 MiB, cold cache", "fp32 in 64 MiB", ("fp32",)),
    ("fp32", "ZeRO-2, warm cache", "fp32", ("cp", "DeepSpeed")),
    ("`.bin`", ".bin", ".bin", ("import torch",)),
    ("fp32, shards taken away", "z3 70B", "fp32", ()),
    ("bf16, shards taken away", "z3 70B", "bf16", ()),
    ("bf16, shards taken away", "z2 70B", "bf16", ()),
    ("as stored, shards taken away", "LoRA, 70B frozen", "keep", ()),
    ("`inspect`", "405B", "inspect", ()),
)
_BESIDE: Final = {
    "cp": "`cp` and `sync`",
    "DeepSpeed": "DeepSpeed",
    "fp32": "without it",
    "import torch": "`import torch`",
}


def load() -> dict[str, dict[str, Any]]:
    """The cases of the committed results, by name."""
    files = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("small", "large")]
    return {case["name"]: case for results in files for case in results["cases"]}


def table(cases: dict[str, dict[str, Any]]) -> str:
    """The Markdown table, medians of times until durable and highest peaks, and what was not kept."""
    lines = ["| checkpoint | to | time | beside | peak RSS |", "|---|---|---|---|---|"]
    for title, name, label, others in ROWS:
        runs = cases[name]["runs"]
        beside = "; ".join(f"{_BESIDE[other]}: {_time(runs[other])}, {_peak(runs[other])}" for other in others)
        cells = (_checkpoint(cases[name]["checkpoint"]), title, _time(runs[label]), beside, _peak(runs[label]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_kept(cases)]) + "\n"


def _kept(cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """How many of the promises were kept, and each that was not."""
    verdicts = [(name, verdict) for name, case in cases.items() for verdict in case["verdicts"]]
    broken = [(name, verdict) for name, verdict in verdicts if verdict["kept"] is False]
    judged = sum(verdict["kept"] is not None for _, verdict in verdicts)
    yield f"Of {judged} promises {judged - len(broken)} were kept in these runs{'; not these:' if broken else '.'}"
    if broken:
        yield ""
    for name, verdict in broken:
        yield f"* {name}: {verdict['bound']}: {verdict['found']}"


def with_table(text: str) -> str:
    """The page with the table between its marks."""
    return _MARKED.sub(lambda match: match[1] + table(load()) + match[2], text)


def _checkpoint(about: dict[str, Any]) -> str:
    size = about["fp32_bytes"] / GB
    return f"{about['model']}, {size:.{0 if size >= 10 else 1}f} GB, ZeRO-{about['stage']}, {about['ranks']} ranks"


def _time(runs: list[dict[str, Any]]) -> str:
    seconds = statistics.median(run["seconds"] + run["sync_seconds"] for run in runs)
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.1f} s"


def _peak(runs: list[dict[str, Any]]) -> str:
    return f"{max(run['peak_rss'] for run in runs) / MIB:,.0f} MiB"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
