"""What a directory without a checkpoint holds instead, to tell a user who expected one."""

from __future__ import annotations

from pathlib import Path

from lazyzero.errors import LazyZeroError
from lazyzero.layout.base_model import tensors_in, weight_files

_MOST_FILES = 64


def plain_weights(directory: Path) -> str | None:
    """Says whether weight files in the directory are placeholders or plain weights; None where there are none."""
    names: list[str] = []
    empty = total = 0
    try:
        for path in weight_files(directory)[:_MOST_FILES]:
            tensors = tensors_in(path)
            if tensors:
                names.append(path.name)
            total += len(tensors)
            empty += sum(ref.numel == 0 for ref in tensors.values())
    except LazyZeroError as error:
        return f"no DeepSpeed checkpoint here, and a weight file that cannot be read: {error}"
    if not total:
        return None
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if empty * 2 > total:
        return (
            f"no DeepSpeed checkpoint here, and in {shown} {empty} of {total} tensors are placeholders without values "
            "(Size([0])), as ZeRO-3 saves them unless `stage3_gather_16bit_weights_on_model_save` is set; the values are in "
            "the files of the checkpoint's tag directory (global_step*/*_optim_states.pt): give that directory"
        )
    return f"no DeepSpeed checkpoint here; {shown} holds plain weights, which need no conversion"
