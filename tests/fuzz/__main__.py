"""python -m tests.fuzz --seconds N [--seed S] [--target T] [--engine own|atheris]

Fuzzes every target for an equal part of the time. With atheris, where it is installed, the inputs are led by coverage;
our own engine needs nothing and repeats itself for a given seed. A finding is written to fuzz-findings/ and exits 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
from pathlib import Path

from tests.fuzz import guided
from tests.fuzz.engine import fuzz
from tests.fuzz.targets import TARGETS

FINDINGS = Path("fuzz-findings")


def main() -> int:
    """Runs what the command line says; the number of findings decides the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--engine", choices=("own", "atheris"), default=None)
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    engine = options.engine or ("atheris" if importlib.util.find_spec("atheris") else "own")
    found = 0
    for target in targets:
        if engine == "atheris":
            found += guided.fuzz(target, options.seconds / len(targets), options.seed, FINDINGS)
            continue
        report = fuzz(target, options.seconds / len(targets), options.seed)
        sys.stdout.write(f"{report}\n")
        sys.stdout.flush()
        for data, what in report.findings:
            FINDINGS.mkdir(exist_ok=True)
            path = FINDINGS / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            sys.stdout.write(f"  {path}: {what}\n")
        found += len(report.findings)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
