"""Which checkpoint is meant: the model, and how it was trained and saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.models import Model
from benchmarks.values import Values

SUB_GROUP: Final = 1_000_000_000  # elements of a rank; DeepSpeed's default


@dataclass(frozen=True, slots=True)
class Spec:
    """What to generate. `adam` writes real numbers into the Adam states; `sparse` leaves holes in the weights too."""

    model: Model
    stage: int
    world: int
    sparse: bool = False
    adam: bool = False
    sub_group: int = SUB_GROUP

    @property
    def values(self) -> Values:
        """The values of the parameters."""
        return Values(self.sparse)

    @property
    def expected_bytes(self) -> int:
        """Bytes of all weights as fp32."""
        return 4 * self.model.numel
