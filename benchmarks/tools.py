"""The commands that are measured: lazyzero, DeepSpeed's converter, cp, and what they are compared with."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

REPOSITORY: Final = Path(__file__).parents[1]
DEEPSPEED: Final = "0.19.8"
_TAKE: Final = Path(__file__).with_name("take.py")

Tool = Literal["lazyzero convert", "lazyzero inspect", "lazyzero --version", "deepspeed", "cp", "import torch"]


@dataclass(frozen=True, slots=True)
class Tools:
    """Where the tools are. `deepspeed` is the Python of an environment that has it, None without one."""

    python: str = sys.executable
    deepspeed: str | None = None

    def why_not(self, tool: Tool, options: tuple[str, ...] = ()) -> str | None:
        """Why a tool cannot be run here; None if it can."""
        if tool == "deepspeed":
            return _why_no_deepspeed(self.deepspeed)
        needs_torch = tool == "import torch" or "bin" in options
        if needs_torch and importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        return None

    def command(self, tool: Tool, options: tuple[str, ...], source: Path, output: Path, notes: Path) -> list[str]:
        """The command line of a tool that reads `source` and writes below `output`."""
        match tool:
            case "lazyzero convert":
                streamed = "--on-shard" in options
                chosen = [self._take(notes) if option == "TAKE" else option for option in options]
                force = ["--force"] if streamed else []
                return [self.python, "-m", "lazyzero", "convert", str(source), str(output), "--quiet", *chosen, *force]
            case "lazyzero inspect":
                return [self.python, "-m", "lazyzero", "inspect", str(source), *options]
            case "lazyzero --version":
                return [self.python, "-m", "lazyzero", "--version"]
            case "import torch":
                return [self.python, "-c", "import torch"]
            case "deepspeed":
                return [
                    self.deepspeed or "python",
                    "-m",
                    "deepspeed.utils.zero_to_fp32",
                    str(source),
                    str(output),
                    *options,
                ]
            case "cp":
                # The weights lie in the optimizer files, beside holes, which cp finds and leaves out.
                files = sorted(source.glob("*/*_optim_states.pt"))
                output.mkdir()
                return ["cp", *map(str, files), str(output)]

    def _take(self, notes: Path) -> str:
        return shlex.join([self.python, "-I", "-S", str(_TAKE), str(notes)])


def _why_no_deepspeed(python: str | None) -> str | None:
    if python is None:
        return f"no environment with DeepSpeed {DEEPSPEED} was given (--deepspeed)"
    asked = "import importlib.metadata as m; print(m.version('deepspeed'))"
    try:
        done = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{python} cannot be run: {error.strerror}"
    version = done.stdout.strip()
    return None if version == DEEPSPEED else f"expected DeepSpeed {DEEPSPEED}, found {version or 'none'}"
