"""DeepSpeed's own names for consolidating ZeRO checkpoints, with its signatures and defaults, on top of lazyzero.

The functions are those of `deepspeed.utils.zero_to_fp32` in 0.19.8. As a command, `python -m lazyzero.compat` takes what
its `zero_to_fp32.py` and `zero_to_torch.py` take. Where that version gives the right result, this is the same: names,
order, dtypes, files. docs/compat.md lists what differs. Nothing here needs DeepSpeed; torch is needed for `.bin` files
and for the functions that return or fill torch objects.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lazyzero.checkpoint import Checkpoint, open_checkpoint
from lazyzero.cli import RESUMABLE, guarded, summary
from lazyzero.dtypes import FLOAT32, DType
from lazyzero.errors import InvalidRequest
from lazyzero.export.api import export
from lazyzero.export.options import DEFAULT_SHARD, Options, make_options
from lazyzero.export.plan import STEMS
from lazyzero.export.progress import for_stream
from lazyzero.export.run import plan_export, prepare
from lazyzero.inspection import describe, notices, show
from lazyzero.pseudo import PseudoTensor, require_torch
from lazyzero.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

__all__ = [
    "OUTPUT_DTYPE_NAMES",
    "PseudoTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

Directory = str | os.PathLike[str]

# The names DeepSpeed gives output dtypes, and ours.
OUTPUT_DTYPE_NAMES: Final = {
    "float32": "fp32",
    "fp32": "fp32",
    "float16": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Directory,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The state dict of a checkpoint: torch tensors on the CPU, in memory of their own.

    Trained weights come in the dtype of their masters (fp32 unless training chose otherwise), floating buffers in fp32,
    all else as stored. With `lazy_mode` the values are `PseudoTensor`s, and nothing is read but samples for the
    self-check. Tied names have one and the same object. Raises LazyZeroError's descendants; warns of names whose values
    no file holds.
    """
    require_torch()
    with _opened(checkpoint_dir, tag, exclude_frozen_parameters) as checkpoint:
        prepare(checkpoint, make_options())
        lazy: OrderedDict[str, PseudoTensor] = OrderedDict()
        for name, tensor in checkpoint.items():
            owned = lazy.get(tensor.tied_to or name)
            lazy[name] = PseudoTensor(tensor, _result_dtype(tensor)) if owned is None else owned
        return lazy if lazy_mode else _read_all(lazy)


def _result_dtype(tensor: LazyTensor) -> DType:
    return FLOAT32 if tensor.role == "buffer" and tensor.dtype.floating else tensor.dtype


def _read_all(lazy: dict[str, PseudoTensor]) -> dict[str, Any]:
    read_already: dict[int, torch.Tensor] = {}
    for value in lazy.values():
        if id(value) not in read_already:
            read_already[id(value)] = value.contiguous()
    return {name: read_already[id(value)] for name, value in lazy.items()}


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Directory,
    output_dir: Directory,
    dtype: torch.dtype | str = "float32",
    max_shard_size: str | int | None = DEFAULT_SHARD,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes a checkpoint's weights to `output_dir`: `pytorch_model.bin`, or `model.safetensors` if `safe_serialization`.

    `dtype` is what all floating tensors are cast to: float32, float16 or bfloat16, as a name or torch's own.
    `max_shard_size` is a size like "5GB"; None gives one file. Files of the same names are replaced, others left alone.
    Raises InvalidRequest (a ValueError) and LazyZeroError's other descendants.
    """
    options = _options(dtype, max_shard_size, safe_serialization)
    with _opened(checkpoint_dir, tag, exclude_frozen_parameters) as checkpoint:
        for warning in _leftovers(checkpoint, Path(output_dir), options):
            warnings.warn(warning, stacklevel=2)
        export(checkpoint, output_dir, options)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Directory,
    output_dir: Directory,
    max_shard_size: str | int | None = DEFAULT_SHARD,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` to float32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: Directory, tag: str | None = None
) -> torch.nn.Module:
    """Moves `model` to the CPU, fills it with a checkpoint's weights, not strictly, and returns it.

    One tensor is read at a time. Raises what `get_fp32_state_dict_from_zero_checkpoint` and `load_state_dict` raise.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, lazy_mode=True)
    model = model.cpu()
    model.load_state_dict(weights, strict=False)
    return model


