"""The command line's words: what can be given, and how `--help` explains it."""

from __future__ import annotations

import argparse
from typing import Any

import lazyzero
from lazyzero.export.options import DEFAULT_SHARD

EXAMPLES = """\
examples:
  lazyzero inspect checkpoint-500                  what is in it, what a conversion would give
  lazyzero convert checkpoint-500 out              fp32 safetensors in shards of 5GB, with an index
  lazyzero convert checkpoint-500 out --dtype bf16 --max-shard-size 2GB
  lazyzero convert checkpoint-500 - > model.safetensors
  lazyzero verify checkpoint-500 out               compare every element again
An interrupted conversion goes on when the same command is given again.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="lazyzero",
        description="Turns DeepSpeed ZeRO checkpoints into plain weights, in constant memory, without DeepSpeed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lazyzero {lazyzero.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _inspect_parser(commands)
    _convert_parser(commands)
    _verify_parser(commands)
    return parser


def _source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="a directory with `latest`, such as checkpoint-500, or a tag directory in it"
    )
    parser.add_argument("--tag", help="which tag to take, where there are several")
    parser.add_argument("--exclude-frozen", action="store_true", help="leave out parameters that were not trained")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="DIR",
        help="a further directory of the same save, from another node or tmp-checkpoint-*; may be given again",
    )
    parser.add_argument("--base-model", metavar="DIR", help="plain weights for frozen parameters that were never saved")
    parser.add_argument(
        "--state",
        choices=("exp_avg", "exp_avg_sq"),
        help="take the optimizer's moments in place of the weights",
    )
    parser.add_argument(
        "--tp-rules",
        metavar="FILE",
        help="how tensor-parallel parameters are joined: lines of a pattern and a dimension, or `replicated`",
    )


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="fp32",
        metavar="{fp32,bf16,fp16,keep}",
        help="floating type of all weights (default fp32); keep: as stored",
    )
    parser.add_argument(
        "--format",
        default="safetensors",
        choices=("safetensors", "bin"),
        help="file format (default safetensors); bin needs torch",
    )
    parser.add_argument(
        "--max-shard-size",
        default=DEFAULT_SHARD,
        metavar="SIZE",
        help="such as 5GB (default), 500MB or 2GiB; none: one file",
    )
    parser.add_argument(
        "--tied",
        default="clone",
        choices=("clone", "drop"),
        help="tied weights in safetensors: under every name (default), or under the owner's only",
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="what the whole process may have resident (default 64MiB; bin: more, for torch)",
    )
    parser.add_argument(
        "--workers", default="auto", metavar="N", help="threads that read, cast and write (default auto)"
    )
    parser.add_argument(
        "--io",
        default="auto",
        choices=("auto", "mmap", "pread"),
        help="how sources are read: auto reads explicitly, which network file systems need (default)",
    )


def _inspect_parser(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show what a checkpoint holds and what a conversion would need")
    _source_arguments(parser)
    _output_arguments(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def _convert_parser(commands: Any) -> None:
    parser = commands.add_parser("convert", help="write plain weights")
    _source_arguments(parser)
    parser.add_argument("output", help="directory to write to; - streams one safetensors file to standard output")
    _output_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace weight files in the output directory")
    parser.add_argument("--force", action="store_true", help="go on though the disk seems too small")
    parser.add_argument(
        "--no-self-check", action="store_true", help="do not compare with the 16-bit copy in the checkpoint"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and plan only, write nothing")
    parser.add_argument("--verify", action="store_true", help="compare every element afterwards; not with --on-shard")
    parser.add_argument(
        "--check-finite", action="store_true", help="warn of NaN, infinities, and trained matrices of zeros"
    )
    parser.add_argument("--checksum", choices=("sha256",), help="write SHA256SUMS as well")
    parser.add_argument("--memory-trace", metavar="FILE", help="write the process's memory over time to a CSV file")
    parser.add_argument("--on-shard", metavar="CMD", help="shell command run for each finished file, the index last, which may take it away; LAZYZERO_PATH, _INDEX, _COUNT say which")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the report as JSON at the end")


def _verify_parser(commands: Any) -> None:
    parser = commands.add_parser("verify", help="compare every element of an output with its checkpoint")
    _source_arguments(parser)
    parser.add_argument("output", help="the directory that was written to")
    parser.add_argument(
        "--dtype", metavar="{fp32,bf16,fp16,keep}", help="what the output should have (default: what it has)"
    )
    parser.add_argument(
        "--no-self-check", action="store_true", help="do not compare the checkpoint with its own 16-bit copy"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="threads (default 2)")
    parser.add_argument("--json", action="store_true", help="machine-readable")
