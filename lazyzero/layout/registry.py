"""The layouts, asked in order; a new one is one module and one line here."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Final

from lazyzero.errors import MissingFiles, UnsupportedLayout
from lazyzero.layout import moments, nvme, refused, universal, zero0, zero1_old, zero3, zero12
from lazyzero.layout.contents import Contents, without_frozen
from lazyzero.layout.found import Found
from lazyzero.layout.support import Support

# Each has `matches(found) -> bool`, `read(found) -> Contents`, its `SUPPORT` for the documentation, and `MOMENTS = True` where
# `read` honours `found.state`.
LAYOUTS: Final[tuple[ModuleType, ...]] = (universal, refused, nvme, zero3, zero12, zero1_old, zero0)


def support() -> tuple[Support, ...]:
    """What all layouts support, for the tables in the documentation."""
    return tuple(row for layout in LAYOUTS for row in getattr(layout, "SUPPORT", ()))


def read_contents(found: Found) -> Contents:
    """Recognises the layout and reads its metadata. Raises UnsupportedLayout, MissingFiles, or what the layout raises."""
    for layout in LAYOUTS:
        if layout.matches(found):
            if found.state is not None and not getattr(layout, "MOMENTS", False):
                raise UnsupportedLayout(f"{found.files.directory}: `{found.state}` is not read from this layout")
            contents: Contents = layout.read(found)
            contents = replace(contents, archives=tuple(archive.bare() for archive in contents.archives))
            if found.state is not None:
                return moments.only(contents)
            return without_frozen(contents) if found.exclude_frozen else contents
    files = found.files
    if files.optim:
        keys = ", ".join(map(str, found.optimizer.ranks[0].state))
        raise UnsupportedLayout(f"{found.optimizer.ranks[0].path}: no known layout has the keys {keys:.300}")
    if files.zero_model:
        raise MissingFiles(
            f"{files.directory}: found model files of ZeRO-3 ranks but no *_optim_states.pt, which hold the weights; copy them here"
        )
    raise UnsupportedLayout(f"{files.directory}: no known layout has these files")
