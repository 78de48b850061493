"""What the fuzzers begin with: small inputs that are honest, and some that are not."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.forge import Tensor, Zip, legacy, parts, pickled, storages_of
from tests.hostile.checkpoints import LAYOUTS, archive
from tests.hostile.pickles import encoded, hostile
from tests.hostile.real import CASES

_DATA = Path(__file__).parents[1] / "data"
_SMALL = 24 << 10  # bytes


def seeds(target: str) -> list[bytes]:
    """The first inputs of a target."""
    return _BY_TARGET[target]()


def _pickles() -> list[bytes]:
    evil = hostile("/nonexistent/canary")
    names = sorted(evil)
    mixed = [encoded(evil[name], index % 6) for index, name in enumerate(names)]
    return [*mixed, *(pickled(value) for files in _contents() for value in files.values())]


def _contents() -> list[dict[str, object]]:
    return [make() for make in LAYOUTS.values()]


def _archives() -> list[bytes]:
    value = {"w": Tensor("0", (2, 3)), "v": Tensor("0", (2,), (3,), 1, 6), "b": Tensor("1", (), kind="LongStorage")}
    found = [archive(file) for files in _contents() for file in files.values()]
    for form in ({"zip64": True}, {"descriptors": True}, {"comment": b"comment"}):
        found.append(Zip(parts(pickled(value), storages_of(value)), **form).write())  # type: ignore[arg-type]
    found.append(legacy({"w": Tensor("0", (2, 3)), "b": Tensor("1", (2,))}, [("0", 6, bytes(24)), ("1", 2, bytes(8))]))
    found += [file.read_bytes() for file in sorted(_DATA.glob("*/checkpoint/**/*.pt")) if file.stat().st_size < _SMALL][
        :12
    ]
    return found


def _safetensors() -> list[bytes]:
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
    more = {**header, "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]}, "c": [1, {"d": None}]}
    texts = [json.dumps(each).encode() for each in (header, more, {}, {"b": more["b"]})]
    return [struct.pack("<Q", len(text)) + text + bytes(26) for text in texts]


def _decisions() -> list[bytes]:
    return [bytes([value] * 16) for value in range(0, 256, 5)] + [
        bytes(range(start, start + 40)) for start in range(0, 200, 9)
    ]


def _cases() -> list[bytes]:
    return [bytes([number, *([0] * extra)]) for number in range(len(CASES)) for extra in (0, 20)] + _decisions()


def _layout_pickles() -> list[bytes]:
    found = []
    for number, layout in enumerate(sorted(LAYOUTS)):
        for index, (_, value) in enumerate(sorted(LAYOUTS[layout]().items())):
            found.append(bytes([number, index]) + pickled(value))
    return found


_BY_TARGET = {
    "archive": _archives,
    "unpickler": _pickles,
    "safetensors": _safetensors,
    "discovery": _decisions,
    "layout": _decisions,
    "real-layout": _cases,
    "layout-pickle": _layout_pickles,
}
