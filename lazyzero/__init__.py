"""Turns DeepSpeed ZeRO checkpoints into plain weights, lazily, in constant memory, without DeepSpeed."""

from lazyzero.checkpoint import Checkpoint, open_checkpoint
from lazyzero.errors import LazyZeroError
from lazyzero.tensor import LazyTensor, Placeholder

__version__ = "0.1.0"

__all__ = ["Checkpoint", "LazyTensor", "LazyZeroError", "Placeholder", "open_checkpoint"]
