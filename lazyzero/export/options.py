"""What a user can ask of an export, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lazyzero import dtypes
from lazyzero.container.reader import READERS
from lazyzero.dtypes import DType
from lazyzero.errors import InvalidRequest
from lazyzero.export.plan import STEMS, Format, Tied
from lazyzero.export.units import parse_size

DEFAULT_SHARD: Final = "5GB"


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one export. `max_shard_size` and `max_memory` are in bytes; `workers` None chooses.

    `overwrite` removes all weight files of the output directory first; `merge` replaces those of the names to be written,
    each by its finished successor, leaves whatever else is there, and keeps no journal once it is done.
    """

    dtype: DType | None
    format: Format = "safetensors"
    max_shard_size: int | None = None
    tied: Tied = "clone"
    overwrite: bool = False
    merge: bool = False
    force: bool = False
    self_check: bool = True
    max_memory: int | None = None
    workers: int | None = None
    io: str = "pread"
    checksum: bool = False

    def settings(self) -> dict[str, object]:
        """What decides the bytes of the output, for the journal."""
        return {
            "dtype": self.dtype.name if self.dtype else "keep",
            "format": self.format,
            "max_shard_size": self.max_shard_size,
            "tied": self.tied,
        }


def make_options(
    *,
    dtype: str = "fp32",
    format: str = "safetensors",
    max_shard_size: str | int | None = DEFAULT_SHARD,
    tied: str = "clone",
    overwrite: bool = False,
    force: bool = False,
    self_check: bool = True,
    max_memory: str | int | None = None,
    workers: int | str | None = None,
    io: str = "auto",
    checksum: str | None = None,
) -> Options:
    """Options from what users write. Raises InvalidRequest naming the value and what would do."""
    if format not in STEMS:
        raise InvalidRequest(f"format {format!r} is not one of {', '.join(STEMS)}")
    if tied not in ("clone", "drop"):
        raise InvalidRequest(f"tied {tied!r} is not one of clone, drop")
    if format == "bin" and tied == "drop":
        raise InvalidRequest("tied 'drop' is for safetensors; a .bin file keeps tied tensors as one storage anyway")
    return Options(
        dtype=dtypes.requested(dtype),
        format="bin" if format == "bin" else "safetensors",
        max_shard_size=_shard_size(max_shard_size),
        tied="drop" if tied == "drop" else "clone",
        overwrite=overwrite,
        force=force,
        self_check=self_check,
        max_memory=None if max_memory is None else parse_size(max_memory),
        workers=_workers(workers),
        io=_io(io),
        checksum=_checksum(checksum),
    )


def _shard_size(value: str | int | None) -> int | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return None
    return parse_size(value)


def _workers(value: int | str | None) -> int | None:
    if value is None or value == "auto":
        return None
    try:
        count = int(value)
    except ValueError:
        count = 0
    if not 1 <= count <= 256:
        raise InvalidRequest(f"workers {value!r} is not 'auto' or a number from 1 to 256")
    return count


def _io(value: str) -> str:
    """`auto` reads explicitly: no slower on local disks, far faster over networks, and safe when a file shrinks."""
    if value != "auto" and value not in READERS:
        raise InvalidRequest(f"io {value!r} is not one of auto, {', '.join(READERS)}")
    return "pread" if value == "auto" else value


def _checksum(value: str | None) -> bool:
    if value not in (None, "sha256"):
        raise InvalidRequest(f"checksum {value!r} is not sha256")
    return value is not None
