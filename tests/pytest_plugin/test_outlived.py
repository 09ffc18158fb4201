"""A pytest that judges in its own process leaves a verdict, or says that there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

Author = Callable[..., SimpleNamespace]
FATAL = ("--kdtr-engine", "plugged_engines:make_fatal")
ONE = ("-k", "trees and stepwise")


@pytest.mark.parametrize(
    ("how", "ended"),
    [("_exit", "exited with code 0"), ("kill", "was ended by signal 9 (SIGKILL)")],
)
def test_an_engine_that_ends_pytest_is_named(
    author: Author, corpus: Path, how: str, ended: str
) -> None:
    words = [*FATAL, "--kdtr-engine-option", f"how={how}", f"--kdtr-corpus={corpus}/base.kdtr"]

    run = author(*words, *ONE, "-p", "no:xdist", apart=True)

    assert 2 == run.code
    where = "base.kdtr: trees / stepwise / round0: verify()"
    assert f"kdtr: no verdict: {where}: the engine {ended} before it returned" in run.err
    assert [] == run.cases


@pytest.mark.parametrize("words", [["--dist", "loadfile"], ["-n", "0", "--dist", "loadfile"]])
def test_workers_that_xdist_does_not_start_are_none(
    author: Author, corpus: Path, words: list[str]
) -> None:
    run = author(*FATAL, f"--kdtr-corpus={corpus}/base.kdtr", *ONE, *words, apart=True)

    assert 2 == run.code
    assert "kdtr: no verdict: base.kdtr: trees / stepwise / round0: verify()" in run.err


def test_a_module_that_ends_pytest_on_import_is_named(author: Author, tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("import os\nos._exit(0)\n")

    run = author(
        "--kdtr-engine", "gone:make", "--kdtr-corpus=built-in", "-p", "no:xdist", apart=True
    )

    assert 2 == run.code
    said = "kdtr: no verdict: import gone: the engine exited with code 0 before it returned; in a "
    assert run.err.startswith(said)
    assert run.err.endswith("--engine 'stdio:kdtr serve-engine --engine gone:make'\n")


def test_in_a_worker_it_is_a_failed_case(author: Author, corpus: Path) -> None:
    run = author(*FATAL, f"--kdtr-corpus={corpus}/base.kdtr", *ONE, "-n", "1")

    assert 1 == run.code
    assert "crashed while running 'base.kdtr::trees[stepwise]'" in run.out
    assert "no verdict" not in run.err


def test_a_test_of_one_s_own_that_ends_it_too(author: Author, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("import os\ndef test_own():\n    os._exit(0)\n")

    run = author("--kdtr-engine", "host", "test_own.py", "-p", "no:xdist", apart=True)

    assert 2 == run.code
    said = "no verdict: test_own.py::test_own: after import kdtr.engine: the process exited with "
    assert f"kdtr: {said}code 0 before it was done\n" == run.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["test_own.py"], 1),
        (["test_own.py", "-k", "nothing"], 5),
        (["--bogus"], 4),
        (["test_none.py"], 4),
        (["--help"], 0),
        (["--kdtr-expectations", ""], 4),
        (["broken"], 4),
    ],
)
def test_the_exit_codes_of_pytest_are_as_ever(
    author: Author, tmp_path: Path, words: list[str], code: int
) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    assert 0\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "conftest.py").write_text("1 / 0\n")

    run = author("--kdtr-engine", "host", *words, "-p", "no:xdist", apart=True)

    assert code == run.code, run.out + run.err
    assert "kdtr: " not in run.err


def test_another_program_that_runs_pytest_stays_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import os\ndef test_own():\n    assert os.environ['STARTED'] == str(os.getpid())\n"
    )
    code = (
        "import os, pytest, sys\nos.environ['STARTED'] = str(os.getpid())\n"
        "sys.exit(pytest.main(['--kdtr-engine', 'host', '-p', 'no:xdist']))"
    )

    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == run.returncode, run.stdout + run.stderr
