"""Short-lived mappings of byte ranges of a source file. Windows are mapped, never whole files."""

from __future__ import annotations

import errno
import mmap

from lazyzero.container.source import POOL, Source
from lazyzero.errors import ReadError, SourceChanged

PAGE = mmap.ALLOCATIONGRANULARITY


def map_range(source: Source, offset: int, nbytes: int, *, private: bool = False) -> tuple[mmap.mmap, int] | None:
    """Maps bytes [offset, offset + nbytes): the mapping, and where in it the first byte stands.

    Shared and read-only, so that the kernel charges nothing against the commit limit; `private` maps copy-on-write
    instead. None where the system has no mapping to give (descriptors or address space used up): read instead.
    """
    start = offset - offset % PAGE
    # Touching pages behind the end of a file kills the process: look before mapping.
    source.check()
    if offset + nbytes > source.size:
        raise SourceChanged(f"{source.path}: ends before byte {offset + nbytes}, it has {source.size}; copy it again")
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
    with POOL.lease(source) as fd:
        try:
            return mmap.mmap(fd, offset - start + nbytes, access=access, offset=start), offset - start
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV, errno.EACCES):
                return None
            raise ReadError(f"{source.path}: cannot be mapped at byte {offset}: {error.strerror}") from None
