"""Golden cases under pytest: the gate's cases, the gate's verdicts, whatever runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdtr.conformance import GateResult, load_engine, run_gate
from kdtr.conformance.report import closing_line

Author = Callable[..., SimpleNamespace]
MUTANTS = "kdtr.conformance.mutants:make_engine"
FIRST_CHILD = "M031"  # accepts first children alone: ar passes, trees fails
NO_PREFIX = "M010"  # hides the prefix: ar fails, and blocks trees


def named(engine: str, bundle: object, **options: object) -> list[str]:
    words = ["--kdtr-engine", engine, f"--kdtr-corpus={bundle}"]
    for key, value in options.items():
        words += ["--kdtr-engine-option", f"{key}={value}"]
    return words


def gate_of(engine: str, bundle: Path, **options: object) -> GateResult:
    return run_gate(load_engine(engine, options), [bundle], engine_name=engine, xray=True)


def verdicts(gate: GateResult) -> dict[tuple[str, str, str], str]:
    return {(Path(r.bundle).name, r.case, r.mode): r.verdict.value for r in gate.results}


def golden(found: dict[tuple[str, str, str], str]) -> dict[tuple[str, str, str], str]:
    return {key: verdict for key, verdict in found.items() if key[2] != "x-ray"}


# The gate's verdicts


def test_the_cases_and_counts_are_the_gate_s(author: Author, corpus: Path) -> None:
    bundle = corpus / "half-split.kdtr"
    gate = gate_of("host", bundle)

    run = author(*named("host", bundle), "-p", "no:xdist")

    assert 0 == run.code, run.out
    assert verdicts(gate) == run.verdicts
    assert len(gate.results) == len(run.cases)
    counted = closing_line(gate, 0).strip().removesuffix(" in 0.0 s")
    assert counted in run.out


@pytest.mark.parametrize(
    ("mutant", "spread"),
    [
        (FIRST_CHILD, ("-p", "no:xdist")),
        (NO_PREFIX, ("-n", "2", "--dist", "load", "-k", "not x-ray")),
    ],
    ids=["one process", "two workers"],
)
def test_a_fault_gets_the_gate_s_verdicts(
    author: Author, corpus: Path, mutant: str, spread: tuple[str, ...]
) -> None:
    """Blocked ones too, though the case that blocks them may have run in another worker."""
    bundle = corpus / "half-split.kdtr"
    expected = verdicts(gate_of(MUTANTS, bundle, mutant=mutant))

    run = author(*named(MUTANTS, bundle, mutant=mutant), *spread)

    assert 1 == run.code, run.out
    if "-k" not in spread:  # x-ray models are there, and not blocked here
        assert set(expected) == set(run.verdicts)
    assert golden(expected) == golden(run.verdicts)
    assert {"pass", "fail", "blocked"} >= set(golden(expected).values()) > {"pass"}


def test_a_failure_reads_as_the_gate_prints_it(author: Author, corpus: Path) -> None:
    bundle = corpus / "half-split.kdtr"
    words = ["gate", bundle, "--engine", MUTANTS, "--engine-option", f"mutant={FIRST_CHILD}"]
    command = [Path(sys.executable).with_name("kdtr"), *words, "--case", "trees"]
    printed = subprocess.run(
        [*map(str, command), "--mode", "stepwise"], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"^FAIL  trees / stepwise.*?^  again .*?$", printed, re.M | re.S)
    assert found is not None

    run = author(
        *named(MUTANTS, bundle, mutant=FIRST_CHILD), "-k", "trees and stepwise", "-p", "no:xdist"
    )

    assert found.group() in run.out
    assert "FAILED half-split.kdtr::trees[stepwise]" in run.out


def test_collection_starts_no_engine_and_a_worker_makes_one(
    author: Author, corpus: Path, tmp_path: Path
) -> None:
    log = tmp_path / "made"
    words = named("plugged_engines:make_counted", corpus / "half-split.kdtr", log=log)

    collected = author(*words, "--collect-only", "-q")
    assert not log.exists()
    assert "half-split.kdtr::ar[stepwise]\n" in collected.out
    assert "x-ray::visible[x-ray]\n" in collected.out

    author(*words, "-k", "ar", "-p", "no:xdist")
    assert 1 == len(log.read_text().splitlines())

    author(*words, "-k", "not x-ray", "-n", "2")
    assert 2 == len(log.read_text().splitlines()[1:])


# Choosing


def test_cases_are_chosen_by_id_by_k_and_by_mark(
    author: Author, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    (tmp_path / "golden").mkdir()
    shutil.copy(corpus / "half-split.kdtr", tmp_path / "golden")
    words = [*named("host", "golden"), "-p", "no:xdist"]

    ids = ("half-split.kdtr::trees[round]", "golden/half-split.kdtr::ar")
    by_id = author(*ids, "test_own.py", *words)
    by_k = author(*words, "-k", "ar and (round or decode)")
    none = author("half-split.kdtr::tree", *words)

    ar = {("half-split.kdtr", "ar", m) for m in ("stepwise", "shipped", "forward")}
    both = {("half-split.kdtr", "ar", m) for m in ("round", "decode")}
    assert ar | both | {("half-split.kdtr", "trees", "round")} == set(by_id.verdicts)
    assert 7 == len(by_id.cases)
    assert both == set(by_k.verdicts)
    assert 4 == none.code
    assert "not found: half-split.kdtr::tree; `--collect-only -q` lists the ids" in none.err
    assert 5 == author(*words, "-m", "not kdtr").code


def test_what_failed_last_runs_alone(author: Author, corpus: Path) -> None:
    words = [*named(MUTANTS, corpus / "half-split.kdtr", mutant=FIRST_CHILD), "-p", "no:xdist"]

    first = author(*words, "-k", "not x-ray")
    again = author(*words, "--lf")
    one = author(*words, "-x")

    failed = {key for key, verdict in first.verdicts.items() if verdict == "fail"}
    assert failed
    assert failed == set(again.verdicts)
    assert 1 == list(one.verdicts.values()).count("fail")


def test_an_author_s_own_tests(author: Author, corpus: Path, tmp_path: Path) -> None:
    """Alone, unless tests are named too, or the corpus is in addopts."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    words = named("host", corpus / "half-split.kdtr")
    chosen = ["-k", "own or ar and decode", "-p", "no:xdist"]

    alone = author(*words, *chosen)
    both = author("test_own.py", *words, *chosen)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = {' '.join(words)}\n")
    joined = author(*chosen)

    case = "half-split.kdtr::ar[decode]"
    assert [case] == [one["name"] for one in alone.cases]
    assert ["test_own::test_own", case] == [one["name"] for one in both.cases]
    assert both.cases == joined.cases


