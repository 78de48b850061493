"""CRC-32 of two byte strings joined, from the CRCs of each, as zlib computes it (its Python module leaves it out)."""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
Matrix = tuple[int, ...]


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of A + B, where `first` is that of A, `second` that of B, and B has `length` bytes."""
    return _times(_zeros(length), first) ^ second


@lru_cache(maxsize=64)
def _zeros(length: int) -> Matrix:
    """The linear map that appending `length` zero bytes does to a CRC: one matrix over GF(2), by repeated squaring."""
    result: Matrix = tuple(1 << bit for bit in range(32))
    power = _one_byte()
    while length:
        if length & 1:
            result = _product(power, result)
        power = _product(power, power)
        length >>= 1
    return result


@lru_cache(maxsize=1)
def _one_byte() -> Matrix:
    one_bit: Matrix = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    two = _product(one_bit, one_bit)
    four = _product(two, two)
    return _product(four, four)


def _times(matrix: Matrix, vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


def _product(left: Matrix, right: Matrix) -> Matrix:
    return tuple(_times(left, column) for column in right)
