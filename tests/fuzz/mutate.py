"""Mutations of bytes: blind ones, ones that know integers, and ones that know the opcodes of a pickle."""

from __future__ import annotations

import pickletools
import random
import struct
from collections.abc import Sequence

_INTERESTING = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0x7FFF,
    0xFFFF,
    1 << 31,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 40,
    1 << 63,
)
_OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
_LONGEST = 1 << 16  # bytes of an input
# Short runs of opcodes that mean something.
_PHRASES = (
    b"cos\nsystem\n", b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n",
    b"c__builtin__\nset\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nSize\n", b")R", b"(t", b"](e", b"}(u",
    b"K\x01\x85", b"q\x00", b"h\x00", b"2", b"0", b"\x94", b"X\x01\x00\x00\x00w", b"\x8a\x09" + b"\xff" * 8 + b"\x00",
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00", b"I-1\n", b"U\x03abc", b"\x8d" + b"\xff" * 8, b"Q", b"P0\n", b"b", b"\x81", b"o",
)  # fmt: skip


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """`data` after a few random mutations; parts of `others` may be spliced in."""
    for _ in range(1 + min(int(rng.expovariate(0.7)), 12)):
        data = rng.choice(_WAYS)(data, others, rng)[:_LONGEST]
    return data


def _flip(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _byte(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    if not data:
        return bytes([rng.randrange(256)])
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _integer(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    size = rng.choice((1, 2, 4, 8))
    if len(data) < size:
        return data
    at = rng.randrange(len(data) - size + 1)
    old = int.from_bytes(data[at : at + size], "little")
    new = rng.choice((rng.choice(_INTERESTING), old + rng.randrange(-16, 17), old * 2, -old)) % (1 << 8 * size)
    return data[:at] + new.to_bytes(size, "little") + data[at + size :]


def _cut(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _delete(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + data[min(last, first + 64) :]


def _double(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:last] * rng.choice((1, 1, 2, 50)) + data[last:]


def _splice(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(others)
    first, last = sorted(rng.randrange(len(other) + 1) for _ in range(2))
    at = rng.randrange(len(data) + 1)
    return data[:at] + other[first:last] + data[at + rng.choice((0, last - first)) :]


def _noise(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 24)) + data[at:]


def _opcodes(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Moves, doubles, removes or adds whole opcodes where the bytes are a pickle, wherever it stands in them."""
    start = max(data.find(b"\x80\x02"), 0)
    edges = _edges(data, start)
    if len(edges) < 2:
        return data
    at, to = rng.randrange(len(edges) - 1), rng.randrange(len(edges) - 1)
    piece = data[edges[at] : edges[at + 1]]
    act = rng.randrange(6)
    if act == 0:
        return data[: edges[at]] + data[edges[at + 1] :]
    if act == 1:
        return data[: edges[to]] + piece * rng.choice((1, 2, 300)) + data[edges[to] :]
    if act == 2:
        return data[: edges[to]] + rng.choice(_PHRASES) + data[edges[to] :]
    if act == 3:
        return data[: edges[at]] + rng.choice(_OPCODES) + data[edges[at] + 1 :]
    if act == 4:
        return data[: edges[at]] + rng.choice(_PHRASES) + data[edges[at + 1] :]
    return data[: edges[at]] + rng.choice(_OPCODES) + struct.pack("<Q", rng.choice(_INTERESTING)) + data[edges[at] :]


def _edges(data: bytes, start: int) -> list[int]:
    """Where the opcodes begin, and where the last one that makes sense ends."""
    edges = []
    try:
        for _, _, at in pickletools.genops(data[start:]):
            edges.append(start + (at or 0))
    except Exception:  # whatever pickletools thinks of it
        return edges
    return edges


_WAYS = (
    _flip,
    _byte,
    _integer,
    _integer,
    _cut,
    _delete,
    _double,
    _splice,
    _noise,
    _opcodes,
    _opcodes,
    _opcodes,
    _opcodes,
)
