"""What a generated checkpoint is to be, and what must come out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

Kind = Literal["trained", "frozen", "left out"]
Shared = Literal["right", "from first name", "chain", "empty", "absent"]
VERSIONS = ("0.5.10", "0.6.7", "0.9.5", "0.19.8")


@dataclass(frozen=True)
class Param:
    """A parameter; `aliases` are more names of the same tensor, standing later in the module than `name`."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "trained"
    group: int = 0
    aliases: tuple[str, ...] = ()
    owner: int = 0  # which of its names `param_shapes` and the fragments know it by

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def owner_name(self) -> str:
        return self.names[self.owner % len(self.names)]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Buffer:
    """A persistent buffer; `form` says how it lies in its storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    form: Literal["whole", "transposed", "inside", "stepped"] = "whole"
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """Everything that decides the files. `release` 3: 0.19.8, 2: 0.9.5, 1: 0.6.7, 0: 0.5.10."""

    stage: int = 2
    world: int = 2
    precision: str = "bf16"
    params: tuple[Param, ...] = (Param("weight", (3, 5)),)
    buffers: tuple[Buffer, ...] = ()
    release: int = 3
    bf16_optimizer: bool = False
    master: str = "fp32"
    groups: int = 1
    sub_group: int = 1 << 30
    aligned: bool = False
    exclude_frozen: bool = False
    legacy: bool = False
    archive_root: bool = False
    shape_as: Literal["Size", "list", "tuple"] = "Size"
    shared: Shared = "right"
    adam: bool = True
    client: bool = False
    extra_state: bool = False
    mics: int = 1
    flat_masters: bool = False
    rebuilt_from_type: bool = False
    count_as_list: bool = True
    seed: int = 0


@dataclass
class Truth:
    """What must come out: `want` has every name, in the dtype stored.

    `missing` are names in `module` whose data no file has, `mentioned` names that at most `shared_params` tells of.
    """

    root: Path
    tag: Path
    want: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    mentioned: set[str] = field(default_factory=set)
    layout: str = ""
    world: int = 1
