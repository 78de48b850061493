"""Fuzzing led by coverage: atheris runs a target in a process of its own, with our mutations beside its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

_MOST_BYTES = 1 << 14


def fuzz(target: str, seconds: float, seed: int, findings: Path) -> int:
    """Runs atheris on a target; 1 if it found something, which is then in `findings`."""
    findings.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        from tests.fuzz.seeds import seeds

        for number, data in enumerate(seeds(target)):
            (Path(corpus) / str(number)).write_bytes(data)
        command = [
            sys.executable, "-m", "tests.fuzz.guided", target, corpus, f"-max_total_time={max(1, int(seconds))}",
            f"-seed={seed + 1}", f"-max_len={_MOST_BYTES}", f"-artifact_prefix={findings}/{target}-", "-timeout=20",
            "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=0", "-close_fd_mask=0",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if "stat::number_of_executed_units" in line]
    sys.stdout.write(f"{target}: {told[0].split()[-1] if told else 'no'} inputs, exit code {done.returncode}\n")
    if done.returncode:
        sys.stdout.write(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n")
    sys.stdout.flush()
    if not any(findings.iterdir()):
        findings.rmdir()
    return 1 if done.returncode else 0


def main() -> None:
    """The process under atheris: lazyzero is imported with instrumentation, then libFuzzer takes over."""
    import atheris

    with atheris.instrument_imports(include=["lazyzero"]):
        from tests.fuzz import engine, targets
    from tests.fuzz.mutate import mutated
    from tests.fuzz.seeds import seeds

    target = sys.argv[1]
    root, others = targets.scratch(), seeds(target)

    def one(data: bytes) -> None:
        _, finding = engine.attempt(target, data, root)
        if finding is not None:
            raise AssertionError(finding)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        if seed % 2:
            return bytes(atheris.Mutate(data, most))
        return mutated(data, others, random.Random(seed))[:most]

    atheris.Setup([sys.argv[0], *sys.argv[2:]], one, custom_mutator=mutate)
    import resource
    import signal

    signal.signal(signal.SIGVTALRM, engine.hang)
    with Path("/proc/self/statm").open() as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(
        resource.RLIMIT_AS, (now + engine.MEMORY + (64 << 20), resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    try:
        atheris.Fuzz()
    finally:
        os.rmdir(root)


if __name__ == "__main__":
    main()
