"""The verbs of the Makefile, and its set-up, run against a stand-in for Python."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERBS = [
    "help",
    "gate",
    "peers",
    "test",
    "properties",
    "campaign",
    "kernels",
    "gate-gpu",
    "bench-gpu",
    "bench",
    "calibrate",
    "golden",
    "golden-check",
    "mutants",
    "quick-corpus",
    "lint",
    "types",
]
VERBS += ["format", "dist", "setup", "clean"]
TOOLS = ["sh", "make", "awk", "cp", "date", "echo", "find", "mkdir", "printf", "rm", "touch"]

# Answers the Makefile's probe, makes a venv that holds a copy of itself, and notes every call.
STAND_IN = """#!/bin/sh
case "$1 $2" in
  "-c "*) echo "{answer}" ;;
  "-m venv") echo venv >> {calls}; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip") shift 2; echo "pip $*" >> {calls}; exit "${{PIP_STATUS:-0}}" ;;
esac
"""


@dataclass
class Checkout:
    """The Makefile and what set-up reads, alone in a folder; PATH holds TOOLS and no Python."""

    folder: Path
    path: Path
    calls: Path
    environment: dict[str, str] = field(default_factory=dict)

    def offer(self, name: str, answer: str) -> None:
        """Put a Python on PATH that answers the probe with `answer`."""
        (self.path / name).write_text(STAND_IN.format(answer=answer, calls=self.calls))
        (self.path / name).chmod(0o755)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.path / "make", *arguments],
            cwd=self.folder,
            env={"PATH": str(self.path), **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def called(self) -> list[str]:
        """The first word of each call since the last time."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return [call.split()[0] for call in calls]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path / "checkout", tmp_path / "bin", tmp_path / "calls")
    checkout.folder.mkdir()
    checkout.path.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout.folder)
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"{tool} is not on PATH; the Makefile needs it"
        (checkout.path / tool).symlink_to(found)
    return checkout


def test_bare_make_lists_every_verb_with_a_line_and_needs_no_python(checkout):
    listed = re.findall(r"^  make ([a-z-]+) +\w.*\S$", checkout.make().stdout, re.MULTILINE)

    assert VERBS == listed[: len(VERBS)]


def test_every_public_target_is_listed():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert VERBS == targets


def test_set_up_installs_once_with_the_pinned_versions(checkout):
    checkout.offer("python3", "fits 3.12.0")

    first = checkout.make("setup")

    assert first.returncode == 0, first.stderr
    assert "Setting up .venv with python3 (3.12.0)" in first.stdout
    assert re.search(r"^Set-up took \d+ s$", first.stdout, re.MULTILINE)
    assert "--constraint constraints.txt --editable .[dev,compile]" in checkout.calls.read_text()
    assert ["venv", "pip"] == checkout.called()
    assert checkout.make("setup", ".venv/ready-test", ".venv/ready-runtime").returncode == 0
    assert [] == checkout.called()


def test_what_a_set_up_implies_is_not_installed_again_in_the_same_run(checkout):
    checkout.offer("python3", "fits 3.12.0")

    assert 0 == checkout.make("setup", ".venv/ready-test", ".venv/ready-runtime").returncode

    assert ["venv", "pip"] == checkout.called()


def test_the_gate_installs_no_extra(checkout):
    checkout.offer("python3", "fits 3.12.0")

    checkout.make("gate")

    assert checkout.calls.read_text().endswith("--editable .\n")
    assert not (checkout.folder / ".venv/ready-test").exists()


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_declaration_is_installed_into_the_same_venv(checkout, changed):
    checkout.offer("python3", "fits 3.12.0")
    checkout.make("setup")
    checkout.called()
    stamp = (checkout.folder / ".venv/ready-dev").stat()

    os.utime(checkout.folder / changed, (stamp.st_atime, stamp.st_mtime + 1))
    checkout.make("setup")

    assert ["pip"] == checkout.called()


