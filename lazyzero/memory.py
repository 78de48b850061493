"""Resident memory of this process, as the kernel accounts for it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_rss() -> int:
    """The most memory the process ever had resident, in bytes (VmHWM; elsewhere what psutil knows)."""
    return status().get("VmHWM") or _psutil_rss()


def status() -> dict[str, int]:
    """The Vm* and Rss* lines of /proc/self/status in bytes; empty where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines if line.startswith(("Vm", "Rss")))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _psutil_rss() -> int:
    import psutil

    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))
