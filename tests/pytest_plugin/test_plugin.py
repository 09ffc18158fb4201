"""The plugin's options, expectations under pytest, and what every other pytest run sees of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

Author = Callable[..., SimpleNamespace]
MUTANTS = "kdtr.conformance.mutants:make_engine"


def test_every_other_pytest_run_loads_nothing_heavy() -> None:
    code = "import sys, kdtr.pytest_plugin.plugin; print([*sys.modules])"

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    loaded = set(eval(run.stdout))
    assert "kdtr.pytest_plugin.plugin" in loaded
    assert set() == {"numpy", "rich", "hypothesis", "kdtr.conformance"} & loaded


def test_the_laws_plugin_without_this_one_is_silent(author: Author, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")

    assert 0 == author("-p", "no:kdtr").code


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kdtr-engine", ""], "--kdtr-engine is empty; expected a value, or leave it out"),
        (
            ["--kdtr-engine", "host", "--kdtr-corpus", ""],
            "--kdtr-corpus is empty; expected a path, or leave it out",
        ),
        (["--kdtr-corpus", "a"], "--kdtr-corpus belongs to --kdtr-engine; name an engine too"),
        (
            ["--kdtr-engine-option", "a=1"],
            "--kdtr-engine-option belongs to --kdtr-engine; name an engine too",
        ),
        (
            ["--kdtr-engine", "host", "--kdtr-expectations", "f"],
            "--kdtr-expectations belongs to --kdtr-corpus; name golden bundles too",
        ),
        (
            ["--kdtr-engine", "host", "--kdtr-corpus", "."],
            ". holds no *.kdtr; expected golden bundles, as `kdtr golden` writes them, or the word "
            "built-in for",
        ),
        (
            ["--kdtr-engine", "host", "--kdtr-corpus", "built-in", "--kdtr-expectations", "f"],
            "ExpectationsError: f: No such file or directory",
        ),
        (
            ["--kdtr-engine", "host", "--kdtr-corpus", "built-in", "--kdtr-engine-option", "x"],
            "EngineError: --kdtr-engine-option 'x'; expected KEY=VALUE",
        ),
        (
            ["--kdtr-engine", "host", "--kdtr-corpus", "a/x.kdtr", "b/x.kdtr"],
            "a/x.kdtr and b/x.kdtr have one name, and so their cases one id",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(author: Author, words: list[str], told: str) -> None:
    run = author(*words, "-p", "no:xdist")

    assert 4 == run.code, run.out
    assert told in run.err


EXPECTED = """
kdtr_expectations = 1

