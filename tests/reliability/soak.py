"""Many kills: `python -m tests.reliability.soak --kills 200`. Takes some minutes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.reliability import kills

CASE = Path(__file__).parents[1] / "data" / "b_z3_tied_triple" / "checkpoint"


def main() -> None:
    """Kills conversions of every kind at random moments, and says how many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--megabytes", type=int, default=48, help="of the checkpoint")
    parser.add_argument("--forked", action="store_true", help="do not start an interpreter for each run")
    parser.add_argument("--only-random", action="store_true", help="leave out the kills at every call to the system")
    args = parser.parse_args()
    sys.stdout.write(f"{args.kills} kills, seed {args.seed}\n")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = kills.make_checkpoint(Path(directory) / "checkpoint", args.megabytes)
        kinds = len(kills.KINDS)
        each = [(args.kills + number) // kinds for number in range(kinds)]
        runs = kills.run(checkpoint, Path(directory), each, args.seed, forked=args.forked)
    sys.stdout.write(f"{runs} runs, {args.kills} of them killed: whole at every kill, the same bytes in the end\n")
    for mode in ("plain", "taken", "overwrite", "merge") if not args.only_random else ():
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "tests.reliability.crash", str(CASE), directory, mode, "1"]
            run = subprocess.run([*command, '{"max_shard_size": "8KB"}'], check=True, stdout=subprocess.PIPE, text=True)
        sys.stdout.write(f"{mode}: {run.stdout.strip()} kills, before and after every call to the system\n")


if __name__ == "__main__":
    main()
