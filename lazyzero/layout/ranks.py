"""Which files of a tag directory belong together: one precision, one world, every rank present."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lazyzero.container.brief import brief
from lazyzero.container.source import Source
from lazyzero.errors import InconsistentCheckpoint, MissingFiles, UnsupportedLayout
from lazyzero.layout.discover import FileSet
from lazyzero.layout.states import OptimStates, as_int, read_optim
from lazyzero.layout.steps import step_of

_MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True)
class Optimizer:
    """All ranks' optimizer files in rank order, and warnings about files set aside."""

    ranks: tuple[OptimStates, ...]
    warnings: tuple[str, ...]

    @property
    def stage(self) -> int | None:
        """As recorded; None in BF16_Optimizer's files."""
        return self.ranks[0].stage

    @property
    def world_size(self) -> int:
        """The number of partitions."""
        return len(self.ranks)


def read_ranks(files: FileSet, world: int | None = None) -> Optimizer:
    """Reads the optimizer files of one model-parallel rank (`FileSet.of_model_rank` picks it out of several).

    `world` is the number of ranks where something else than `partition_count` records it, as experts need: their groups
    have fewer partitions than there are ranks. Raises MissingFiles naming the ranks, InconsistentCheckpoint, or
    UnsupportedLayout when `files` are of several model-parallel ranks.
    """
    prefix, warnings = _choose_prefix(files)
    chosen = files.optim[prefix]
    parallel = sorted({mp for _, mp in chosen})
    if len(parallel) > 1:
        raise UnsupportedLayout(
            f"{files.directory}: expected the files of one model-parallel rank, found those of ranks {spans(parallel)}"
        )
    mp = parallel[0]
    by_rank = {dp: path for (dp, _), path in chosen.items()}
    first = read_optim(by_rank[min(by_rank)])
    if world is None:
        world = _world(first, len(by_rank))
    elif not 0 < world <= _MOST_RANKS:
        raise InconsistentCheckpoint(f"{files.directory}: expected a number of ranks, found {world}; a file is damaged")
    surplus = [rank for rank in sorted(by_rank) if rank >= world]
    if surplus:
        names = _names([by_rank[rank] for rank in surplus])
        warnings.append(
            f"set aside {names}: rank {min(by_rank)} records {world} partitions, so they are of an earlier run"
        )
    missing = [rank for rank in range(world) if rank not in by_rank]
    if missing:
        raise MissingFiles(_missing_message(files.directory, by_rank, world, prefix, mp))
    ranks = tuple(first if rank == min(by_rank) else read_optim(by_rank[rank]) for rank in range(world))
    _agree(ranks)
    return Optimizer(ranks, tuple(warnings))


def _choose_prefix(files: FileSet) -> tuple[str, list[str]]:
    """The newest set where files of several precisions lie side by side."""
    if len(files.optim) == 1:
        return next(iter(files.optim)), []
    newest = {
        prefix: max(Source.open(path).mtime_ns for path in ranks.values()) for prefix, ranks in files.optim.items()
    }
    best = max(newest, key=lambda prefix: (_matches_config(files, prefix), newest[prefix]))
    aside = [path for prefix, ranks in files.optim.items() if prefix != best for path in ranks.values()]
    kept = _names(list(files.optim[best].values()))
    return best, [f"set aside {_names(aside)}: of another precision than {kept}, an earlier run's"]


def _matches_config(files: FileSet, prefix: str) -> bool:
    """Whether the model file's own configuration calls for this prefix (bf16 on: `bf16_`, since 0.6.2)."""
    from lazyzero.layout.states import read_model

    paths = [*files.model.values(), *files.zero_model.values()]
    if not paths:
        return False
    config = read_model(paths[0]).root.get("ds_config")
    if not isinstance(config, dict):
        return False
    bf16 = config.get("bf16") or config.get("bfloat16")
    return (prefix == "bf16_") == bool(isinstance(bf16, dict) and bf16.get("enabled"))


def _world(first: OptimStates, found: int) -> int:
    """The number of partitions as recorded: an int, or a list of equal ints, one per group."""
    recorded = first.state.get("partition_count")
    counts = recorded if isinstance(recorded, list) else [recorded]
    if recorded is None or not counts:
        return found
    values = {as_int(count) for count in counts}
    for value in values:
        if value is None or not 0 < value <= _MOST_RANKS:
            raise InconsistentCheckpoint(
                f"{first.path}: expected a partition_count from 1 to {_MOST_RANKS}, found {brief(recorded)}; the file is damaged"
            )
    if len(values) > 1:
        raise UnsupportedLayout(f"{first.path}: partition_count {brief(recorded)} differs between groups (experts?)")
    return values.pop() or found


def _agree(ranks: tuple[OptimStates, ...]) -> None:
    """Ranks of two runs must not be mixed."""
    first = ranks[0]
    known = _marks(first)
    for other in ranks[1:]:
        for what, found in _marks(other).items():
            if known[what] is None and what == "step":
                known[what] = found
            elif found != known[what] and not (found is None and what == "step"):
                raise InconsistentCheckpoint(
                    f"{other.path}: has {what} {found}, {os.path.basename(first.path)} has {known[what]}; "
                    "the files are of different runs"
                )


def _marks(rank: OptimStates) -> dict[str, object]:
    """What all ranks of one save have in common. Ranks whose partitions are empty have counted no steps."""
    return {
        "zero_stage": rank.stage,
        "ds_version": rank.version,
        "partition_count": _counts(rank),
        "step": step_of(rank.state),
    }


def _counts(rank: OptimStates) -> str:
    """For comparison: groups of experts may be in another order on each rank."""
    counts = rank.state.get("partition_count")
    return brief(sorted(map(repr, counts)) if isinstance(counts, list) else counts, 200)


def _missing_message(directory: str, by_rank: dict[int, str], world: int, prefix: str, mp: int) -> str:
    missing = [rank for rank in range(world) if rank not in by_rank]
    name = f"{prefix}zero_pp_rank_{missing[0]}_mp_rank_{mp:02d}_optim_states.pt"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"{directory}: optimizer files of some ranks are missing: have {spans(sorted(by_rank))}; need 0-{world - 1}; "
        f"not found: {name}{more}; copy them from the node that wrote them, or add its directory with --also"
    )


def spans(numbers: list[int]) -> str:
    """[0, 1, 2, 4] as "0-2, 4"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"


def _names(paths: list[str]) -> str:
    names = sorted(os.path.basename(path) for path in paths)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
