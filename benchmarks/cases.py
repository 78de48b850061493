"""What is measured: the checkpoints, and for each the tools that run in turn over it and the promises they must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.bounds import GB, MIB, Bound
from benchmarks.models import Model, Parameter, llama, small_tensors, with_lora
from benchmarks.spec import Spec
from benchmarks.tools import Tool

Cache = Literal["warm", "cold"]

PEAK: Final = "peak RSS of any safetensors conversion"
BIN: Final = "peak RSS of .bin"
CP: Final = "fp32 to fp32, durable on disk, against cp and sync"
PEER: Final = "against DeepSpeed 0.19.8"
CAST: Final = "bf16 and fp16 against fp32"
LIMITED: Final = "the whole run in a 64 MiB memory cgroup"
HUGE: Final = "70B, 64 ranks, shards handed to a consumer"
HUGEST: Final = "405B, 1024 ranks, inspect and dry run"
LORA: Final = "LoRA, 70B frozen, 64 ranks"
READ: Final = "bytes read are the weights' and metadata"
WORKERS: Final = "two workers on two cores"
PIECES: Final = "two workers are not slower over small pieces"  # which cost the interpreter more than the kernel
SMALL: Final = "many small tensors, many small pieces"


@dataclass(frozen=True, slots=True)
class Entrant:
    """One command of a case. `dtype` is what its output must have, None where there is no output to check."""

    label: str
    tool: Tool = "lazyzero convert"
    options: tuple[str, ...] = ()
    dtype: str | None = "fp32"
    limit: int | None = None  # bytes, of a memory cgroup

    @property
    def streamed(self) -> bool:
        """Whether shards are handed to a consumer."""
        return "--on-shard" in self.options


@dataclass(frozen=True, slots=True)
class Case:
    """Entrants that run in turn over one checkpoint."""

    name: str
    group: str  # small, 70b or 405b
    source: str  # a key of SOURCES
    entrants: tuple[Entrant, ...]
    bounds: tuple[Bound, ...]
    cache: Cache = "warm"
    repeats: int = 3


def _convert(label: str, *options: str, dtype: str = "fp32", limit: int | None = None) -> Entrant:
    return Entrant(label, options=("--dtype", dtype, *options), dtype=dtype, limit=limit)


def _peak(*labels: str, mib: int = 64, promise: str = PEAK) -> tuple[Bound, ...]:
    return tuple(Bound(promise, label, "peak RSS", mib * MIB) for label in labels)


def _times(promise: str, label: str, other: str, limit: float, measure: str = "durable time") -> Bound:
    return Bound(promise, label, measure, limit, "times", other)


def _beside_deepspeed(label: str) -> tuple[Bound, ...]:
    return _times(PEER, label, "DeepSpeed", 1 / 4), _times(PEER, label, "DeepSpeed", 1 / 50, "peak RSS")


def _pieces(count: int, world: int, numel: int) -> Model:
    """Tensors of which each of `world` ranks holds `numel` elements."""
    return Model(
        f"{count} tensors in {world} pieces",
        tuple(Parameter(f"layers.{index}.weight", (world, numel)) for index in range(count)),
    )


ONE: Final = ("--max-shard-size", "none")
DEEPSPEED: Final = Entrant("DeepSpeed", "deepspeed", ("--safe_serialization", "--max_shard_size", "100GB"))
CP_SYNC: Final = Entrant("cp", "cp", dtype=None)
TAKEN: Final = ("--on-shard", "TAKE")

SOURCES: Final[dict[str, Spec]] = {
    "z3 4.4GB": Spec(llama("1B"), 3, 8),
    "z3 2.3GB": Spec(llama("1B", layers=10), 3, 8),
    "z3 1GB": Spec(llama("1B", layers=3), 3, 8),
    "z2 3.5GB": Spec(llama("1B", layers=17), 2, 8),
    "z1 1GB": Spec(llama("1B", layers=3), 1, 4),
    "z3 1GB, Adam": Spec(llama("1B", layers=3), 3, 8, adam=True),
    "z2 1GB, Adam": Spec(llama("1B", layers=3), 2, 7, adam=True),
    "10,000 x 1KB": Spec(small_tensors(10_000, 256), 2, 8),
    "4KB pieces": Spec(_pieces(100, 1024, 1024), 3, 1024),
    "z3 70B": Spec(llama("70B"), 3, 64, sparse=True),
    "z2 70B": Spec(llama("70B"), 2, 64, sparse=True),
    "LoRA 70B": Spec(with_lora(llama("70B")), 3, 64, sparse=True),
    "z3 405B": Spec(llama("405B"), 3, 1024, sparse=True),
}


_LIBRARIES: Final = 40 * MIB  # of Python and numpy, which a cold start reads too


def _read_case(source: str) -> Case:
    """Reads by calls are compared with those of `inspect`, which are the metadata and Python's own; mapped pages show on disk."""
    weights = 1.01 * 4 * SOURCES[source].model.numel
    return Case(
        f"bytes read, {source}", "small", source,
        (_convert("fp32", *ONE), Entrant("inspect", "lazyzero inspect", dtype=None)),
        (
            Bound(READ, "fp32", "bytes read", weights, "over", "inspect"),
            Bound(READ, "fp32", "bytes off the disk", weights + _LIBRARIES),
            *_peak("fp32"),
        ),
        cache="cold", repeats=1,
    )  # fmt: skip


