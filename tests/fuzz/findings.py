"""Inputs that once got through: what each did, on which surface."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """An input of a target, and what it did."""

    what: str
    target: str
    data: bytes


FINDINGS: tuple[Finding, ...] = (
    Finding(
        "an alias in shared_params that is no name became an entry",
        "real-layout",
        b"U\x03abc}}}}}}}}MS2c\x02\xd5\xbd \x93e\xfd\x8bbS\xb1\x13\xea\xdbm\xbaA>}}}}}}}",
    ),
    Finding(
        "experts' files alone were asked for their model-parallel rank", "real-layout", b"\x08P\xb5PK\x06\x07O\x06\x07O"
    ),
    Finding(
        "a name that is no expert's stood in a param group of experts",
        "real-layout",
        b"\x80\xff\x7f\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xbf\xff\xff\xff\xff\xdf\xad\xbe*\xbd*KLMNOPQRSTUVW\x00\x00\x00\x80\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xffKLMNOPQ\xff\xff\xff\xff!\xff\xff\xff\xff\xff\xff\xff@\xff\xff\x00\x00\x00\x7f\x00\x00\x00(\x00\x00#\xf0\xf0\xf0\xf0\xf0\xf0\xf0\xf0",
    ),
    Finding(
        "lists of the same lists were walked through for as long as is allowed",
        "layout",
        b"@A\x0cAAs\xa8\xb9\xb9\xb9\xb9\xd3\xa3\xa0\xa0",
    ),
    Finding(
        "the same, in a real checkpoint",
        "real-layout",
        b'\xe5\xbe\xbe\xbe\xbe\xff\xff\xff1c\xac(xB\x96\xb9\xbf"\x97\xe0""',
    ),
)
