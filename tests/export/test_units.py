"""Sizes and durations as users write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyzero.errors import InvalidRequest
from lazyzero.export.units import parse_size, show_size, show_time


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        (7, 7),
        ("12B", 12),
        ("3KB", 3000),
        ("3k", 3000),
        ("500MB", 500_000_000),
        ("5GB", 5_000_000_000),
        ("2tb", 2_000_000_000_000),
        ("2GiB", 2 << 30),
        ("1kib", 1024),
        ("1.5GB", 1_500_000_000),
        (".5MiB", 1 << 19),
        (" 5 GB ", 5_000_000_000),
    ],
)
def test_sizes_are_decimal_or_binary(text: str | int, count: int) -> None:
    """GB is a thousand million bytes, GiB is 2**30; case and spaces do not matter."""
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "5XB", "five", "-5GB", "0", 0, -1, "1e9", "5 GB 3", "nan", "inf", True, None, "0.1", "٣GBx"]
)
def test_anything_else_is_refused_by_name(text: object) -> None:
    """The message repeats what was given."""
    with pytest.raises(InvalidRequest) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)


@given(number=st.integers(1, 10**6), unit=st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_decimal_sizes_are_huggingface_hubs(number: int, unit: str) -> None:
    """The same text means the same number of bytes in both."""
    from huggingface_hub.serialization._base import parse_size_to_int

    assert parse_size(f"{number}{unit}") == parse_size_to_int(f"{number}{unit}")


def test_sizes_are_shown_in_three_digits_or_so() -> None:
    """One decimal below a hundred, none above, decimal units."""
    shown = [show_size(count) for count in (0, 999, 1000, 1_550_000, 150_000_000, 5e9, 2.5e12, 4e15)]
    assert shown == ["0 B", "999 B", "1.0 KB", "1.6 MB", "150 MB", "5.0 GB", "2.5 TB", "4000 TB"]


def test_durations_are_shown_in_the_two_largest_units() -> None:
    """Seconds, minutes and seconds, hours and minutes."""
    shown = [show_time(seconds) for seconds in (0, 59.94, 60, 192.7, 3599.9, 3600, 7500)]
    assert shown == ["0.0 s", "59.9 s", "1m00s", "3m12s", "59m59s", "1h00m", "2h05m"]
