"""docs/your-engine.md: its commands run in its order, and end and print as it says.

With `make peers` as they stand, and with the sections that need a compiler; else on one small
bundle for the whole corpus, in one mode. The set-up is this environment's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.contract import CheckpointError, ModelConfig, check_tensors
from kdtr.kdtr_format import export_checkpoint, open_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/your-engine.md").read_text(encoding="utf-8")
PEERS = os.environ.get("KDTR_PEERS") == "1"
COMPILED = "## As a process", "## By files"  # sections that need a compiler
END = "the line ended with "


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


@dataclass(frozen=True, slots=True)
class Ran:
    """A line of a block: its exit code, and what it printed."""

    command: str
    code: int
    printed: str


JUDGES = re.compile(r"(kdtr gate|kdtr judge|pytest|faulty) ")
OUTCOME = re.compile(r"^\S.* (passed|FAILED): .*\b[1-9]\d* comparisons of ", re.M)


def otherwise(step: Step, ran: list[Ran]) -> list[str]:
    """What a block did otherwise than the page says.

    Every command succeeds, but as many judgements as the page shows failing. What judges says so in
    one line, whose end is its exit code, and has compared something.
    """
    printed = "\n".join(one.printed for one in ran)
    told = [f"not printed: {line}" for line in lacking(step.shown, printed)]
    failing = 0
    for one in ran:
        outcomes, expected = OUTCOME.findall(one.printed), 0
        if JUDGES.match(one.command):
            if len(outcomes) != 1:
                told.append(f"{len(outcomes)} outcomes, expected 1: {one.command}")
            expected = int("FAILED" in outcomes)
            failing += expected
        if one.code != expected:
            told.append(f"exit code {one.code}, expected {expected}: {one.command}")
    shown = int(any("FAIL" in line for line in step.shown))
    if failing != shown:
        told.append(f"{failing} judgements failed, the page shows {shown}")
    return told


def test_a_line_that_is_not_printed_is_found_lacking() -> None:
    printed = "gate\n  expected  14\n  actual    15\npassed: 3 pass"

    assert [] == lacking(("  expected ...", "...", "passed: ..."), printed)
    assert ["  expected  13"] == lacking(("  expected  13",), printed)
    assert ["  expected  14"] == lacking(("  actual ...", "  expected  14"), printed)


PASSED = "gate passed: 3 pass; 40 comparisons of 9 rows in 1.0 s"
QUICK = "quick corpus (1 of 8 cases, of 1 bundle) passed: 3 pass; 40 comparisons of 9 rows in 1.0 s"
FAILED = "gate FAILED: 2 pass, 1 fail; 40 comparisons of 9 rows in 1.0 s"
GATE = "kdtr gate built-in --engine e"


@pytest.mark.parametrize(
    ("shown", "ran", "told"),
    [
        ((), [("cp a b", 0, ""), (GATE, 0, PASSED)], []),
        ((), [("kdtr gate --quick --engine e", 0, QUICK)], []),
        (("FAIL  ...",), [(GATE, 1, f"FAIL  x\n{FAILED}")], []),
        (
            (),
            [("cp a b", 1, "cp: a: no such file"), (GATE, 0, PASSED)],
            ["exit code 1, expected 0: cp a b"],
        ),
        ((), [(GATE, 1, FAILED)], ["1 judgements failed, the page shows 0"]),
        (
            ("FAIL  ...",),
            [(GATE, 0, f"FAIL  x\n{PASSED}")],
            ["0 judgements failed, the page shows 1"],
        ),
        ((), [(GATE, 1, PASSED)], [f"exit code 1, expected 0: {GATE}"]),
        ((), [(GATE, 0, "")], [f"0 outcomes, expected 1: {GATE}"]),
        (
            (),
            [(GATE, 0, "gate passed: no case ran; 0 comparisons of 0 rows in 0.1 s")],
            [f"0 outcomes, expected 1: {GATE}"],
        ),
        (
            (),
            [(GATE, 2, "CaseError: no")],
            [f"0 outcomes, expected 1: {GATE}", f"exit code 2, expected 0: {GATE}"],
        ),
    ],
    ids=range(10),
)
def test_what_a_block_does_otherwise_is_told(
    shown: tuple[str, ...], ran: list[tuple[str, int, str]], told: list[str]
) -> None:
    assert told == otherwise(Step("", shown), [Ran(*one) for one in ran])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the set-up leaves: the clone, and kdtr and pytest on PATH (see `run`)."""
    folder = tmp_path_factory.mktemp("my-engine")
    (folder / "kdtr").symlink_to(ROOT)
    return folder


