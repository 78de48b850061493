"""Pictures of results: memory over time, memory and time against model size, throughput beside cp. Needs matplotlib.

python -m benchmarks.plots RESULTS.json
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

_MIB: Final = 1 << 20
_GB: Final = 1_000_000_000
_COLORS: Final = {"lazyzero": "#1668b3", "DeepSpeed": "#c8442c", "cp": "#7a7a7a"}
_BESIDE: Final = ("fp32", "DeepSpeed", "cp")
_DPI: Final = 144

Results = dict[str, Any]


def why_not() -> str | None:
    """Why there are no pictures; None if there are."""
    return None if importlib.util.find_spec("matplotlib") else "matplotlib is not installed"


def draw(results: Results, directory: Path) -> list[Path]:
    """Writes the pictures that `results` has numbers for, as PNG files; returns their paths."""
    pictures = {"memory-over-time": _over_time, "size": _against_size, "throughput": _throughput}
    return [path for name, picture in pictures.items() if (path := picture(results, directory / f"{name}.png"))]


def _name(label: str) -> str:
    return label if label in _COLORS else "lazyzero"


def _new(columns: int = 1, height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(3.2 + 3.8 * columns, height), layout="constrained")
    for axis in axes if columns > 1 else [axes]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e4e4e4", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return path


def _over_time(results: Results, path: Path) -> Path | None:
    """RSS of lazyzero and DeepSpeed over time, on one picture: the largest case that has both."""
    cases = [case for case in results["cases"] if {"fp32", "DeepSpeed"} <= case["runs"].keys()]
    if not cases:
        return None
    case = max(cases, key=lambda case: case["checkpoint"]["fp32_bytes"])
    figure, axis = _new()
    for label in ("DeepSpeed", "fp32"):
        samples = case["runs"][label][0]["samples"]
        megabytes = [rss / _MIB for rss in samples["rss"]]
        axis.plot(samples["seconds"], megabytes, color=_COLORS[_name(label)], linewidth=1.8)
        run, highest = case["runs"][label][0], max(megabytes)
        short = label == "fp32"
        axis.annotate(
            f"{_name(label)}: {run['seconds']:.1f} s, peak {run['peak_rss'] / _MIB:,.0f} MiB",
            (samples["seconds"][-1] if short else samples["seconds"][megabytes.index(highest)], megabytes[-1] if short else highest),
            xytext=(8, 0) if short else (0, 7), textcoords="offset points", va="center" if short else "bottom",
            color=_COLORS[_name(label)], fontsize=9,
        )  # fmt: skip
    axis.axhline(64, color="#9a9a9a", linewidth=0.8, linestyle="--")
    axis.text(axis.get_xlim()[1], 64 * 1.08, "64 MiB", ha="right", va="bottom", fontsize=8, color="#6a6a6a")
    axis.set_yscale("log")
    axis.set_ylim(4, 2.5 * max(case["runs"]["DeepSpeed"][0]["samples"]["rss"]) / _MIB)
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel("resident memory, MiB")
    axis.set_title(f"fp32, {_described(case)}", fontsize=10)
    return _save(figure, path)


def _described(case: dict[str, Any]) -> str:
    checkpoint = case["checkpoint"]
    return f"{checkpoint['fp32_bytes'] / _GB:.1f} GB, ZeRO-{checkpoint['stage']}, {checkpoint['ranks']} ranks, {case['cache']} cache"


def _median(runs: list[dict[str, Any]], *keys: str) -> float:
    return float(statistics.median(sum(run[key] for key in keys) for run in runs))


def _against_size(results: Results, path: Path) -> Path | None:
    """Peak RSS and time until durable against the model's size, ZeRO-3 over 8 ranks, warm cache."""
    points: dict[str, dict[float, tuple[float, float]]] = {}
    for case in results["cases"]:
        checkpoint = case["checkpoint"]
        if case["cache"] != "warm" or checkpoint["stage"] != 3 or checkpoint["ranks"] != 8 or checkpoint["sparse"]:
            continue
        for label in case["runs"].keys() & set(_BESIDE):
            runs = case["runs"][label]
            peak = max(run["peak_rss"] for run in runs) / _MIB
            points.setdefault(label, {})[checkpoint["fp32_bytes"] / _GB] = (
                peak,
                _median(runs, "seconds", "sync_seconds"),
            )
    if len(points.get("fp32", {})) < 2:
        return None
    figure, (memory, seconds) = _new(2)
    for label in _BESIDE:
        rows = sorted(points.get(label, {}).items())
        for axis, place in ((memory, 0), (seconds, 1)):
            if rows and not (label == "cp" and axis is memory):
                axis.plot(
                    [size for size, _ in rows], [row[place] for _, row in rows], "o-",
                    color=_COLORS[_name(label)], label=_name(label), markersize=4,
                )  # fmt: skip
    memory.set_yscale("log")
    memory.set_ylabel("peak resident memory, MiB")
    seconds.set_ylabel("seconds until durable on disk")
    for axis in (memory, seconds):
        axis.set_xlabel("fp32 weights, GB")
        axis.set_xlim(left=0)
    seconds.set_ylim(bottom=0)
    seconds.legend(frameon=False, fontsize=9)
    return _save(figure, path)


def _throughput(results: Results, path: Path) -> Path | None:
    """Weights converted a second until durable, beside cp, for each case that has it or a limit."""
    bars: list[tuple[str, str, float]] = []
    for case in results["cases"]:
        if "cp" not in case["runs"] and not any("64 MiB" in label for label in case["runs"]):
            continue
        for label, runs in case["runs"].items():
            if any(run["exit"] for run in runs):
                continue
            nbytes = case["checkpoint"]["fp32_bytes"]
            bars.append(
                (f"{case['name']}: {label}", _name(label), nbytes / _median(runs, "seconds", "sync_seconds") / _GB)
            )
    if not bars:
        return None
    figure, axis = _new(height=0.8 + 0.27 * len(bars))
    places = range(len(bars), 0, -1)
    axis.barh(list(places), [rate for _, _, rate in bars], color=[_COLORS[name] for _, name, _ in bars], height=0.7)
    for place, (_, _, rate) in zip(places, bars, strict=True):
        axis.text(rate, place, f" {rate:.2f}", va="center", fontsize=8)
    axis.set_yticks(list(places), [text for text, _, _ in bars], fontsize=8)
    axis.grid(visible=False)
    axis.set_xlabel("GB of fp32 weights a second, until durable on disk")
    return _save(figure, path)


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    for drawn in draw(json.loads(chosen.read_text()), chosen.parent):
        print(drawn)