# What is neither a pass nor a failure


def test_what_is_not_offered_is_skipped_by_name(author: Author, corpus: Path) -> None:
    run = author(
        "half-split.kdtr::ar",
        *named("plugged_engines:make_bare", corpus / "half-split.kdtr"),
        *("-rs", "-p", "no:xdist"),
    )

    assert 0 == run.code, run.out
    ends = {one["name"].partition("[")[2]: one["end"] for one in run.cases}
    assert "passed" == ends.pop("stepwise]")
    assert {"skipped"} == set(ends.values())
    assert "not offered: needs round()" in run.out
    assert "not offered: needs decode()" in run.out
    assert "the engine shows no stage, so every mode runs as it ships" in run.out
    assert "gate passed: 1 pass, 3 unsupported;" in run.out  # as the gate: no result for `shipped`


def test_one_id_of_several_that_is_not_there(author: Author, corpus: Path) -> None:
    words = [f"base.kdtr::{name}" for name in ("ar[stepwise]", "as[stepwise]")]

    run = author(
        "--kdtr-engine", "host", f"--kdtr-corpus={corpus}/base.kdtr", *words, "-p", "no:xdist"
    )

    assert 4 == run.code
    assert "not found: base.kdtr::as[stepwise]; `--collect-only -q` lists the ids" in (
        run.out + run.err
    )


def test_what_the_author_skips_is_told_and_no_pass(
    author: Author, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        item.add_marker(pytest.mark.skip(reason='not today'))\n"
    )

    run = author("--kdtr-engine", "host", f"--kdtr-corpus={corpus}/base.kdtr", "-p", "no:xdist")

    assert 1 == run.code
    assert "kdtr: nothing was judged: no case ran to its verdict" in run.out
    assert {"skipped"} == {one["end"] for one in run.cases}


def test_nothing_but_skips_fails(author: Author, corpus: Path) -> None:
    run = author(
        *named("plugged_engines:make_bare", corpus / "half-split.kdtr"),
        *("-k", "ar and decode", "-p", "no:xdist"),
    )

    assert 1 == run.code
    assert "gate FAILED: nothing was compared: 1 unsupported" in run.out


def test_a_near_tie_passes_with_its_text_and_a_property(author: Author, corpus: Path) -> None:
    run = author(
        *named("host", corpus / "near-ties.kdtr"),
        *("-k", "trees and stepwise or ar and stepwise", "-rP", "-p", "no:xdist"),
    )

    (tie,) = [one for one in run.cases if one["kdtr_verdict"] == "near tie"]
    assert "passed" == tie["end"]
    assert "NUM-2" in tie["kdtr_rules"]
    assert "Captured kdtr near tie call" in run.out
    assert "NEAR TIE  trees / stepwise / " in run.out


