"""Short-lived mappings of byte ranges of a source file. Windows are mapped, never whole files.

Touching a page behind the end of a file, or one the disk cannot deliver, kills the process with SIGBUS, and no check
beforehand helps against a file that is truncated a moment later. So `copy_out` does not touch the mapping itself: it has
the kernel copy out of it, which answers with an error instead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from lazyzero.container.source import POOL, Source
from lazyzero.errors import ReadError, SourceChanged

PAGE = mmap.ALLOCATIONGRANULARITY
_MOST_VIEWS = 1024  # of one call: the kernel's limit


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def map_range(source: Source, offset: int, nbytes: int, *, private: bool = False) -> tuple[mmap.mmap, int] | None:
    """Maps bytes [offset, offset + nbytes): the mapping, and where in it the first byte stands.

    Shared and read-only, so that the kernel charges nothing against the commit limit; `private` maps copy-on-write
    instead. None where the system has no mapping to give (descriptors or address space used up): read instead.
    """
    start = offset - offset % PAGE
    source.check()
    short = f"{source.path}: ends before byte {offset + nbytes}, was {source.size} bytes when opened; copy it again"
    if offset + nbytes > source.size:
        raise SourceChanged(short)
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
    with POOL.lease(source) as fd:
        try:
            return mmap.mmap(fd, offset - start + nbytes, access=access, offset=start), offset - start
        except ValueError:  # it shrank since the check
            raise SourceChanged(short) from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV, errno.EACCES):
                return None
            raise ReadError(f"{source.path}: cannot be mapped at byte {offset}: {error.strerror}") from None


def copy_out(source: Source, offset: int, views: Sequence[memoryview]) -> bool:
    """Fills the views one after the other from a mapping of the file; False where the system has no way to do that.

    Raises SourceChanged for a file that shrank, ReadError for one that the disk does not deliver.
    """
    call = _kernel_copy()
    mapped = map_range(source, offset, sum(map(len, views))) if call else None
    if call is None or mapped is None:
        return False
    mapping, at = mapped
    with mapping:
        address = _address(mapping) + at
        for first in range(0, len(views), _MOST_VIEWS):
            part = [view for view in views[first : first + _MOST_VIEWS] if len(view)]
            nbytes = sum(map(len, part))
            local = (_IoVec * len(part))(*(_IoVec(_address(view), len(view)) for view in part))
            remote = _IoVec(address, nbytes)
            done = call(os.getpid(), local, len(part), ctypes.byref(remote), 1, 0)
            if done != nbytes:
                if done < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
                    return False  # a sandbox that forbids it
                source.check()
                raise ReadError(f"{source.path}: reading at byte {offset + max(done, 0)} failed: input/output error")
            address, offset = address + nbytes, offset + nbytes
    return True


def _address(buffer: mmap.mmap | memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


@cache
def _kernel_copy() -> Any:
    """Linux's process_vm_readv, None elsewhere."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    function.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    )
    function.restype = ctypes.c_ssize_t
    return function
