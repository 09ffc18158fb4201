"""docs/your-engine.md: its commands run in its order, and print what it shows.

On one small bundle for the whole corpus, in one mode; `make peers` runs the sections that need a
compiler too. The set-up is this environment's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/your-engine.md").read_text(encoding="utf-8")
PEERS = os.environ.get("KDTR_PEERS") == "1"
COMPILED = "## As a process", "## By files"  # sections that need a compiler


@dataclass(frozen=True, slots=True)
class Step:
    """A block of commands, and the lines that the page shows of what it prints."""

    commands: str
    shown: tuple[str, ...]


def steps(section: str) -> Iterator[Step]:
    blocks = re.findall(r"```sh\n(.*?)```\n(?:\n```text\n(.*?)```)?", section, re.S)
    for commands, shown in blocks:
        yield Step(commands, tuple(shown.splitlines()))


SECTIONS = re.split(r"^(?=## )", PAGE, flags=re.M)[2:]  # behind the title and the set-up
ASKED = [
    step for text in SECTIONS if PEERS or not text.startswith(COMPILED) for step in steps(text)
]


def lacking(shown: tuple[str, ...], printed: str) -> list[str]:
    """Lines of the page that were not printed, in this order; `...` stands for anything."""
    rest, lacks = iter(printed.splitlines()), []
    for line in shown:
        words = [re.escape(part.strip()) for part in line.split("...")]
        if line != "..." and not any(re.search(".*".join(words), one) for one in rest):
            lacks.append(line)
    return lacks


def test_a_line_that_is_not_printed_is_found_lacking() -> None:
    printed = "gate\n  expected  14\n  actual    15\npassed: 3 pass"

    assert [] == lacking(("  expected ...", "...", "passed: ..."), printed)
    assert ["  expected  13"] == lacking(("  expected  13",), printed)
    assert ["  expected  14"] == lacking(("  actual ...", "  expected  14"), printed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the set-up leaves: the clone, and kdtr and pytest on PATH (see `run`)."""
    folder = tmp_path_factory.mktemp("my-engine")
    (folder / "kdtr").symlink_to(ROOT)
    return folder


def run(commands: str, folder: Path) -> str:
    small = "kdtr/conformance/corpus/half-split.kdtr"
    commands = commands.replace("corpus=built-in", f"corpus={small} -k stepwise")
    for bundles in ("gate built-in", "gate --quick"):
        commands = commands.replace(bundles, f"gate {small} --mode stepwise")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTEST_ADDOPTS": "", "CXXFLAGS": "-O0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout  # 1: the gate failed, as the page shows
    return done.stdout


@pytest.mark.skipif(shutil.which("sed") is None, reason="no sed, which edits the examples")
@pytest.mark.parametrize("number", range(len(ASKED)))
def test_a_block_prints_what_the_page_shows(number: int, folder: Path) -> None:
    """Blocks build on those before them: a failure may be the consequence of an earlier one."""
    step = ASKED[number]

    printed = run(step.commands, folder)

    assert [] == lacking(step.shown, printed), printed
    if not any("FAIL" in line for line in step.shown):
        assert "FAIL" not in printed, printed


def test_what_is_edited_is_one_line_of_the_example() -> None:
    """sed changes nothing, and says nothing, where its pattern is not there."""
    edits = dict(re.findall(r"^sed -i\.sound 's/(.*?)/.*?/' (\S+)$", PAGE, re.M))

    assert {"my_engine.py", "cpp-engine/session.hpp"} == set(edits.values())
    for pattern, file in edits.items():
        name = {"my_engine.py": "python/traced_engine.py"}.get(file, file)
        example = (ROOT / "docs/examples" / name).read_text(encoding="utf-8")
        assert 1 == len(re.findall(pattern.replace("()", r"\(\)").replace(" + ", r" \+ "), example))


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/your-engine.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
