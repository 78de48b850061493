"""Runs one command and writes down what it cost, as JSON. Started as a script by an isolated Python without site.

The highest resident memory that the kernel reports for a child is never below that of the process that forked it, so
this one is small: nothing is imported but what is built in. The child joins the memory cgroup before it executes the command,
and nothing else does.

usage: spawn.py RESULT CGROUP_PROCS_OR_- SYNC_OR_- COMMAND...
"""

import os
import sys
import time


def run(result: str, procs: str, sync: bool, command: list[str]) -> None:
    """Forks, waits, syncs if it should, and writes `result`."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            if procs != "-":
                with open(procs, "w") as file:  # noqa: PTH123
                    file.write("0")
            os.execvp(command[0], command)
        finally:
            os._exit(127)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # what it read and wrote is told until it is reaped
    ended = time.monotonic()
    with open(f"/proc/{pid}/io") as file:  # noqa: PTH123
        counters = dict(line.split(": ") for line in file.read().splitlines())
    _, status, usage = os.wait4(pid, 0)
    syncing = time.monotonic()
    if sync:
        os.sync()
    rows = {
        "exit": os.waitstatus_to_exitcode(status),
        "began": began,
        "seconds": ended - began,
        "sync_seconds": time.monotonic() - syncing,
        "peak_rss": usage.ru_maxrss * 1024,
        "user_seconds": usage.ru_utime,
        "system_seconds": usage.ru_stime,
        **{name: int(value) for name, value in counters.items()},
    }
    with open(result, "w") as file:  # noqa: PTH123
        file.write("{" + ", ".join(f'"{name}": {value}' for name, value in rows.items()) + "}\n")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3] == "sync", sys.argv[4:])
