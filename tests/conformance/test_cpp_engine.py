"""The engine in C++ passes, over both protocols; `make peers` runs all of it.

Without `make peers` one build is judged on a small bundle, in seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cpp_faults import FAULTS
from left_behind import group_lives, in_folder, watched

from kdtr.conformance import GateResult, GoldenBundle, Selection, Verdict, load_engine, run_gate
from kdtr.kdtr_format import Bundle

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "docs/examples/cpp-engine"
TINY = ROOT / "build/golden/tiny.kdtr"
PEERS = os.environ.get("KDTR_PEERS") == "1"
COMPILER = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++"))), None)

pytestmark = pytest.mark.skipif(
    (COMPILER is None or shutil.which("make") is None) and not PEERS,
    reason="no compiler for C++17, or no make: install g++, or set CXX",
)
whole = pytest.mark.skipif(not PEERS, reason="minutes: `make peers` runs it")


def compiled(source: Path, *variables: str) -> Path:
    """The engine of a copy of the sources, built by their own Makefile."""
    before = {*(source / "build").glob("*")}
    words = ["make", "-C", str(source), f"KDTR_H={ROOT / 'kdtr_format'}", f"CXX={COMPILER}"]
    done = subprocess.run([*words, *variables], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    (program,) = {*(source / "build").glob("*")} - before
    return program


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """copied(): the sources in a folder of their own."""

    def copied() -> Path:
        folder = tmp_path_factory.mktemp("cpp") / "cpp-engine"
        return Path(shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("build")))

    return copied


@pytest.fixture(scope="session")
def plain(copied: Callable[[], Path]) -> Path:
    return compiled(copied(), "CXXFLAGS=-O2" if PEERS else "CXXFLAGS=-O0")


@pytest.fixture(scope="session")
def sanitized(copied: Callable[[], Path]) -> Path:
    """-Og: as fast as -O1 here, and compiled in less than half the time."""
    return compiled(copied(), "SANITIZE=1", "CXXFLAGS=-Og")


def gate(program: Path, *bundles: Path, xray: bool = False, **options: object) -> GateResult:
    engine = load_engine(f"stdio:{program}", options)
    try:
        return run_gate(engine, bundles, engine_name="e", xray=xray)
    finally:
        engine.close()  # type: ignore[attr-defined]  # of process engines


def answers(
    program: Path, golden: Path, folder: Path, kdtr: Callable[..., SimpleNamespace]
) -> Path:
    """What the program writes; a sanitizer's report, a leak too, is a status other than 0."""
    questions, out = folder / "questions.kdtr", folder / "answers.kdtr"
    assert 0 == kdtr("questions", golden, "--out", questions).code
    done = subprocess.run([program, questions, out], capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return out


# In seconds


def test_the_gate_is_green_over_stdio(
    plain: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder(monkeypatch, tmp_path)
    pids = watched(monkeypatch)

    result = gate(plain, small)

    assert result.passed, result.findings
    assert {Verdict.PASS} == {one.verdict for one in result.results}
    assert not any(
        one.unshown - {"emitted", "moves", "load() of a checkpoint"} for one in result.results
    )
    assert [False] == [group_lives(pid) for pid in pids]
    assert [] == list(tmp_path.iterdir())


def test_a_process_per_case_gives_the_same_verdicts(plain: Path, small: Path) -> None:
    def told(result: GateResult) -> list[tuple[object, ...]]:
        return [(one.case, one.mode, one.verdict, one.headroom) for one in result.results]

    assert told(gate(plain, small)) == told(gate(plain, small, isolate=True))


def test_the_judge_is_green_over_files(
    plain: Path, small: Path, tmp_path: Path, kdtr: Callable[..., SimpleNamespace]
) -> None:
    judged = kdtr("judge", answers(plain, small, tmp_path, kdtr), "--against", small)

    assert 0 == judged.code, judged.out
    assert "answers passed: 4 pass" in judged.out
    assert "not shown" not in judged.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"id":1,"verb":"hello"', "expected }"),
        (b'{"id":1,"id":2}', "'id' is there twice"),
        (b'{"id":1.0}', "no float is in the protocol"),
        (b'{"id":99999999999999999999}', "a number past 64 bits"),
        (b'{"id":1,"verb":"\\ud800"}', "half a surrogate pair"),
        (b'{"id":1} x', "expected the end of the line"),
        (b"[" * 1000, "nested too deep"),
        (b"\xff\xfe{", "expected a value"),
    ],
    ids=range(8),
)
def test_a_line_that_is_no_request_ends_the_engine(plain: Path, line: bytes, said: str) -> None:
    done = subprocess.run([plain], input=line + b"\n", capture_output=True, check=False)

    assert (1, b"") == (done.returncode, done.stdout)
    assert said in done.stderr.decode()