[[expect]]
id = "first-child"
kind = "fails"
case = "trees"
rule = "ACC-1"
reason = "only first children are kept"
link = "https://example.org/7"
"""
STALE = """
[[expect]]
id = "old"
kind = "raises"
case = "ar"
reason = "was so once"
"""


@pytest.fixture
def expecting(author: Author, corpus: Path, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """expecting(text, ...): a run of a faulty engine with an expectations file."""

    def expecting(text: str, *words: object) -> SimpleNamespace:
        (tmp_path / "expect.toml").write_text(text)
        return author(
            *("--kdtr-engine", MUTANTS, "--kdtr-engine-option", "mutant=M031"),
            *(f"--kdtr-corpus={corpus / 'half-split.kdtr'}", "--kdtr-expectations=expect.toml"),
            *words,
        )

    return expecting


@pytest.mark.parametrize("spread", [("-p", "no:xdist"), ("-n", "2")], ids=str)
def test_what_is_expected_is_an_xfail_with_its_reason(
    expecting: Callable[..., SimpleNamespace], spread: tuple[str, ...]
) -> None:
    run = expecting(EXPECTED, "-k", "not x-ray", "-rx", *spread)

    assert 0 == run.code, run.out
    assert "only first children are kept (first-child, https://example.org/7)" in run.out
    excused = {one["name"] for one in run.cases if one["kdtr_verdict"] == "excused"}
    assert "half-split.kdtr::trees[stepwise]" in excused
    assert {"skipped"} == {one["end"] for one in run.cases if one["name"] in excused}
    assert {"first-child"} == {
        one["kdtr_expected_by"] for one in run.cases if one["name"] in excused
    }
    assert "expected by expect.toml:" in run.out


@pytest.mark.parametrize("spread", [("-p", "no:xdist"), ("-n", "2")], ids=str)
def test_a_stale_entry_fails_a_whole_run_at_its_end(
    expecting: Callable[..., SimpleNamespace], spread: tuple[str, ...]
) -> None:
    whole = expecting(EXPECTED + STALE, *spread)

    assert 1 == whole.code
    assert 1 == whole.out.count("is stale")  # `trees` was one worker's, and known to all
    assert " failed" not in whole.out.splitlines()[-1]  # no test did
    assert (
        "expect.toml: entry 'old' is stale: it expects 'raises', and that was seen in none of "
        "half-split.kdtr: ar / stepwise, ar / round, ar / shipped, ar / decode, ar / forward; "
        "remove it, or correct its patterns"
    ) in whole.out
    assert "gate FAILED: the expectations are unmet: " in whole.out


def test_a_part_of_the_cases_makes_no_entry_stale(
    expecting: Callable[..., SimpleNamespace],
) -> None:
    for words in (("-k", "trees or ar"), ("half-split.kdtr::ar",), ("half-split.kdtr",)):
        assert 0 == expecting(EXPECTED + STALE, *words, "-p", "no:xdist").code


def test_runxfail_shows_what_is_excused(expecting: Callable[..., SimpleNamespace]) -> None:
    run = expecting(EXPECTED, "-k", "trees and stepwise or ar", "--runxfail", "-p", "no:xdist")

    assert 1 == run.code
    assert "FAILED half-split.kdtr::trees[stepwise]" in run.out


@pytest.mark.parametrize("spread", [("-p", "no:xdist"), ("-n", "2")], ids=str)
def test_what_closing_does_wrong_is_excused_as_in_the_gate(
    author: Author, corpus: Path, tmp_path: Path, spread: tuple[str, ...]
) -> None:
    (tmp_path / "expect.toml").write_text(
        'kdtr_expectations = 1\n[[expect]]\nid = "lost"\nkind = "raises"\nmode = "close"\n'
        'reason = "the driver is older"\n'
    )

    run = author(
        *("--kdtr-engine", "plugged_engines:make_unclosable"),
        *(f"--kdtr-corpus={corpus / 'half-split.kdtr'}", "--kdtr-expectations=expect.toml"),
        *("-k", "ar and (decode or stepwise)", *spread),
    )

    assert 0 == run.code, run.out
    assert "lost      raises in half-split.kdtr: all / close: the driver is older" in run.out
    assert "part of the gate passed: 2 pass, 1 excused; " in run.out  # one model, in each worker


def test_what_is_excused_blocks_as_it_does_in_the_gate(
    author: Author, corpus: Path, tmp_path: Path
) -> None:
    """A session that raises in plain decoding raises in every check of the script."""
    script = Path(__file__).parents[1] / "conformance/engines/stdio_misbehaving.py"
    (tmp_path / "expect.toml").write_text(
        'kdtr_expectations = 1\n[[expect]]\nid = "crash"\nkind = "raises"\n'
        'summary = "*SIGSEGV*"\nreason = "no device here"\n'
    )

    run = author(
        *("--kdtr-engine", f"stdio:{sys.executable} {script} crash prefill"),
        *(f"--kdtr-corpus={corpus / 'half-split.kdtr'}", "--kdtr-expectations=expect.toml"),
        *("-k", "not x-ray", "-p", "no:xdist"),
    )

    assert "excused" == run.verdicts["half-split.kdtr", "stages", "stepwise"]
    assert "blocked" == run.verdicts["half-split.kdtr", "state", "script"]
    assert 1 == run.code  # nothing was compared
