"""Turns DeepSpeed ZeRO checkpoints into plain weights, lazily, in constant memory, without DeepSpeed."""

from lazyzero.checkpoint import Checkpoint, open_checkpoint
from lazyzero.errors import LazyZeroError
from lazyzero.export.report import Report
from lazyzero.export.run import convert
from lazyzero.tensor import LazyTensor, Placeholder

__version__ = "0.1.0"

__all__ = ["Checkpoint", "LazyTensor", "LazyZeroError", "Placeholder", "Report", "convert", "open_checkpoint"]
