"""A pipeline's tied layers: saved for every layer they are used as, known by one name, `tied_modules.<key>.*`."""

from __future__ import annotations

from lazyzero.container.objects import TensorRef
from lazyzero.layout.contents import view
from lazyzero.layout.matching import round_alike
from lazyzero.tensor import LazyTensor

TIED = "tied_modules."


def tied_names(known: set[str]) -> dict[str, list[str]]:
    """`tied_modules.<key>.` -> the names that are known behind it."""
    tied: dict[str, list[str]] = {}
    for name in sorted(known):
        parts = name.split(".", 2)
        if name.startswith(TIED) and len(parts) == 3:
            tied.setdefault(f"{TIED}{parts[1]}.", []).append(parts[2])
    return tied


def tied_prefix(
    weights: dict[str, TensorRef], tied: dict[str, list[str]], trainable: dict[str, LazyTensor]
) -> str | None:
    """`tied_modules.<key>.` where all that is known of that key is in the layer, with the values of its masters."""
    for prefix, names in tied.items():
        if all(name in weights for name in names) and all(
            round_alike(trainable[prefix + name], view(name, weights[name], "module"))
            for name in names
            if prefix + name in trainable
        ):
            return prefix
    return None
