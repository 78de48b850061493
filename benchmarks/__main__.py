"""python -m benchmarks small|large|70b|all: measures, checks, judges, and writes JSON, a Markdown table and pictures."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks import plots, report
from benchmarks.cases import CASES, GROUPS, Case
from benchmarks.run import Bench, Outcome
from benchmarks.tools import Tools


def main() -> int:
    """The command line: 0 when every promise that could be measured was kept, 1 otherwise."""
    args = _parse()
    cases = [case for case in CASES if case.group in GROUPS[args.set] and _chosen(case, args.only)]
    if args.list:
        for case in cases:
            print(f"{case.name}: {', '.join(entrant.label for entrant in case.entrants)}")
        return 0
    signal.signal(signal.SIGTERM, _stop)
    scratch: Path = args.dir / f"lazyzero-benchmark-{os.getpid()}"
    scratch.mkdir(parents=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tools = Tools(deepspeed=args.deepspeed)
    facts = report.machine(scratch)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    try:
        for outcome in Bench(scratch, tools, args.repeats, _say).run(cases):
            outcomes.append(outcome)
            results = report.as_dict(outcomes, facts, tools, scratch)
            (args.out / f"{args.set}.json").write_text(json.dumps(results) + "\n")
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    (args.out / f"{args.set}.md").write_text(report.markdown(results))
    _draw(results, args.out / args.set)
    count = report.broken(results)
    _say(f"{time.monotonic() - began:.0f} s; {count} promises broken; see {args.out / args.set}.md")
    return 1 if count else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Memory and time beside DeepSpeed and cp."
    )
    parser.add_argument(
        "set", choices=GROUPS, help="small: 10 minutes, 10 GB of disk; 70b: 70B models; large: and 405B"
    )
    parser.add_argument("--dir", type=Path, default=Path("build/benchmarks"), help="for scratch files, on a local disk")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/results"), help="for the results")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="the Python of an environment with DeepSpeed 0.19.8")
    parser.add_argument("--repeats", type=int, help="another number of runs each")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with one of these in their name")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    return parser.parse_args()


def _chosen(case: Case, words: list[str]) -> bool:
    return not words or any(word in case.name for word in words)


def _draw(results: plots.Results, directory: Path) -> None:
    if reason := plots.why_not():
        _say(f"no pictures: {reason}")
        return
    directory.mkdir(exist_ok=True)
    drawn = plots.draw(results, directory)
    for path in drawn:
        _say(f"drew {path}")
    if not drawn:
        directory.rmdir()


def _say(text: str) -> None:
    print(text, flush=True)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
