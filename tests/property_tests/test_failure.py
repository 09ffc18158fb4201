"""What a failed law prints is enough: its rules, the tree, a bundle that fails, the line to repeat
it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from shrinking_faults import FAULTS
from shrunk import failure, failure_of, subject_of

from kdtr.conformance.cli import main
from kdtr.contract import rule
from kdtr.property_tests import profiles
from kdtr.property_tests.failure import explain_failure
from kdtr.property_tests.laws import laws
from kdtr.property_tests.subject import Subject, load_subject
from kdtr.property_tests.watch import Example

ENGINES = Path(__file__).parent / "engines"
SEED = 0


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The line as a user types it, in an empty folder."""
    words = [str(Path(sys.executable).parent / words[0]), *words[1:], "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, [str(ENGINES), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, profiles.VARIABLE: "dev"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def lines_of(text: str, head: str) -> list[list[str]]:
    """The words of every line that begins so."""
    stripped = [line.strip() for line in text.splitlines()]
    return [shlex.split(line) for line in stripped if line.startswith(head)]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_bundle_fails_at_the_gate_and_the_line_shows_the_example_again(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry, subject = FAULTS[fault], subject_of(fault)
    failed = failure(fault, subject, SEED)
    assert failed is not None
    example, error = failed

    text = explain_failure(entry.law, example, error, subject, directory=str(tmp_path))

    assert f"law  {entry.law}" == text.splitlines()[0]
    assert f"  {entry.breaks}  {rule(entry.breaks)}" in text.splitlines()
    engine, *twins = subject if isinstance(subject, tuple) else (subject,)
    gates = lines_of(text, "kdtr gate ")
    assert 1 + len(twins) == len(gates)
    assert 1 == main(gates[0][1:])
    assert f"fault={fault}" in capsys.readouterr().out
    for gate in gates[1:]:
        assert 0 == main(gate[1:])  # the twin has no page edge
    (again,) = lines_of(text, "again ")
    repeated = run(again[1:], tmp_path)
    assert 1 == repeated.returncode, repeated.stdout
    (said,) = [line for line in str(error).splitlines() if line.startswith(engine.label)]
    assert said.removeprefix(engine.label) in repeated.stdout
    (tried,) = re.findall(r"^(\d+) examples of 1 laws: (\d+) failed$", repeated.stdout, re.M)
    assert tried[0] == tried[1]  # it alone


def test_the_report_of_pytest_has_the_tree_the_row_and_the_line(tmp_path: Path) -> None:
    words = ["pytest", "--pyargs", "kdtr.property_tests", "-k", f"test_{FAULTS[FAULT].law}"]
    words += ["--kdtr-engine", "shrinking_faults:make_engine"]
    words += ["--kdtr-engine-option", f"fault={FAULT}"]

    done = run(words, tmp_path)

    assert 1 == done.returncode, done.stdout
    shown = [line.removeprefix("E").strip() for line in done.stdout.splitlines()]
    at = next(i for i, line in enumerate(shown) if line.startswith("AssertionError"))
    assert "shrinking_faults:make_engine: cache after path (0, 1)" in shown[at]
    assert ["0: 0   <--", "1: 1   <--"] == shown[at + 1 : at + 3]
    assert f"law  {FAULTS[FAULT].law}" in shown
    assert 1 == len(lines_of(done.stdout, "again "))
    assert 1 == len([*tmp_path.glob("kdtr-failures/*.kdtr")])


FAULT = "missing_root_row"


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("the_walk_follows_the_targets", "first_child_only"),
        ("the_walk_stops_at_a_stop_token_and_at_the_length_limit", "no_stop_tokens"),
        ("the_walk_stops_at_a_stop_token_and_at_the_length_limit", "no_max_emitted"),
    ],
)
def test_a_walk_leaves_a_bundle_too(
    law: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs no forward: the bundle has the tree, and what the targets of the law accept in it."""
    subject = load_subject(fault, "planted_faults:make_engine", {"fault": fault})
    failed = failure_of(law, subject, SEED)
    assert failed is not None

    text = explain_failure(law, *failed, subject, directory=str(tmp_path))

    (gate,) = lines_of(text, "kdtr gate ")
    assert 1 == main(gate[1:]), capsys.readouterr().out
    assert "ACC-" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kdtr-example", "AAA="], "--kdtr-example: 44 laws are selected (a_batch_is_its_req"),
        (["--kdtr-example", "AAA=", "-k", "no_such_law"], "--kdtr-example: 0 laws are selected;"),
        (["--kdtr-example", "AXic", "-k", "verify_twice"], "--kdtr-example AXic: Invalid zlib"),
        (["--kdtr-example", "ex\u00e4mple", "-k", "verify_twice"], "printed, whole"),
        (["--kdtr-example", "AAA=", "-n", "2"], "expected one process: add -n 0"),
    ],
)
def test_an_example_of_no_law_is_refused_in_words(
    words: list[str], told: str, tmp_path: Path
) -> None:
    done = run(["pytest", "--pyargs", "kdtr.property_tests", *words], tmp_path)

    assert pytest.ExitCode.USAGE_ERROR == done.returncode
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert told in error
    assert "Traceback" not in done.stderr + done.stdout


def test_the_name_of_a_law_selects_it_alone() -> None:
    names = list(laws())

    assert [] == [(a, b) for a in names for b in names if a != b and f"test_{a}" in f"test_{b}"]


def test_options_are_written_as_they_are_read(tmp_path: Path) -> None:
    subject = Subject("e", None, "m:f", (("a", "3"), ("b", 3), ("c", "x y")))  # type: ignore[arg-type]
    error = AssertionError()
    error.add_note("@reproduce_failure('6.0', b'AAA=') as a decorator")
    law = next(name for name, law in laws().items() if law.subject == "engine")

    text = explain_failure(law, Example(law), error, subject, directory=str(tmp_path))

    (again,) = lines_of(text, "again ")
    assert ["a='3'", "b=3", "c=x y"] == [w for w in again if w[:2] in ("a=", "b=", "c=")]
    assert ["--kdtr-example", "AAA="] == again[-2:]
    assert "bundle  none: law" in text