def _scaling_case(source: str) -> Case:
    return Case(f"beside DeepSpeed, {source}", "small", source, (_convert("fp32", *ONE), CP_SYNC, DEEPSPEED),
                (*_beside_deepspeed("fp32"), *_peak("fp32")), repeats=1)  # fmt: skip


def _huge_case(source: str, *dtypes: str) -> Case:
    entrants = tuple(_convert(dtype, *TAKEN, dtype=dtype) for dtype in dtypes)
    bounds = [Bound(HUGE, dtype, "first byte", 5) for dtype in dtypes]
    return Case(source, "70b", source, entrants, (*bounds, *_peak(*dtypes, promise=HUGE)), repeats=1)


CASES: Final[tuple[Case, ...]] = (
    Case("ZeRO-3, warm cache", "small", "z3 4.4GB", (_convert("fp32", *ONE), CP_SYNC),
         (_times(CP, "fp32", "cp", 1.0), *_peak("fp32")), repeats=4),
    Case(
        "ZeRO-3, dtypes and DeepSpeed", "small", "z3 4.4GB",
        (_convert("fp32", *ONE), _convert("bf16", *ONE, dtype="bf16"), _convert("fp16", *ONE, dtype="fp16"), DEEPSPEED),
        (
            *_beside_deepspeed("fp32"),
            _times(CAST, "bf16", "fp32", 1.0),
            _times(CAST, "fp16", "fp32", 1.3),
            *_peak("fp32", "bf16", "fp16"),
        ),
        repeats=2,
    ),
    Case("ZeRO-3, cold cache", "small", "z3 4.4GB", (_convert("fp32", *ONE), CP_SYNC),
         (_times(CP, "fp32", "cp", 1.0), *_peak("fp32")), cache="cold", repeats=2),
    Case(
        "ZeRO-3 in 64 MiB, cold cache", "small", "z3 4.4GB",
        (_convert("fp32", *ONE), _convert("fp32 in 64 MiB", *ONE, limit=64 * MIB)),
        (_times(LIMITED, "fp32 in 64 MiB", "fp32", 1.3),),
        cache="cold", repeats=1,
    ),
    Case(
        "workers", "small", "z3 4.4GB",
        (_convert("1 worker", *ONE, "--workers", "1", dtype="fp16"), _convert("2 workers", *ONE, "--workers", "2", dtype="fp16")),
        (_times(WORKERS, "2 workers", "1 worker", 1 / 1.5, "best time"), *_peak("2 workers", promise=WORKERS)),
        repeats=5,
    ),
    _scaling_case("z3 2.3GB"),
    _scaling_case("z3 1GB"),
    Case(
        ".bin", "small", "z3 1GB",
        (Entrant(".bin", options=("--format", "bin", *ONE)), Entrant("import torch", "import torch", dtype=None)),
        (Bound(BIN, ".bin", "peak RSS", 64 * MIB, "over", "import torch"),), repeats=1,
    ),
    Case(
        "ZeRO-2, warm cache", "small", "z2 3.5GB",
        (_convert("fp32", *ONE), CP_SYNC, DEEPSPEED, _convert("bf16 in shards", "--max-shard-size", "300MB", dtype="bf16")),
        (
            _times(CP, "fp32", "cp", 1.0), *_beside_deepspeed("fp32"), *_peak("fp32", "bf16 in shards"),
        ),
        repeats=1,
    ),
    Case(
        "ZeRO-2 in 64 MiB, warm cache", "small", "z2 3.5GB",
        (_convert("bf16", *ONE, dtype="bf16"), _convert("bf16 in 64 MiB", *ONE, dtype="bf16", limit=64 * MIB)),
        (_times(LIMITED, "bf16 in 64 MiB", "bf16", 1.3),), repeats=2,
    ),
    Case(
        "ZeRO-1", "small", "z1 1GB",
        (_convert("fp32", *ONE), _convert("bf16", *ONE, dtype="bf16"), _convert("fp16 in shards", "--max-shard-size", "50MB", dtype="fp16")),
        _peak("fp32", "bf16", "fp16 in shards"), repeats=1,
    ),
    _read_case("z3 1GB, Adam"),
    _read_case("z2 1GB, Adam"),
    Case(
        "10,000 tensors of 1 KB", "small", "10,000 x 1KB",
        (_convert("fp32", *ONE), Entrant("inspect", "lazyzero inspect", dtype=None)),
        (Bound(SMALL, "fp32", "best time", 10_000 * 1024 / 50e6, "over", "inspect"), *_peak("fp32")), repeats=6,
    ),
    Case(
        "1024 ranks, pieces of 4 KB", "small", "4KB pieces",
        (_convert("1 worker", *ONE, "--workers", "1"), _convert("2 workers", *ONE, "--workers", "2"), Entrant("start", "lazyzero --version", dtype=None)),
        (
            Bound(SMALL, "2 workers", "time", 4 * SOURCES["4KB pieces"].model.numel / 100e6, "over", "start"),
            _times(PIECES, "2 workers", "1 worker", 1.1, "best time"), *_peak("2 workers"),
        ),
    ),
    _huge_case("z3 70B", "fp32", "bf16"),
    _huge_case("z2 70B", "bf16"),
    Case(
        "LoRA, 70B frozen", "70b", "LoRA 70B",
        (Entrant("keep", options=("--dtype", "keep", *TAKEN), dtype="keep"),), _peak("keep", mib=96, promise=LORA), repeats=1,
    ),
    Case(
        "405B", "405b", "z3 405B",
        (
            Entrant("inspect", "lazyzero inspect", dtype=None),
            Entrant("dry run", options=("--dtype", "bf16", "--dry-run"), dtype=None),
        ),
        tuple(bound for label in ("inspect", "dry run") for bound in (Bound(HUGEST, label, "time", 30), *_peak(label, mib=128, promise=HUGEST))),
        repeats=1,
    ),
)  # fmt: skip

GROUPS: Final[dict[str, frozenset[str]]] = {
    "small": frozenset({"small"}),
    "large": frozenset({"70b", "405b"}),
    "70b": frozenset({"70b"}),
    "all": frozenset({"small", "70b", "405b"}),
}


def scratch_needed(spec: Spec) -> int:
    """Bytes of disk that a case over `spec` takes at its highest: the checkpoint and one fp32 output, or a few shards."""
    output = 20 * GB if spec.sparse else 4 * spec.model.numel
    stored = GB if spec.sparse else (12 if spec.adam else 4) * spec.model.numel
    module = 0 if spec.stage == 3 or spec.sparse else 2 * spec.model.numel
    return output + stored + module
