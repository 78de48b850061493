"""Changes a written checkpoint file: loads it with torch, hands the object over, saves it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import foreign


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Calls `change` on the pickled object; what it returns, or the object itself, is saved in its place."""
    with foreign.importable():
        state = torch.load(path, weights_only=False)
        changed = change(state)
        torch.save(state if changed is None else changed, path)
