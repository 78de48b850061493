"""DeepSpeed's own converter, and a tally of how it and ours compare."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable
from types import ModuleType

import pytest

VERSION = "0.19.8"
_TALLY = pytest.StashKey[Counter[str]]()


@pytest.fixture(scope="session")
def theirs() -> ModuleType:
    """The module `deepspeed.utils.zero_to_fp32`."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed = pytest.importorskip("deepspeed")
        from deepspeed.utils import zero_to_fp32
    assert deepspeed.__version__ == VERSION
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    module: ModuleType = zero_to_fp32
    return module


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Counts a verdict for the summary."""
    tally = request.config.stash.setdefault(_TALLY, Counter())

    def count(what: str) -> None:
        tally[what] += 1

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the tally."""
    tally = config.stash.get(_TALLY, Counter())
    if tally:
        terminalreporter.section("beside DeepSpeed")
    for what, count in sorted(tally.items()):
        terminalreporter.write_line(f"{count:5}  {what}")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leaves this folder out unless its marker is asked for."""
    return None if "deepspeed" in config.option.markexpr else True
