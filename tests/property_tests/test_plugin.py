"""The pytest plugin: what must not pass for a test of somebody's engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINES = Path(__file__).parent / "engines"
LAW = "test_the_walk_follows_the_targets"


def laws(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("pytest"), "--pyargs", "kdtr.property_tests", *words]
    command += ["-p", "no:cacheprovider", "-p", "few_examples"]
    path = os.pathsep.join(filter(None, [str(ENGINES), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "KDTR_HYPOTHESIS_PROFILE": "few"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kdtr-engine", ""], "--kdtr-engine is empty"),
        (["--kdtr-engine-option", "a=1"], "--kdtr-engine-option belongs to --kdtr-engine"),
        (["--kdtr-twin-option", "a=1"], "--kdtr-twin-option belongs to --kdtr-engine"),
        (["--kdtr-example", ""], "--kdtr-example is empty"),
    ],
)
def test_an_engine_that_is_not_named_is_not_replaced_by_those_that_ship(
    tmp_path: Path, words: list[str], told: str
) -> None:
    run = laws(tmp_path, "-k", LAW, *words)

    assert 4 == run.returncode, run.stdout
    assert told in run.stderr


def test_an_engine_that_offers_nothing_does_not_pass(tmp_path: Path) -> None:
    run = laws(
        tmp_path,
        *("--kdtr-engine", "unruly_engines:make_engine"),
        *("--kdtr-engine-option", "does=nothing"),
    )

    assert 1 == run.returncode, run.stdout
    assert "FAILED: no law about engines held: nothing was tried" in run.stdout
    assert "does not offer accept" in run.stdout or "skipped" in run.stdout


def test_a_twin_that_is_no_other_is_refused(tmp_path: Path) -> None:
    run = laws(
        tmp_path,
        *("-k", "indistinguishable", "--kdtr-engine", "host"),
        *("--kdtr-engine-option", "page_size=3", "--kdtr-twin-option", "page_size=3"),
    )

    assert 1 == run.returncode
    assert "change nothing; expected a second configuration" in run.stdout
