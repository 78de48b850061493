"""PseudoTensor: a torch tensor that is read when it is needed; what a lazy state dict of `lazyzero.compat` holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazyzero.dtypes import DType
from lazyzero.errors import MissingDependency
from lazyzero.gather import read
from lazyzero.tensor import LazyTensor

if TYPE_CHECKING:
    import torch


def require_torch() -> Any:
    """The torch module. Raises MissingDependency with what to install."""
    try:
        import torch
    except ImportError:
        raise MissingDependency("torch state dicts need torch: pip install 'lazyzero[torch]'") from None
    return torch


class PseudoTensor:
    """A value of a lazy state dict: shape and dtype are known, `contiguous()` reads the bytes, anew at each call.

    `shape` is a torch.Size, `dtype` a torch.dtype. Whatever else a tensor has is asked of a tensor read for the purpose,
    and torch's functions take it where they take a tensor, so that `load_state_dict` holds one tensor at a time.
    """

    def __init__(self, source: LazyTensor, dtype: DType) -> None:
        lib = require_torch()
        self.shape: torch.Size = lib.Size(source.shape)
        self.dtype: torch.dtype = getattr(lib, dtype.name)
        self.device: torch.device = lib.device("cpu")
        self._source = source

    def contiguous(self) -> torch.Tensor:
        """The values, in memory of their own. Raises ReadError or SourceChanged."""
        lib, source = require_torch(), self._source
        raw = read(source, 0, source.numel).view("u1")  # torch knows none of ml_dtypes' types: name it instead
        values: torch.Tensor = lib.from_numpy(raw).view(getattr(lib, source.dtype.name)).reshape(self.shape)
        return values.to(self.dtype)

    def numel(self) -> int:
        """Number of elements."""
        return self._source.numel

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(require_torch().Tensor, name):
            raise AttributeError(f"neither this pseudo tensor nor a torch tensor has {name!r}")
        return getattr(self.contiguous(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_read_in(args), **_read_in(kwargs or {}))

    def __repr__(self) -> str:
        return f"PseudoTensor({self._source.name!r}, shape={list(self.shape)}, dtype={self.dtype})"


def _read_in(value: Any) -> Any:
    """`value` with a tensor in place of each pseudo tensor, through lists, tuples and dicts."""
    if isinstance(value, PseudoTensor):
        return value.contiguous()
    if type(value) in (list, tuple):
        return type(value)(map(_read_in, value))
    if type(value) is dict:
        return {key: _read_in(item) for key, item in value.items()}
    return value
