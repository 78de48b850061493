"""Writes checkpoints of any size in DeepSpeed 0.19.8's exact form (bf16 training, fp32 masters), without torch or DeepSpeed.

python -m benchmarks.generate DIRECTORY --model 1B --stage 3 --world 8

The Adam states are holes unless asked for: they have their full size, and take no space.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from benchmarks.models import PRESETS, llama, with_lora
from benchmarks.spec import Spec
from benchmarks.zero3 import Stage3
from benchmarks.zero12 import Stage12

TAG: Final = "global_step100"


def generate(root: Path, spec: Spec) -> Path:
    """Writes the checkpoint below `root` and returns `root`."""
    directory = root / TAG
    directory.mkdir(parents=True)
    writer = Stage3(spec, directory) if spec.stage == 3 else Stage12(spec, directory)
    writer.write()
    (root / "latest").write_text(TAG)
    return root


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=PRESETS, default="1B")
    parser.add_argument("--layers", type=int, help="another number of layers than the model has")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--world", type=int, default=8, metavar="RANKS")
    parser.add_argument("--sparse", action="store_true", help="leave holes in the weights too, but for a few places")
    parser.add_argument("--adam", action="store_true", help="write the Adam states in full")
    parser.add_argument("--lora", action="store_true", help="freeze the model and add adapters")
    args = parser.parse_args()
    model = llama(args.model, layers=args.layers)
    spec = Spec(with_lora(model) if args.lora else model, args.stage, args.world, args.sparse, args.adam)
    print(generate(args.directory, spec))


if __name__ == "__main__":
    main()
