"""What `lazyzero inspect` tells: the checkpoint's facts, and what a conversion with given options would write and need."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lazyzero.checkpoint import Checkpoint
from lazyzero.export.budget import allot
from lazyzero.export.options import Options
from lazyzero.export.plan import Plan
from lazyzero.export.run import plan_export
from lazyzero.export.units import show_size
from lazyzero.tensor import LazyTensor

_TORCH_RSS = 200 << 20  # bytes; what importing the CPU build of torch costs, about


def describe(checkpoint: Checkpoint, options: Options, *, tensors: bool) -> dict[str, Any]:
    """The facts as plain values, for JSON; `tensors` adds a row for each name."""
    plan = plan_export(checkpoint, options)
    owners = [tensor for tensor in checkpoint.values() if tensor.tied_to is None]
    facts: dict[str, Any] = {
        "checkpoint": checkpoint.path,
        "directory": checkpoint.directory,
        "layout": checkpoint.layout,
        "deepspeed": checkpoint.version,
        "ranks": checkpoint.world_size,
        "tensors": len(checkpoint),
        "parameters": sum(tensor.numel for tensor in owners if tensor.role != "buffer"),
        "roles": {role: _sum(owners, role) for role in ("trainable", "frozen", "module", "buffer")},
        "dtypes": dict(Counter(str(tensor.dtype) for tensor in owners)),
        "tied": checkpoint.tied,
        "missing": checkpoint.missing,
        "warnings": list(checkpoint.warnings),
        "output": {
            "format": plan.format,
            "dtype": str(options.dtype) if options.dtype else "keep",
            "files": [
                {"name": shard.filename, "tensors": len(shard.entries), "bytes": shard.nbytes} for shard in plan.shards
            ],
            "index": plan.index,
            "bytes": plan.total_size,
            "peak_memory": _peak(checkpoint, plan, options),
        },
    }
    if tensors:
        facts["entries"] = [_row(name, tensor) for name, tensor in checkpoint.items()]
    return facts


def _peak(checkpoint: Checkpoint, plan: Plan, options: Options) -> int:
    """Bytes, about: what is held now, the windows, and torch where it is needed. Raises InvalidRequest for too little."""
    torch = plan.format == "bin"
    entries = (entry for shard in plan.shards for entry in shard.entries)
    cast = any(placeholder.dtype != checkpoint[name].dtype for name, placeholder in entries)
    budget = allot(options.max_memory, options.workers, torch=torch)
    return budget.peak(plan.total_size, cast=cast) + (_TORCH_RSS if torch else 0)


def _sum(tensors: list[LazyTensor], role: str) -> dict[str, int]:
    chosen = [tensor for tensor in tensors if tensor.role == role]
    return {"tensors": len(chosen), "elements": sum(t.numel for t in chosen), "bytes": sum(t.nbytes for t in chosen)}


def _row(name: str, tensor: LazyTensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "role": tensor.role,
        "tied_to": tensor.tied_to,
    }


def notices(checkpoint: Checkpoint) -> list[str]:
    """What a user has to know before a conversion, a sentence each: its warnings, and the names that come without values."""
    told = list(checkpoint.warnings)
    if checkpoint.missing:
        names = list(checkpoint.missing)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        told.append(
            f"no file holds the values of {', '.join(names[:5])}{more}; they are left out "
            f"({checkpoint.missing[names[0]]})"
        )
    return told


def show(facts: dict[str, Any]) -> str:
    """The facts for a person."""
    version = f", written by DeepSpeed {facts['deepspeed']}" if facts["deepspeed"] else ""
    lines = [
        f"{facts['directory']}",
        f"  {facts['layout']}, {facts['ranks']} rank{'s' if facts['ranks'] != 1 else ''}{version}",
        f"  {facts['tensors']} tensors, {facts['parameters']:,} parameters",
    ]
    names = {"trainable": "trained", "frozen": "frozen", "module": "from the module's own copy", "buffer": "buffers"}
    for role, row in facts["roles"].items():
        if row["tensors"]:
            lines.append(
                f"    {row['tensors']:6} {names[role]}, {row['elements']:,} elements, {show_size(row['bytes'])}"
            )
    lines.append("  stored as " + ", ".join(f"{dtype} ({count})" for dtype, count in facts["dtypes"].items()))
    for alias, owner in facts["tied"].items():
        lines.append(f"  tied: {alias} = {owner}")
    for name, why in facts["missing"].items():
        lines.append(f"  missing: {name}: {why}")
    lines += [f"  warning: {warning}" for warning in facts["warnings"]]
    lines += _show_output(facts["output"])
    lines += [_show_entry(row) for row in facts.get("entries", ())]
    return "\n".join(lines)


def _show_output(output: dict[str, Any]) -> list[str]:
    files = output["files"]
    count = "1 file" if len(files) == 1 else f"{len(files)} shards and an index"
    lines = [
        f"a conversion to {output['format']}, {output['dtype']}: {count}, {show_size(output['bytes'])} on disk, "
        f"about {show_size(output['peak_memory'])} of memory"
    ]
    shown = files if len(files) <= 12 else [*files[:10], None, files[-1]]
    for file in shown:
        lines.append(
            "  ..." if file is None else f"  {file['name']}  {file['tensors']} tensors, {show_size(file['bytes'])}"
        )
    return lines


def _show_entry(row: dict[str, Any]) -> str:
    tied = f"  tied to {row['tied_to']}" if row["tied_to"] else ""
    return f"  {row['name']}  {row['shape']}  {row['dtype']}  {row['role']}{tied}"
