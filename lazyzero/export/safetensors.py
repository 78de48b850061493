"""The safetensors file: header, order and padding as the library itself writes them.

    8 bytes: length of the header, little-endian | header: JSON, padded with spaces to a multiple of 8 | tensor data

Tensors stand in the order of the library's dtype enumeration, widest last-declared first, then by name; the same bytes as
`safetensors.torch.save_file` for the same tensors and metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lazyzero.dtypes import DTYPES
from lazyzero.errors import UnsupportedLayout
from lazyzero.export.plan import Shard
from lazyzero.tensor import Placeholder

_ORDER: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
_RANK: Final = {tag: rank for rank, tag in enumerate(_ORDER)}
_LARGEST_HEADER: Final = 100_000_000  # bytes; the library refuses to read a larger one


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's data stands in an output file: byte offset from the start of the file."""

    name: str
    placeholder: Placeholder
    offset: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A whole output file before it is written: leading bytes, then tensors at their places, `size` bytes in all."""

    header: bytes
    places: tuple[Place, ...]
    size: int


def lay_out(shard: Shard) -> FileLayout:
    """The header and the places of a shard. Raises UnsupportedLayout for a dtype the format does not have."""
    metadata = {"format": "pt", **dict(shard.dropped)}
    entries = sorted(shard.entries, key=lambda entry: (_RANK.get(_tag(*entry), 99), entry[0]))
    table: dict[str, object] = {"__metadata__": metadata}
    at, starts = 0, []
    for name, placeholder in entries:
        starts.append(at)
        end = at + placeholder.nbytes
        table[name] = {"dtype": _tag(name, placeholder), "shape": placeholder.shape, "data_offsets": (at, end)}
        at = end
    header = encode_header(table)
    places = tuple(
        Place(name, placeholder, len(header) + start)
        for (name, placeholder), start in zip(entries, starts, strict=True)
    )
    return FileLayout(header, places, len(header) + at)


def encode_header(table: Mapping[str, object]) -> bytes:
    """The length and the padded JSON. Raises UnsupportedLayout when the library could not read it."""
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise UnsupportedLayout(
            f"a safetensors header of {len(text)} bytes is more than readers accept; use a smaller --max-shard-size"
        )
    return len(text).to_bytes(8, "little") + text


def _tag(name: str, placeholder: Placeholder) -> str:
    tag = placeholder.dtype.tag
    if tag is None or tag not in _RANK:
        known = ", ".join(dtype.name for dtype in DTYPES.values() if dtype.tag)
        raise UnsupportedLayout(
            f"{name}: safetensors has no {placeholder.dtype} (it has {known}); export with --format bin"
        )
    return tag
