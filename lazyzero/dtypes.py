"""Element types, described without importing torch; numpy is asked for only when values are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from lazyzero.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `name` is torch's own name without the prefix, `itemsize` is in bytes, `tag` is the name safetensors
    gives it (None where the format has none), `floating` follows `torch.Tensor.is_floating_point`.
    """

    name: str
    itemsize: int
    tag: str | None
    floating: bool = False

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype of the same bits (ml_dtypes supplies bfloat16 and the 8-bit floats)."""
        return _numpy(self.name)

    def __str__(self) -> str:
        return self.name


def _table() -> dict[str, DType]:
    rows = (
        DType("float64", 8, "F64", True),
        DType("float32", 4, "F32", True),
        DType("float16", 2, "F16", True),
        DType("bfloat16", 2, "BF16", True),
        DType("float8_e4m3fn", 1, "F8_E4M3", True),
        DType("float8_e5m2", 1, "F8_E5M2", True),
        DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", True),
        DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", True),
        DType("int64", 8, "I64"),
        DType("int32", 4, "I32"),
        DType("int16", 2, "I16"),
        DType("int8", 1, "I8"),
        DType("uint8", 1, "U8"),
        DType("uint16", 2, "U16"),
        DType("uint32", 4, "U32"),
        DType("uint64", 8, "U64"),
        DType("bool", 1, "BOOL"),
        DType("complex64", 8, "C64"),
        DType("complex128", 16, None),
    )
    return {row.name: row for row in rows}


DTYPES: Final = _table()
FLOAT32: Final = DTYPES["float32"]
FLOAT16: Final = DTYPES["float16"]
BFLOAT16: Final = DTYPES["bfloat16"]

# torch.<key>Storage in a pickle's persistent ids.
STORAGE_CLASSES: Final = {
    "DoubleStorage": DTYPES["float64"],
    "FloatStorage": FLOAT32,
    "HalfStorage": FLOAT16,
    "BFloat16Storage": BFLOAT16,
    "LongStorage": DTYPES["int64"],
    "IntStorage": DTYPES["int32"],
    "ShortStorage": DTYPES["int16"],
    "CharStorage": DTYPES["int8"],
    "ByteStorage": DTYPES["uint8"],
    "BoolStorage": DTYPES["bool"],
    "ComplexFloatStorage": DTYPES["complex64"],
    "ComplexDoubleStorage": DTYPES["complex128"],
    "UntypedStorage": DTYPES["uint8"],
}

_REQUESTS: Final = {
    "fp32": FLOAT32,
    "float32": FLOAT32,
    "fp16": FLOAT16,
    "float16": FLOAT16,
    "half": FLOAT16,
    "bf16": BFLOAT16,
    "bfloat16": BFLOAT16,
    "keep": None,
}


def requested(text: str) -> DType | None:
    """The output dtype a user names: fp32, fp16, bf16, or keep (None). Raises InvalidRequest otherwise."""
    key = str(text).removeprefix("torch.").lower()
    if key not in _REQUESTS:
        raise InvalidRequest(f"dtype {text!r} is not one of fp32, fp16, bf16, keep")
    return _REQUESTS[key]


@cache
def _numpy(name: str) -> np.dtype[Any]:
    import numpy as np

    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        name = getattr(ml_dtypes, name)
    return np.dtype(name)
