"""`kdtr gate` with reports: written beside the verdict, refused before the run, the same twice."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdtr.conformance.report_files import add_report_options, begin_reports

from .conftest import INFO, every_kind

Kdtr = Callable[..., SimpleNamespace]
KINDS = {"html": "r.html", "markdown": "r.md", "junit": "r.xml", "jsonl": "r.jsonl"}
ENGINES = Path(__file__).resolve().parents[1] / "engines"
FAULTY = ("--engine", "planted_faults:make_engine", "--engine-option", "fault=root_low")


def options(folder: Path, **kinds: str) -> list[str]:
    return [word for kind, name in kinds.items() for word in (f"--{kind}", str(folder / name))]


def test_every_kind_is_written_beside_the_verdict(kdtr: Kdtr, small: Path, tmp_path: Path) -> None:
    asked = options(tmp_path, **KINDS, parquet="r.parquet")

    run = kdtr("gate", small, *FAULTY, *asked, "--annotations", "github")

    assert (1, "") == (run.code, run.err)
    assert {*KINDS.values(), "r.parquet"} == {path.name for path in tmp_path.iterdir()}
    assert all(path.stat().st_size > 500 for path in tmp_path.iterdir())
    assert re.search(r"\ngate FAILED: .*\n::error title=POS-1 ", run.out)
    head = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])
    assert head["command"].startswith(f"kdtr gate {small} --engine planted_faults:make_engine")
    assert [str(small)] == [bundle["path"] for bundle in head["bundles"]]
    assert head["seconds"] > 0


def test_two_runs_write_the_same_but_for_the_header(small: Path, tmp_path: Path) -> None:
    """Two processes, whose sets are in different orders."""
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    command = [str(Path(sys.executable).with_name("kdtr")), "gate", str(small), *FAULTY]
    texts: list[dict[str, str]] = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ENGINES)}
        words = [*command, *options(tmp_path, **KINDS, parquet="r.parquet")]
        run = subprocess.run(words, env=environment, capture_output=True, check=False)
        assert 1 == run.returncode, run.stderr
        texts.append({name: (tmp_path / name).read_text() for name in KINDS.values()})
        table = pq.read_table(io.BytesIO((tmp_path / "r.parquet").read_bytes()))
        texts[-1]["r.parquet"] = str(table.replace_schema_metadata().to_pylist())

    def without_header(text: str) -> str:
        """Without when it began, and how long it took."""
        text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "DAY", text)
        return re.sub(r'[\d.]+ s\b|"seconds": [\d.]+|time="[\d.]+"', "SECONDS", text)

    one, other = [{name: without_header(text) for name, text in of.items()} for of in texts]
    assert one == other
    body = [of["r.jsonl"].split("\n", 1)[1] for of in texts]
    assert body[0] == body[1]


def test_without_options_nothing_is_written(kdtr: Kdtr, small: Path, tmp_path: Path) -> None:
    run = kdtr("gate", small, "--engine", "host", "--case", "ar")

    assert 0 == run.code
    assert [] == list(tmp_path.iterdir())
    assert "::" not in run.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--html", "no/r.html"], "CaseError: --html no/r.html: no directory no; make it first"),
        (["--html", "."], "CaseError: --html . is a directory; expected the file to write"),
        (
            ["--html", "r", "--junit", "r"],
            "CaseError: --junit r is the file of --html too; expected one file for each",
        ),
    ],
)
def test_a_file_that_could_not_be_written_is_refused_before_the_engine_is_loaded(
    kdtr: Kdtr,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    run = kdtr("gate", small, "--engine", "no_such_module:make", *words)

    assert (2, "", f"kdtr: {text}\n") == (run.code, run.out, run.err)


def test_a_bundle_is_not_written_over(kdtr: Kdtr, small: Path) -> None:
    run = kdtr("gate", small, "--engine", "host", "--jsonl", small)

    assert 2 == run.code
    assert f"--jsonl {small} is a bundle to read; expected another file" in run.err


def test_a_table_without_pyarrow_is_refused_before_the_run(
    kdtr: Kdtr, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    run = kdtr("gate", small, "--engine", "no_such_module:make", *options(tmp_path, parquet="p"))

    assert 2 == run.code
    assert "install the extra: pip install 'kdtr[parquet]'" in run.err


def test_a_refused_run_writes_nothing_and_keeps_what_is_there(
    kdtr: Kdtr, small: Path, tmp_path: Path
) -> None:
    earlier = '<meta name="generator" content="kdtr">'
    (tmp_path / "r.html").write_text(earlier)

    run = kdtr("gate", small, "--engine", "host", "--case", "none", *options(tmp_path, **KINDS))

    assert 2 == run.code
    assert {"r.html": earlier} == {path.name: path.read_text() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("kind", [*KINDS])
def test_what_is_no_report_is_not_written_over(
    kdtr: Kdtr, small: Path, tmp_path: Path, kind: str
) -> None:
    """An engine's own source, say; nor is a report of another kind."""
    source = tmp_path / "my_engine.py"
    source.write_text("def make_engine():\n")

    run = kdtr("gate", small, "--engine", "my_engine:make_engine", f"--{kind}", source)

    said = f"--{kind} {source} is there already and is no report of `kdtr --{kind}`; expected a new"
    refused = f"kdtr: CaseError: {said} file, or an earlier report to write over\n"
    assert (2, "", refused) == (run.code, run.out, run.err)
    assert "def make_engine():\n" == source.read_text()


def test_earlier_reports_and_empty_files_are_written_over(
    kdtr: Kdtr, small: Path, tmp_path: Path
) -> None:
    words = ("gate", small, "--engine", "host", "--case", "ar", *options(tmp_path, **KINDS))
    for name in KINDS.values():
        (tmp_path / name).touch()

    first, second = kdtr(*words), kdtr(*words)
    swapped = kdtr("gate", small, "--engine", "host", "--html", tmp_path / KINDS["junit"])

    assert (0, 0, 2) == (first.code, second.code, swapped.code), first.err + second.err
    assert all((tmp_path / name).stat().st_size for name in KINDS.values())


def test_any_command_can_have_them(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_report_options(parser)
    args = parser.parse_args(options(tmp_path, markdown="r.md"))

    reports = begin_reports(args, ["kdtr", "judge", "r.kdtr"], "offline", [])
    printed = reports.write(INFO, every_kind(), 2.0)

    assert [] == printed
    assert "kdtr judge r.kdtr" in (tmp_path / "r.md").read_text()
