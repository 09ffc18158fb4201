"""The recipes of docs/ci.md: YAML that their readers take, shell that parses, commands that run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdtr.conformance.cli import main

PAGE = (Path(__file__).resolve().parents[1] / "docs/ci.md").read_text(encoding="utf-8")
GITHUB, GITLAB = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
STEPS: list[dict[str, Any]] = GITHUB["jobs"]["gate"]["steps"]
STEP = {step["name"]: step for step in STEPS if "name" in step}
SCRIPTS = dict.fromkeys(
    [step["run"] for step in STEPS if "run" in step] + GITLAB["kdtr-gate"]["script"]
)


def test_github_finds_what_a_workflow_must_have() -> None:
    # YAML 1.1 reads the key `on` as true; GitHub reads 1.2.
    assert {"name", True, "permissions", "jobs"} == set(GITHUB)
    assert {"runs-on", "timeout-minutes", "env", "steps"} == set(GITHUB["jobs"]["gate"])
    for step in STEPS:
        assert ("uses" in step) != ("run" in step)
        assert set(step) <= {"name", "uses", "run", "with", "if"}
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v1"))


def test_gitlab_finds_what_a_job_must_have() -> None:
    job = GITLAB["kdtr-gate"]

    assert {"image", "variables", "script", "artifacts"} == set(job)
    assert all(isinstance(line, str) for line in job["script"])
    assert "always" == job["artifacts"]["when"]
    assert {"junit": "report/junit.xml"} == job["artifacts"]["reports"]


def test_what_is_kept_and_shown_is_kept_and_shown_when_the_gate_failed() -> None:
    assert ["always()", "always()"] == [STEP[name]["if"] for name in ("Summary", "Report")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_shell(script: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash: the scripts cannot be parsed")

    run = subprocess.run([bash, "-n", "-c", script], capture_output=True, text=True, check=False)

    assert (0, "") == (run.returncode, run.stderr)


def command(script: str) -> list[str]:
    """The words of its `kdtr gate`, in one line."""
    joined = script.replace("\\\n", " ")
    (line,) = [line for line in joined.splitlines() if line.startswith("kdtr gate ")]
    return shlex.split(line)


@pytest.mark.parametrize("script", [s for s in SCRIPTS if "kdtr gate" in s])
def test_the_command_runs_and_writes_what_the_next_steps_read(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is written, but with the engine of this project and one case of the corpus."""
    corpus = Path(__file__).resolve().parents[1] / "conformance/corpus"
    monkeypatch.chdir(tmp_path)
    os.mkdir("report")
    words = command(script)[1:]
    words[words.index("$corpus/*.kdtr")] = str(corpus / "softmax.kdtr")
    words[words.index("my_engine:make_engine")] = "host"

    code = main([*words, "--case", "ar", "--mode", "stepwise"])

    assert (0, "") == (code, capsys.readouterr().err)
    written = {path.name for path in Path("report").iterdir()}
    assert {"index.html", "junit.xml", "run.jsonl"} <= written
    assert ("summary.md" in written) == ("--markdown" in words)


def test_the_summary_is_added_to_the_page_of_the_job(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text("before\n")
    environment = {**os.environ, "GITHUB_STEP_SUMMARY": str(page)}

    def run() -> int:
        script = ["bash", "-e", "-c", STEP["Summary"]["run"]]
        return subprocess.run(script, cwd=tmp_path, env=environment, check=False).returncode

    assert (0, "before\n") == (run(), page.read_text())  # a refused run has none
    (tmp_path / "report").mkdir()
    (tmp_path / "report/summary.md").write_text("# kdtr\n")
    assert (0, "before\n# kdtr\n") == (run(), page.read_text())


def test_the_corpus_is_where_the_recipes_look() -> None:
    expression = re.findall(r"python -c '(.*?)'", STEP["Gate"]["run"])[0]

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(expression, {})

    assert (Path(out.getvalue().strip()) / "base.kdtr").is_file()