def test_a_failed_set_up_starts_afresh_the_next_time(checkout):
    checkout.offer("python3", "fits 3.12.0")
    checkout.environment["PIP_STATUS"] = "1"

    failed = checkout.make("setup")

    assert failed.returncode != 0
    assert not list((checkout.folder / ".venv").glob("ready-*"))
    checkout.environment.clear()
    checkout.called()
    assert checkout.make("setup").returncode == 0
    assert ["venv", "pip"] == checkout.called()


def test_a_moved_checkout_gets_a_new_venv(checkout):
    checkout.offer("python3", "fits 3.12.0")
    checkout.make("setup")
    checkout.called()

    checkout.folder = checkout.folder.rename(checkout.folder.with_name("elsewhere"))
    checkout.make("setup")

    assert ["venv", "pip"] == checkout.called()


def test_another_python_gets_a_new_venv_which_is_kept(checkout):
    checkout.offer("python3", "fits 3.12.0")
    checkout.offer("mine", "fits 3.13.0")
    checkout.make("setup")
    checkout.called()

    chosen = checkout.make("setup", "PYTHON=mine")

    assert "Setting up .venv with mine (3.13.0)" in chosen.stdout
    assert ["venv", "pip"] == checkout.called()
    checkout.make("setup")
    assert [] == checkout.called()


def test_a_newer_python_is_found_beside_one_that_is_too_old(checkout):
    checkout.offer("python3", "too old, version 3.9.2")
    checkout.offer("python3.12", "fits 3.12.1")

    assert "with python3.12 (3.12.1)" in checkout.make("setup").stdout


def test_without_a_fitting_python_make_says_what_it_found(checkout):
    checkout.offer("python3", "version 3.11.2 without venv and ensurepip")
    checkout.offer("python", "too old, version 2.7.18")

    refused = checkout.make("gate")

    assert refused.returncode != 0
    assert (
        "kdtr needs Python 3.11 or newer, with its modules venv and ensurepip. Found:\n"
        "  python3: version 3.11.2 without venv and ensurepip\n"
        "  python: too old, version 2.7.18\n"
        "Install one (on Debian and Ubuntu: apt install python3 python3-venv),\n"
        "or name one: make gate PYTHON=/path/to/python3\n"
    ) in refused.stderr
    assert not (checkout.folder / ".venv").exists()


def test_no_python_at_all_is_said(checkout):
    assert "Found:\n  no Python on PATH\n" in checkout.make("gate").stderr


def test_a_python_that_was_named_is_not_replaced(checkout):
    checkout.offer("python3", "fits 3.12.0")

    assert "Found:\n  mine: not found\n" in checkout.make("gate", "PYTHON=mine").stderr


@pytest.mark.parametrize("verb", ["setup", "gate"])
def test_a_slip_in_python_costs_no_set_up(checkout, verb):
    checkout.offer("python3", "fits 3.12.0")
    checkout.offer("old", "too old, version 3.9.2")
    checkout.make("setup")
    checkout.called()

    for slip, said in (("/typo", "not found"), ("old", "too old, version 3.9.2")):
        refused = checkout.make(verb, f"PYTHON={slip}")

        assert refused.returncode != 0
        assert f"Found:\n  {slip}: {said}\n" in refused.stderr
    assert checkout.make("setup").returncode == 0
    assert [] == checkout.called()


def test_the_tiny_bundle_is_recorded_anew_for_what_records_it_alone():
    command = ["make", "-pn", "help"]
    database = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^TINY_SOURCES := (.*)$", database, re.MULTILINE)

    assert found
    sources = set(found.group(1).split())
    assert {"contract/RULES.md", "reference/forward.py", "kdtr_format/writer.py"} <= sources
    assert {
        f"conformance/{name}.py"
        for name in ("case", "tiny_corpus", "seed_model", "bundle", "golden", "golden_margins")
    } <= sources
    assert not {f"conformance/{name}.py" for name in ("report", "cli", "judge")} & sources


def test_tests_that_were_skipped_say_why():
    assert " -rs " in (ROOT / "Makefile").read_text()
