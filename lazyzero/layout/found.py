"""A tag directory under recognition: its files, and its optimizer files once somebody has asked for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lazyzero.layout.discover import FileSet
from lazyzero.layout.ranks import Optimizer, read_ranks
from lazyzero.layout.tp_rules import TpRule


@dataclass(frozen=True)
class Found:
    """What the layouts are asked about; reading happens once, whoever asks first."""

    files: FileSet
    exclude_frozen: bool = False
    base_model: str | None = None  # a directory of plain weights for frozen parameters that no file holds
    state: str | None = None  # "exp_avg" or "exp_avg_sq": the optimizer's moments in place of the weights

    tp_rules: tuple[TpRule, ...] = ()  # how tensor-parallel parameters are joined, where the user says so

    @cached_property
    def optimizer(self) -> Optimizer:
        """All ranks' optimizer files. Raises what `read_ranks` raises."""
        return read_ranks(self.files)
