"""pytest in a folder of its own, as an engine's author starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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
def author(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """author("--kdtr-engine", ...): exit code, output, and verdicts by the JUnit file."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def author(*words: object) -> SimpleNamespace:
        junit = tmp_path / "junit.xml"
        junit.unlink(missing_ok=True)
        command = [str(Path(sys.executable).with_name("pytest")), f"--junitxml={junit}"]
        command += [
            "-p",
            "no:hypothesispytest",
            "-p",
            "no:benchmark",
        ]  # slow to load, not asked for
        path = os.pathsep.join(filter(None, [str(ENGINES), os.environ.get("PYTHONPATH", "")]))
        run = subprocess.run(
            [*command, *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        told = _told(junit) if junit.is_file() else []
        return SimpleNamespace(
            code=run.returncode,
            out=run.stdout,
            err=run.stderr,
            cases=told,
            verdicts={
                (one["kdtr_bundle"], one["kdtr_case"], one["kdtr_mode"]): one["kdtr_verdict"]
                for one in told
                if "kdtr_case" in one
            },
        )

    return author


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
