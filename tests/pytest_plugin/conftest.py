"""pytest in a folder of its own, as an engine's author starts it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

ENGINES = Path(__file__).parent / "engines"
Verdicts = dict[tuple[str, str, str], str]  # by bundle, case and mode


@pytest.fixture(scope="session")
def corpus() -> Path:
    return Path(__file__).resolve().parents[2] / "conformance" / "corpus"


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """author("--kdtr-engine", ...): exit code, output, and verdicts by the JUnit file.

    In this process where xdist is switched off (to start another and to import NumPy takes longer
    than most of these runs), and in one of its own with apart=True or with workers.
    """
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def author(*words: object, apart: bool = False) -> SimpleNamespace:
        junit = tmp_path / "junit.xml"
        junit.unlink(missing_ok=True)
        # The last two are slow to load, and not asked for.
        common = [f"--junitxml={junit}", "-p", "no:hypothesispytest", "-p", "no:benchmark"]
        run = _here if "no:xdist" in words and not apart else _apart
        code, out, err = run([*common, *map(str, words)], tmp_path, monkeypatch)
        told = _told(junit) if junit.is_file() else []
        return SimpleNamespace(
            code=code,
            out=out,
            err=err,
            cases=told,
            verdicts={
                (one["kdtr_bundle"], one["kdtr_case"], one["kdtr_mode"]): one["kdtr_verdict"]
                for one in told
                if "kdtr_case" in one
            },
        )

    return author


def _apart(words: list[str], folder: Path, _: pytest.MonkeyPatch) -> tuple[int, str, str]:
    path = os.pathsep.join(filter(None, [str(ENGINES), os.environ.get("PYTHONPATH", "")]))
    more = {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(
        [str(Path(sys.executable).with_name("pytest")), *words],
        cwd=folder,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr


def _here(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """A pytest in pytest; what it imports from the folder is forgotten behind it."""
    out, err, modules = io.StringIO(), io.StringIO(), {*sys.modules}
    with patch.context() as here, redirect_stdout(out), redirect_stderr(err):
        here.chdir(folder)
        here.syspath_prepend(ENGINES)
        for name, value in (("PYTEST_ADDOPTS", ""), ("COLUMNS", "80")):
            here.setenv(name, value)
        # The process has one handler of crashes, which the outer pytest holds.
        code = pytest.main(["-p", "no:faulthandler", *words])
    for name in {*sys.modules} - modules:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    return int(code), out.getvalue(), err.getvalue()


def _told(junit: Path) -> list[dict[str, str]]:
    """Of each test case: its name, how it ended, and its properties."""
    told = []
    for case in ElementTree.parse(junit).iter("testcase"):
        ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        found["name"] = f"{case.get('classname')}::{case.get('name')}"
        found["end"] = ends[0] if ends else "passed"
        told.append(found)
    return told
