"""Watches values go by for what no trained weight should be: NaN, infinities, or nothing but zeros."""

from __future__ import annotations

import threading

import numpy as np

from lazyzero.tensor import LazyTensor

_QUICK = frozenset("fd")  # float32 and float64: their sum runs at memory speed


class FiniteWatch:
    """Told of each tensor's parts as stored, from any thread; `findings` names the tensors at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nonfinite: dict[str, None] = {}
        self._nonzero: dict[str, bool] = {}
        self._trainable: dict[str, bool] = {}

    def __call__(self, tensor: LazyTensor, values: np.ndarray) -> None:
        """Looks at a part of a tensor."""
        if not tensor.dtype.floating:
            return
        finite, nonzero = _look(values)
        with self._lock:
            if not finite:
                self._nonfinite[tensor.name] = None
            self._nonzero[tensor.name] = self._nonzero.get(tensor.name, False) or nonzero
            self._trainable[tensor.name] = tensor.role == "trainable" and tensor.ndim >= 2

    def findings(self) -> list[str]:
        """A line for each kind of fault, with the names."""
        zeros = [name for name, nonzero in self._nonzero.items() if not nonzero and self._trainable[name]]
        lines = []
        if self._nonfinite:
            lines.append(f"NaN or infinity in {_listed(sorted(self._nonfinite))}")
        if zeros:
            lines.append(f"nothing but zeros in the trained matrix {_listed(sorted(zeros))}")
        return lines


def _look(values: np.ndarray) -> tuple[bool, bool]:
    """Whether all are finite, and whether any is not zero.

    A sum that is finite and not zero proves both at the price of a read; only otherwise is a second look needed.
    """
    with np.errstate(all="ignore"):
        if values.dtype.char in _QUICK:
            total = float(np.add.reduce(values))
            if np.isfinite(total) and total != 0:
                return True, True
        return bool(np.isfinite(values).all()), bool(values.astype(bool).any())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
