"""docs/reports.md says what is in the files, field by field, and shows pictures that are small."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.comparison_table import COLUMNS, comparison_table
from kdtr.conformance.report_files.json_lines import SCHEMA, json_lines
from kdtr.conformance.report_files.options import add_report_options

from .conftest import SIX

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "reports.md").read_text(encoding="utf-8")


def fields_of(kind: str) -> list[str]:
    """Names in backticks of the kind's line, but for those in brackets."""
    section = PAGE[PAGE.index("## JSON lines") : PAGE.index("## Parquet")]
    (cell,) = re.findall(rf"^\| `{kind}` \| (.*) \|$", section, re.MULTILINE)
    return re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cell))


def test_fields_of_json_lines_are_told(run: Run) -> None:
    seen = {line["kind"]: line for line in map(json.loads, json_lines(run).splitlines())}

    assert 7 == len(seen)
    for kind, line in seen.items():
        assert [name for name in line if name != "kind"] == fields_of(kind), kind
    assert f"Schema {SCHEMA}:" in PAGE


def test_fields_within_a_finding_are_told(run: Run) -> None:
    (finding,) = [
        line
        for line in map(json.loads, json_lines(run).splitlines())
        if line["kind"] == "finding" and line["drawing"]
    ]
    names = {*finding["excerpt"], *finding["excerpt"]["rows"][0], *finding["drawing"]}
    names |= {*finding["looks_like"][0], *finding["drawing"]["path"]}

    assert set() == {name for name in names if f"`{name}`" not in PAGE}


def test_columns_of_the_table_are_told() -> None:
    told = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE)

    assert [(column.name, column.kind, column.what) for column in COLUMNS] == told


@pytest.mark.parametrize(
    ("file", "write", "shows"),
    [
        ("report.jsonl", json_lines, "1 POS-1 positions are L + index\n"),
        ("report.parquet", comparison_table, "stage: string"),
    ],
)
def test_the_snippets_run(
    run: Run, tmp_path: Path, file: str, write: Callable[[Run], bytes], shows: str
) -> None:
    blocks = re.findall(r"```\n(python -c .*?)```", PAGE, re.DOTALL)
    (snippet,) = [block for block in blocks if file in block]
    (tmp_path / file).write_bytes(write(run))
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    ran = subprocess.run(
        ["bash", "-c", snippet], cwd=tmp_path, env=here, capture_output=True, text=True, check=False
    )

    assert (0, "") == (ran.returncode, ran.stderr)
    assert shows in ran.stdout


def test_the_example_is_the_one_that_is_tested() -> None:
    """Of the page, and in the docstring of its engine."""
    engine = (DOCS / "examples/python/six_faults.py").read_text(encoding="utf-8")
    for text in (PAGE, ast.get_docstring(ast.parse(engine)) or ""):
        (command,) = re.findall(r"kdtr gate conformance/corpus/\{(.*?)\}\.kdtr", text)
        assert list(SIX) == command.split(",")


def test_every_option_is_told() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_report_options(parser)

    flags = [flag for action in parser._actions for flag in action.option_strings]
    assert flags
    assert [] == [flag for flag in flags if f"| `{flag} " not in PAGE]


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[(.+?)\]\((images/[\w-]+\.png)\)", PAGE)

    assert 3 == len(pictures)
    for alternative, path in pictures:
        assert len(alternative) > 20  # for who cannot see it
        assert (DOCS / path).stat().st_size < 300_000
        assert (DOCS / path).read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_a_page_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("browser.py")), "no.html", "a", "b"]

    done = subprocess.run(
        [*command, "p.png"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert 1 == done.returncode
    assert "no page no.html; write it first: kdtr gate ... --html no.html\n" == done.stderr
