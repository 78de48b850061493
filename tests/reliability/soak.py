"""Many kills: `python -m tests.reliability.soak --kills 200`. Takes some minutes."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.reliability import kills


def main() -> None:
    """Kills conversions of every kind at random moments, and says how many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--megabytes", type=int, default=48, help="of the checkpoint")
    parser.add_argument("--forked", action="store_true", help="do not start an interpreter for each run")
    args = parser.parse_args()
    sys.stdout.write(f"{args.kills} kills, seed {args.seed}\n")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = kills.make_checkpoint(Path(directory) / "checkpoint", args.megabytes)
        kinds = len(kills.KINDS)
        each = [(args.kills + number) // kinds for number in range(kinds)]
        runs = kills.run(checkpoint, Path(directory), each, args.seed, forked=args.forked)
    sys.stdout.write(f"{runs} runs, {args.kills} of them killed: whole at every kill, the same bytes in the end\n")


if __name__ == "__main__":
    main()
