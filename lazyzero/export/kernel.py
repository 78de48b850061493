"""Two Linux calls that Python's os module lacks; each says whether it was carried out."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

# What file systems answer that cannot do what is asked for, beside real errors.
UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.ESPIPE})
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER


@cache
def _function(name: str, *types: Any) -> Any:
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = types
    function.restype = ctypes.c_int
    return function


def allocate(fd: int, size: int) -> bool:
    """Reserves `size` bytes for the file; False where the file system cannot. Raises OSError, ENOSPC above all.

    Not os.posix_fallocate: where the file system cannot, glibc's writes into every block instead.
    """
    function = _function("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return size > 0 and _call(function, fd, 0, 0, size)


def start_writeback(fd: int, offset: int, nbytes: int) -> bool:
    """Starts writing a dirty range to disk, without waiting."""
    return _sync(fd, offset, nbytes, _WRITE)


def wait_writeback(fd: int, offset: int, nbytes: int) -> bool:
    """Waits until a range is on disk."""
    return _sync(fd, offset, nbytes, _WAIT)


def _sync(fd: int, offset: int, nbytes: int, flags: int) -> bool:
    function = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return _call(function, fd, offset, nbytes, flags)


def _call(function: Any, *args: int) -> bool:
    if function is None:
        return False
    while function(*args) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code))
    return True