def test_a_model_that_cannot_be_closed_is_an_error_of_its_last_case(
    author: Author, corpus: Path
) -> None:
    run = author(
        *named("plugged_engines:make_unclosable", corpus / "half-split.kdtr"),
        *("-k", "ar and decode", "-p", "no:xdist"),
    )

    assert 1 == run.code
    assert "ERROR  all / close: close() raised OSError: device lost" in run.out
    assert "gate FAILED: 1 pass, 1 error;" in run.out


# Engines that die


def test_a_crash_of_a_process_engine_is_a_verdict(author: Author, corpus: Path) -> None:
    script = Path(__file__).parents[1] / "conformance/engines/stdio_misbehaving.py"
    engine = f"stdio:{sys.executable} {script} crash prefill"

    run = author(*named(engine, corpus / "half-split.kdtr"), "-k", "not x-ray", "-p", "no:xdist")

    assert 1 == run.code
    assert "the engine was ended by signal 11 (SIGSEGV) before it replied" in run.out
    assert "its stderr ends with: illegal memory access" in run.out
    assert {"error", "blocked", "unsupported"} == set(run.verdicts.values())


@pytest.mark.parametrize("fault", ["truncated", "noise", "leave"])
def test_the_rest_of_the_run_goes_on(author: Author, corpus: Path, fault: str) -> None:
    script = Path(__file__).parents[1] / "conformance/engines/stdio_misbehaving.py"
    engine = f"stdio:{sys.executable} {script} {fault} prefill"

    run = author(*named(engine, corpus / "half-split.kdtr"), "-k", "not x-ray", "-p", "no:xdist")

    assert 1 == run.code
    assert 16 == len(run.verdicts)  # each case and mode has one, and both scripts
    assert "INTERNALERROR" not in run.out + run.err


def test_an_engine_that_ends_its_worker_fails_that_case(author: Author, corpus: Path) -> None:
    run = author(
        *named("plugged_engines:make_dying", corpus / "half-split.kdtr"),
        *("-k", "ar and (stepwise or round)", "-n", "1"),
    )

    assert 1 == run.code
    assert "crashed while running 'half-split.kdtr::ar[stepwise]'" in run.out
    assert "gate FAILED: 1 pass, 1 error;" in run.out


@pytest.mark.parametrize("spread", [("-p", "no:xdist"), ("-n", "1")], ids=str)
def test_an_engine_that_cannot_be_made_ends_the_run(
    author: Author, corpus: Path, spread: tuple[str, ...]
) -> None:
    """It is no failure of a case: `kdtr gate` refuses the request too."""
    run = author(*named("plugged_engines:make_none", corpus / "half-split.kdtr"), *spread)

    assert 4 == run.code
    assert "raised RuntimeError: no device" in run.out
    assert 1 == run.out.count("FAILED half-split.kdtr::")
    assert "Traceback" not in run.out


@pytest.mark.parametrize("spread", [("-p", "no:xdist"), ("-n", "1")], ids=str)
@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("hots", "ERROR: EngineError: no engine is registered as 'hots' (registered: "),
        ("no_such:make", "ERROR: EngineError: engine no_such:make: no module no_such in "),
        ("plugged_engines:mke", "EngineError: engine plugged_engines:mke: module plugged_engines"),
        ("stdio:./nope --fast", "engine stdio:./nope --fast: there is no program ./nope that can"),
    ],
    ids=["name", "module", "factory", "program"],
)
def test_a_name_that_leads_to_no_engine_is_a_usage_error(
    author: Author, corpus: Path, engine: str, told: str, spread: tuple[str, ...]
) -> None:
    run = author(*named(engine, corpus / "half-split.kdtr"), *spread)

    assert 4 == run.code, run.out
    assert told in run.err
    assert "Traceback" not in run.out + run.err
    assert not run.cases
    if engine in ("hots", "no_such:make"):
        assert re.search(r"registered( engine)?: (\w+, )*host, (\w+, )*reference", run.err)


def test_an_option_that_the_factory_lacks_is_a_usage_error(author: Author, corpus: Path) -> None:
    run = author(*named("host", corpus / "half-split.kdtr", page_sise=3), "-p", "no:xdist")

    assert 4 == run.code
    assert "EngineError: engine host: the factory has no option page_sise; expected" in run.err


def test_the_laws_refuse_a_name_too(author: Author) -> None:
    words = ("--pyargs", "kdtr.property_tests", "-k", "prefill", "-p", "no:xdist")

    run = author("--kdtr-engine", "hots", *words)

    assert 4 == run.code
    assert "EngineError: no engine is registered as 'hots' (registered: " in run.err


def test_a_file_that_is_no_bundle_is_named(author: Author, tmp_path: Path) -> None:
    (tmp_path / "bad.kdtr").write_bytes(b"no bundle")

    run = author(*named("host", "bad.kdtr"), "-k", "not x-ray", "-p", "no:xdist")

    assert 2 == run.code
    assert "ERROR bad.kdtr" in run.out
    assert "BundleError: " in run.out
