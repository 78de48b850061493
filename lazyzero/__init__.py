"""Turns DeepSpeed ZeRO checkpoints into plain weights, lazily, in constant memory, without DeepSpeed."""

from lazyzero.checkpoint import Checkpoint, open_checkpoint
from lazyzero.errors import LazyZeroError
from lazyzero.export.api import convert, stream
from lazyzero.export.report import Finished, Report
from lazyzero.tensor import LazyTensor, Placeholder
from lazyzero.verify import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Finished",
    "LazyTensor",
    "LazyZeroError",
    "Placeholder",
    "Report",
    "Verification",
    "convert",
    "open_checkpoint",
    "stream",
    "verify",
]