@contextmanager
def _opened(checkpoint_dir: Directory, tag: str | None, exclude_frozen: bool) -> Iterator[Checkpoint]:
    with open_checkpoint(checkpoint_dir, tag=tag, exclude_frozen=exclude_frozen) as checkpoint:
        for notice in notices(checkpoint):
            warnings.warn(notice, stacklevel=4)  # whoever called the function that uses this
        yield checkpoint


def _options(dtype: Any, max_shard_size: str | int | None, safe_serialization: bool) -> Options:
    name = str(dtype).removeprefix("torch.").lower()
    if name not in OUTPUT_DTYPE_NAMES:
        raise InvalidRequest(f"output dtype {dtype!r} is not one of {', '.join(sorted(OUTPUT_DTYPE_NAMES))}")
    options = make_options(
        dtype=OUTPUT_DTYPE_NAMES[name],
        format="safetensors" if safe_serialization else "bin",
        max_shard_size=max_shard_size,
    )
    return replace(options, merge=True)


def _leftovers(checkpoint: Checkpoint, output: Path, options: Options) -> list[str]:
    """A warning, where weights of the same format stay beside the new ones and a loader may take them instead."""
    plan = plan_export(checkpoint, options)
    written = {shard.filename for shard in plan.shards} | {plan.index}
    stem, suffix = STEMS[options.format]
    found = sorted(path.name for path in output.glob(f"{stem}*{suffix}*") if path.name not in written)
    if not found:
        return []
    shown = ", ".join(found[:4]) + (" ..." if len(found) > 4 else "")
    return [f"{output}: holds other weights, which are left there and may be loaded instead of the new ones: {shown}"]


def build_parser() -> argparse.ArgumentParser:
    """The arguments of both of DeepSpeed's scripts."""
    parser = argparse.ArgumentParser(
        prog="python -m lazyzero.compat",
        description="Takes the arguments of DeepSpeed's zero_to_fp32.py and zero_to_torch.py and writes what they write.",
    )
    parser.add_argument("checkpoint_dir", help="the checkpoint's directory, such as checkpoint-12")
    parser.add_argument("output_dir", help="directory to write to")
    parser.add_argument(
        "--dtype", default="float32", choices=sorted(OUTPUT_DTYPE_NAMES), help="of all floating tensors (default float32)"
    )  # fmt: skip
    parser.add_argument(
        "--max_shard_size", default=DEFAULT_SHARD, help="such as 5GB (default) or 500MB; none: one file"
    )
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, not .bin files")
    parser.add_argument("-t", "--tag", help="which tag to take (default: the one in `latest`)")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="list every tensor first")
    return parser


def _run(args: argparse.Namespace) -> int:
    options = _options(args.dtype, args.max_shard_size, args.safe_serialization)
    progress = for_stream()
    with open_checkpoint(
        args.checkpoint_dir, tag=args.tag, exclude_frozen=args.exclude_frozen_parameters
    ) as checkpoint:
        if args.debug:
            print(show(describe(checkpoint, options, tensors=True)))
        for warning in [*notices(checkpoint), *_leftovers(checkpoint, Path(args.output_dir), options)]:
            progress.note(f"warning: {warning}")
        print(summary(export(checkpoint, args.output_dir, options, progress=progress)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 1 failed, 2 usage."""
    args = build_parser().parse_args(argv)
    return guarded(lambda: _run(args), hint=RESUMABLE)


if __name__ == "__main__":
    sys.exit(main())