@pytest.mark.parametrize("name", ["no-such.kdtr", "text.kdtr"])
def test_a_file_that_is_no_model_is_refused_by_name(plain: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "text.kdtr").write_text("weights")

    done = subprocess.run(
        [plain, tmp_path / name, tmp_path / "out"], capture_output=True, text=True, check=False
    )

    assert 1 == done.returncode
    assert done.stderr.startswith(f"cpp-engine: {tmp_path / name}: ")
    assert 1 == done.stderr.count(name)
    assert not (tmp_path / "out").exists()


# In minutes


@whole
@pytest.mark.parametrize("build", ["plain", "sanitized"])
def test_the_whole_corpus_over_stdio(
    build: str, corpus: Path, request: pytest.FixtureRequest
) -> None:
    bundles = sorted(corpus.glob("*.kdtr"))

    # The x-ray models once: they are wide, and slow under a sanitizer.
    result = gate(request.getfixturevalue(build), TINY, *bundles, xray=build == "plain")

    assert len(bundles) >= 18
    assert result.passed, result.findings
    ties = {
        (Path(one.bundle).stem, one.case) for one in result.results if one.verdict.value != "pass"
    }
    assert {("near-ties", "trees")} >= ties
    print(f"\n{build}: error/bound up to {max(one.headroom or 0 for one in result.results):.2g}")


@whole
@pytest.mark.parametrize("build", ["plain", "sanitized"])
def test_the_whole_corpus_over_files(
    build: str,
    corpus: Path,
    tmp_path: Path,
    kdtr: Callable[..., SimpleNamespace],
    request: pytest.FixtureRequest,
) -> None:
    program = request.getfixturevalue(build)
    for golden in (TINY, *sorted(corpus.glob("*.kdtr"))):
        judged = kdtr("judge", answers(program, golden, tmp_path, kdtr), "--against", golden)

        assert 0 == judged.code, judged.out


@whole
def test_the_24_golden_tokens_by_plain_decoding_and_by_trees(
    plain: Path, tmp_path: Path, kdtr: Callable[..., SimpleNamespace]
) -> None:
    golden = GoldenBundle.open(TINY)
    prompt = next(case.inputs for case in golden.cases if case.inputs.alias == "ar").chunks
    same = [case for case in golden.cases if case.inputs.chunks == prompt]
    expected = tokens_of(TINY, "expect/ar", len(same[0].inputs.rounds))
    assert 24 == len(expected)

    out = answers(plain, TINY, tmp_path, kdtr)

    for case in same:
        found = tokens_of(out, f"answer/{case.inputs.alias}", len(case.inputs.rounds))
        assert expected == found[:24], case.inputs.alias
    assert {"ar", "chain", "y-tree", "star", "scattered", "orders", "wide"} <= {
        case.inputs.alias for case in same
    }
    golden.close()


def tokens_of(path: Path, case: str, n_rounds: int) -> list[int]:
    """The prompt's root, then what each round emitted."""
    with Bundle.open(path) as bundle:
        emitted = [bundle[f"{case}/round{i}/emitted"] for i in range(n_rounds)]
        return [int(bundle[f"{case}/chunk0/root"]), *np.concatenate(emitted).tolist()]


@whole
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, copied: Callable[[], Path]) -> None:
    fault, source = FAULTS[name], copied()
    text = (source / fault.file).read_text()
    assert 1 == text.count(fault.line)
    (source / fault.file).write_text(text.replace(fault.line, fault.becomes))
    program = compiled(source, "CXXFLAGS=-O0 -Wno-error")

    engine = load_engine(f"stdio:{program}")
    result = run_gate(
        engine, [TINY], engine_name="e", selection=Selection(modes=frozenset({"stepwise", "round"}))
    )
    engine.close()  # type: ignore[attr-defined]  # of process engines

    assert not result.passed
    finding = result.findings[0]
    cited = (*finding.rules, *(rule for hint in finding.looks_like[:1] for rule in hint.rules))
    assert (fault.first_seen_at, True) == (finding.stage, fault.breaks in cited), finding
