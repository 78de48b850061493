"""The README's transcripts are run: what it shows is what a reader gets."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def commands() -> list[tuple[str, str]]:
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.strip()))
    return found


def measured_away(text: str) -> str:
    """Times, rates and memory differ from run to run; sizes of files do not."""
    text = re.sub(r"\d[\d.]* (s\b|[KMG]?B/s)", r"N \1", text)
    text = re.sub(r"about [\d.]+ [KMG]B of memory", "about N of memory", text)
    return re.sub(r"peak RSS [\d.]+ [KMG]B", "peak RSS N", text)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_command_line_transcript(workplace: Path) -> None:
    """Each command of the transcript prints what the README shows, in order."""
    assert len(commands()) >= 3
    for command, expected in commands():
        words = shlex.split(command)
        assert words[0] == "lazyzero"
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=True)
        assert measured_away(done.stdout.strip()) == measured_away(expected), command


def test_library_transcript(workplace: Path) -> None:
    """The Python transcript runs and shows what it shows."""
    (text,) = blocks("python")
    test = doctest.DocTestParser().get_doctest(text, {}, "README", "README.md", 0)
    assert len(test.examples) > 5
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_links_lead_somewhere() -> None:
    """Every relative link of the README names a file that is there."""
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