def on_a_small_bundle(commands: str) -> str:
    small = "kdtr/conformance/corpus/half-split.kdtr"
    commands = commands.replace("corpus=built-in", f"corpus={small} -k stepwise")
    return re.sub("gate (built-in|--quick)", f"gate {small} --mode stepwise", commands)


def run(commands: str, folder: Path) -> list[Ran]:
    """Line by line in one shell: no failure is lost to the line behind it."""
    lines = commands.replace("\\\n", "").splitlines()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    brief = {} if PEERS else {"CXXFLAGS": "-O0"}
    done = subprocess.run(
        ["sh", "-c", "\n".join(f"{line}\nprintf '\\n{END}%s\\n' $?" for line in lines)],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTEST_ADDOPTS": "", **brief},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    *parts, rest = re.split(rf"\n{END}(\d+)\n", done.stdout)
    assert ("", 2 * len(lines)) == (rest, len(parts)), done.stdout
    return [
        Ran(line, int(code), printed)
        for line, printed, code in zip(lines, parts[::2], parts[1::2], strict=True)
    ]


@pytest.mark.skipif(shutil.which("sed") is None, reason="no sed, which edits the examples")
@pytest.mark.parametrize("number", range(len(ASKED)))
def test_a_block_does_what_the_page_shows(number: int, folder: Path) -> None:
    """Blocks build on those before them: a failure may be the consequence of an earlier one."""
    step = ASKED[number]

    ran = run(step.commands if PEERS else on_a_small_bundle(step.commands), folder)

    assert [] == otherwise(step, ran), "\n".join(one.printed for one in ran)


def test_what_is_edited_is_one_line_of_the_example() -> None:
    """sed changes nothing, and says nothing, where its pattern is not there."""
    edits = dict(re.findall(r"^sed 's/(.*?)/.*?/' \S+\.sound > (\S+)$", PAGE, re.M))

    assert {"my_engine.py", "cpp-engine/session.hpp"} == set(edits.values())
    for pattern, file in edits.items():
        name = {"my_engine.py": "python/traced_engine.py"}.get(file, file)
        example = (ROOT / "docs/examples" / name).read_text(encoding="utf-8")
        assert 1 == len(re.findall(pattern.replace("()", r"\(\)").replace(" + ", r" \+ "), example))


@pytest.fixture
def load() -> Callable[[object], tuple[ModelConfig, Mapping[str, np.ndarray]]]:
    """The page's `load`, with a model that is what it is given."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {"Model": lambda config, tensors: (config, tensors)}
    exec(block, names)
    return names["Engine"]().load  # type: ignore[no-any-return]


def test_the_load_of_the_page_reads_all_that_a_source_may_be(
    load: Callable[[object], tuple[ModelConfig, Mapping[str, np.ndarray]]], tmp_path: Path
) -> None:
    bundle = ROOT / "conformance/corpus/half-split.kdtr"
    config, tensors = open_model(bundle).config, dict(open_model(bundle).tensors)
    directory = tmp_path / "hf"
    export_checkpoint(bundle, directory)

    for source in (bundle, str(bundle), directory, (config, tensors)):
        read, arrays = load(source)

        assert config == read
        assert all(np.array_equal(arrays[name], tensors[name]) for name in tensors)


def test_the_load_of_the_page_refuses_what_is_no_model(
    load: Callable[[object], object], tmp_path: Path
) -> None:
    opened = open_model(ROOT / "conformance/corpus/half-split.kdtr")
    lacking_one = {name: a for name, a in opened.tensors.items() if name != "lm_head.weight"}

    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load((opened.config, lacking_one))
    with pytest.raises(CheckpointError, match="expected a Hugging Face directory, a"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("function", [open_model, check_tensors])
def test_signatures_on_the_page_are_those_of_the_code(function: Callable[..., object]) -> None:
    """As they are written, but for what a name is short for."""
    assert f"| `{function.__name__}{signature(function)}` |".replace("'", "") in PAGE


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/your-engine.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
