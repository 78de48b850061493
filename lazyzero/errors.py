"""Every exception lazyzero raises on purpose.

    LazyZeroError
    ├── CheckpointNotFound (FileNotFoundError)   nothing at the path looks like a DeepSpeed checkpoint
    ├── AmbiguousCheckpoint                      several tags and nothing that says which one is meant
    ├── BrokenArchive                            a `.pt` file is truncated, damaged or not an archive
    │   └── UnsafeArchive                        it is well formed but claims what no honest file would
    ├── MissingFiles                             some ranks' files, or a file the rest refers to, are not there
    ├── InconsistentCheckpoint                   the files are readable but contradict each other
    │   └── SelfCheckFailed                      reconstructed weights disagree with the copy in `module`
    ├── UnsupportedLayout                        recognised, but lazyzero does not convert it
    ├── SourceChanged                            a source file changed, shrank or vanished while being read
    ├── ReadError (OSError)                      the operating system refused to read a source
    ├── InvalidRequest (ValueError)              an argument that cannot be honoured
    ├── OutputRefused (FileExistsError)          the output place holds what lazyzero must not replace
    ├── WriteError (OSError)                     the operating system refused to write the output
    │   └── NotEnoughSpace                       the disk cannot hold what is still to be written
    ├── VerificationFailed                       an output differs from its checkpoint
    └── MissingDependency (ImportError)          an optional package is needed for what was asked

Each message names the file, what was expected, what was found, and what to do, on one printable line. All of them
pickle.
"""

from __future__ import annotations


class LazyZeroError(Exception):
    """Base of all errors raised on purpose; catching it is enough."""

    def __str__(self) -> str:
        return one_line(super().__str__())


def one_line(text: str) -> str:
    """`text` with what would break or steer a terminal written as escapes: file names may hold anything but NUL."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class CheckpointNotFound(LazyZeroError, FileNotFoundError):
    """Raised when a path does not exist or holds no DeepSpeed checkpoint."""


class AmbiguousCheckpoint(LazyZeroError):
    """Raised when a directory holds several tags and no `latest` file chooses one."""


class BrokenArchive(LazyZeroError):
    """Raised when a `.pt` file cannot be parsed: truncated, damaged, or another kind of file."""


class UnsafeArchive(BrokenArchive):
    """Raised when an archive makes claims beyond what it holds or beyond the limits of an honest file."""


class MissingFiles(LazyZeroError):
    """Raised when files of some ranks are absent."""


class InconsistentCheckpoint(LazyZeroError):
    """Raised when what the files say does not add up to whole tensors."""


class SelfCheckFailed(InconsistentCheckpoint):
    """Raised when reconstructed weights do not round to the 16-bit copy saved next to them."""


class UnsupportedLayout(LazyZeroError):
    """Raised for a checkpoint that is recognised but cannot be converted."""


class SourceChanged(LazyZeroError):
    """Raised when a source file is not the one that was opened any more."""


class ReadError(LazyZeroError, OSError):
    """Raised when reading a source fails."""


class InvalidRequest(LazyZeroError, ValueError):
    """Raised for arguments that cannot be honoured."""


class OutputRefused(LazyZeroError, FileExistsError):
    """Raised when writing would replace or mix with files that are not lazyzero's to replace."""


class WriteError(LazyZeroError, OSError):
    """Raised when writing the output fails."""


class NotEnoughSpace(WriteError):
    """Raised when the output's file system cannot hold what is still to be written."""


class VerificationFailed(LazyZeroError):
    """Raised when an output is not what its checkpoint gives."""


class MissingDependency(LazyZeroError, ImportError):
    """Raised when an optional package is needed and absent."""
