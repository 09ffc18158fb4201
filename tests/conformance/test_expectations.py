"""What is expected is excused and told; what no longer holds fails, in whole runs."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdtr.conformance import GateResult, Selection, Verdict, run_gate, xray_gate
from kdtr.conformance import gate as gate_module
from kdtr.conformance.expectations import Entry, Expectations, Kind, MustPass
from kdtr.conformance.expectations_outcome import excused_lines
from kdtr.conformance.finding import CaseResult, Finding, Place
from kdtr.contract import Engine

TODAY = date(2026, 11, 30)
SUMMARY = {Verdict.FAIL: "1 of 4 differ", Verdict.ERROR: "the engine raised OSError: gone"}


def entry(kind: Kind = Kind.FAILS, name: str = "e", **select: str) -> Entry:
    expires = select.pop("expires", None)
    patterns = {field: (pattern,) for field, pattern in select.items()}
    return Entry(
        name, kind, "known", patterns, "", None if expires is None else date.fromisoformat(expires)
    )


def result(
    verdict: Verdict = Verdict.PASS,
    case: str = "y",
    mode: str = "round",
    *,
    stages: Sequence[str] = ("mask",),
    bundle: str = "at/small.kdtr",
    **more: Any,
) -> CaseResult:
    """A result with a finding at each stage, where the verdict has any."""
    place = Place(bundle, case, mode, "round0")
    findings = [
        Finding(verdict, place, stage, SUMMARY.get(verdict, "a tie"), rules=("MASK-2",))
        for stage in stages
        if verdict in (Verdict.FAIL, Verdict.ERROR, Verdict.NEAR_TIE)
    ]
    return CaseResult(bundle, case, mode, verdict, comparisons=1, findings=findings, **more)


def held(
    *entries: Entry,
    results: Sequence[CaseResult],
    unasked: Sequence[CaseResult] | None = (),
    must_pass: MustPass | None = None,
    bundles: Sequence[Path] = (),
    **ceilings: int,
) -> GateResult:
    """The results, and one more that passes, as the gate holds them to the file `f`."""
    gate = GateResult([*results, result(case="other")])
    gate.hold(Expectations("f", TODAY, entries, must_pass, ceilings), bundles, unasked)
    return gate


# Excusing


@pytest.mark.parametrize(
    "select",
    [
        {"bundle": "small"},
        {"bundle": "small.kdtr"},
        {"case": "y"},
        {"case": "[xy]"},
        {"mode": "r*"},
        {"point": "round0"},
        {"stage": "mask"},
        {"rule": "MASK-*"},
        {"summary": "* of 4 differ"},
        {"case": "y", "mode": "round", "rule": "MASK-2"},
    ],
)
def test_a_finding_that_is_selected_is_excused(select: dict[str, str]) -> None:
    gate = held(entry(**select), results=[result(Verdict.FAIL)])

    assert gate.passed
    excused = gate.results[0]
    assert Verdict.EXCUSED is excused.verdict
    assert {"e"} == excused.expected
    (finding,) = excused.findings
    assert finding.excuse is not None
    assert ("e", "known", "") == (
        finding.excuse.entry,
        finding.excuse.reason,
        finding.excuse.link,
    )
    assert ["  e         fails in small.kdtr: y / round: known"] == excused_lines(
        gate.expectations, gate.results
    )


def test_what_one_entry_excuses_of_many_bundles_is_counted() -> None:
    """Six are named; what is counted, and over how many bundles, is said."""
    of_two = [
        result(Verdict.FAIL, f"c{i}", bundle=f"{name}.kdtr") for name in "ab" for i in range(4)
    ]
    named = "a.kdtr: c0 / round, c1 / round, c2 / round, c3 / round; b.kdtr: c0 / round, c1 / round"
    of_one = [result(Verdict.FAIL, f"c{i}") for i in range(7)]

    assert [
        f"  e         fails in {named} and 2 more, 8 cases and modes of 2 bundles in all: known"
    ] == excused_lines(held(entry(stage="mask"), results=of_two).expectations, of_two, 400)
    (line,) = excused_lines(held(entry(), results=of_one).expectations, of_one, 400)
    assert line.endswith("c5 / round and 1 more, 7 cases and modes in all: known")


@pytest.mark.parametrize(
    "select",
    [
        {"bundle": "tiny"},
        {"case": "Y"},
        {"mode": "stepwise"},
        {"point": "round1"},
        {"stage": "mas"},
        {"rule": "POS-1"},
        {"summary": "*3 of 4*"},
        {"case": "y", "stage": "logits"},
    ],
)
def test_another_finding_is_not(select: dict[str, str]) -> None:
    gate = held(entry(**select), results=[result(Verdict.FAIL)], unasked=None)

    assert not gate.passed
    assert Verdict.FAIL is gate.results[0].verdict


def test_a_crash_is_no_wrong_answer() -> None:
    assert not held(entry(case="y"), results=[result(Verdict.ERROR)]).passed
    assert held(entry(Kind.RAISES, case="y"), results=[result(Verdict.ERROR)]).passed
    assert not held(entry(Kind.RAISES, case="y"), results=[result(Verdict.FAIL)]).passed


def test_every_finding_of_a_case_must_be_expected() -> None:
    wrong = result(Verdict.FAIL, stages=("mask", "path"))

    gate = held(entry(stage="mask"), results=[wrong])

    assert not gate.passed
    assert [Verdict.EXCUSED, Verdict.FAIL] == [f.verdict for f in gate.findings]
    assert Verdict.FAIL is gate.results[0].verdict


def test_a_run_in_which_all_is_excused_shows_nothing() -> None:
    gate = held(entry(case="*r"), entry(case="y", name="f"), results=[result(Verdict.FAIL)])
    gate.results = gate.results[:1]

    assert not gate.passed
    assert gate.shortfall.startswith("nothing was firmly asserted, as every case is excused, ")


def test_an_x_ray_model_that_shows_what_an_earlier_one_told_is_excused_with_it() -> None:
    told = result(Verdict.FAIL, "visible", "x-ray", bundle="x-ray")
    again = result(Verdict.FAIL, "k2", "x-ray", bundle="x-ray", stages=())

    assert held(entry(case="visible"), results=[told, again]).passed
    assert not held(
        results=[
            result(Verdict.FAIL, "visible", "x-ray", bundle="x-ray"),
            result(Verdict.FAIL, "k2", "x-ray", bundle="x-ray", stages=()),
        ]
    ).passed


def test_what_is_excused_does_not_keep_the_x_ray_models_from_being_read(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anything where a draft is to name what they show."""
    import planted_faults

    earlier: list[list[Finding]] = []

    def noted(engine: Engine, findings: Iterable[Finding], **_: Any) -> list[CaseResult]:
        earlier.append([finding for finding in findings if finding.verdict.is_bad])
        return [result(mode="x-ray", bundle="x-ray")]

    monkeypatch.setattr(gate_module, "xray_results", noted)

    def run(*entries: Entry, **how: Any) -> GateResult:
        return run_gate(
            planted_faults.make_engine("position_by_index"),
            [small],
            engine_name="e",
            selection=Selection(cases=frozenset({"y"})),
            xray=True,
            expectations=Expectations("f", TODAY, entries),
            **how,
        )

    assert not run().passed
    assert run(entry(mode="*")).passed
    run(unblocked=True)

    assert earlier[0]
    assert [[], []] == earlier[1:]


# Entries that do not hold


def test_an_entry_that_nothing_fits_is_stale() -> None:
    gate = held(entry(case="y"), results=[result()])

    assert not gate.passed
    assert [
        "f: entry 'e' is stale: it expects 'fails', and that was seen in none of small.kdtr: "
        "y / round; remove it, or correct its patterns"
    ] == gate.unmet


def test_an_entry_for_a_case_that_is_not_there_is_stale() -> None:
    gate = held(entry(case="z"), results=[result()])

    assert [
        "f: entry 'e' is stale: it selects no case of this run; correct its bundle, case or mode, "
        "or remove it"
    ] == gate.unmet


@pytest.mark.parametrize(
    "left_open",
    [
        result(Verdict.BLOCKED),
        result(Verdict.FAIL, stages=("logits",)),
        result(Verdict.NEAR_TIE, blocked=1),
    ],
    ids=["blocked", "failed before", "not reached"],
)
def test_where_it_was_not_reached_an_entry_is_not_stale(left_open: CaseResult) -> None:
    assert [] == held(entry(stage="mask", case="y"), results=[left_open]).unmet


def test_an_entry_of_a_bundle_that_did_not_run_is_not_stale() -> None:
    assert [] == held(entry(bundle="tiny"), results=[result()]).unmet


def test_where_it_is_not_known_what_was_left_out_no_entry_is_stale() -> None:
    assert [] == held(entry(case="y"), results=[result()], unasked=None).unmet


@pytest.mark.parametrize(
    "select", [{"case": "y"}, {"rule": "ACC-4"}, {"case": "z"}, {"bundle": "small", "case": "*"}]
)
def test_an_entry_that_speaks_of_what_was_not_asked_is_not_stale(select: dict[str, str]) -> None:
    unasked = [result(case="y", mode="stepwise"), result(case="z")]

    assert held(entry(**select), results=[result()], unasked=unasked).passed


@pytest.mark.parametrize("select", [{"case": "y"}, {"case": "y", "mode": "round"}])
def test_an_entry_all_of_which_was_asked_is_stale_in_a_part_too(select: dict[str, str]) -> None:
    gate = held(entry(**select), results=[result()], unasked=[result(case="z")])

    assert ["f: entry 'e' is stale: it expects 'fails'"] == [
        u.split(", and")[0] for u in gate.unmet
    ]


def test_an_entry_that_may_be_stale_is_told_and_fails_nothing() -> None:
    unasked = [result(case="y", mode="stepwise"), result(case="y", mode="decode")]

    gate = held(entry(case="y"), results=[result()], unasked=unasked)

    assert gate.passed
    assert [
        "f: entry 'e' may be stale: what it expects was seen in none of small.kdtr: y / round; 2 "
        "more of its cases and modes were not asked, the whole gate tells"
    ] == gate.unknown


@pytest.mark.parametrize(
    "asked",
    [result(Verdict.FAIL), result(Verdict.BLOCKED), result(case="z")],
    ids=["seen", "blocked", "of another case"],
)
def test_nothing_is_told_of_an_entry_that_was_seen_or_was_not_reached(asked: CaseResult) -> None:
    unasked = [result(case="y", mode="stepwise")]

    assert [] == held(entry(case="y"), results=[asked], unasked=unasked).unknown


def test_what_must_pass_and_was_not_asked_is_not_missed(
    listed: Callable[..., dict[str, Any]],
) -> None:
    unasked = [result(case="z")]

    assert held(results=[result()], unasked=unasked, **listed("small/z")).passed
    assert not held(results=[result()], unasked=unasked, **listed("small/x")).passed


def test_an_entry_holds_to_the_end_of_its_day_and_fails_after_it() -> None:
    wrong = [result(Verdict.FAIL)]
    assert held(entry(case="y", expires="2026-11-30"), results=wrong).passed

    gate = held(entry(case="y", expires="2026-11-29"), results=[result(Verdict.FAIL)], unasked=None)

    assert Verdict.FAIL is gate.results[0].verdict
    assert [
        "f: entry 'e' expired on 2026-11-29 and excuses nothing any more; mend the engine and "
        "remove the entry, or decide anew and move the date"
    ] == gate.unmet


# Ceilings


def test_near_ties_above_the_ceiling_fail_but_for_those_that_are_expected() -> None:
    def ties() -> list[CaseResult]:
        return [result(Verdict.NEAR_TIE, case=case) for case in ("a", "b", "c")]

    assert held(results=ties(), max_near_ties=3).passed
    expected = held(entry(Kind.NEAR_TIE, case="a"), results=ties(), max_near_ties=2)
    assert expected.passed
    assert Verdict.NEAR_TIE is expected.results[0].verdict
    assert [
        "f: max_near_ties = 2, but there are 3 near ties: small.kdtr: a / round, b / round, "
        "c / round; find out what changed, then mend it, expect it by an entry, or raise the number"
    ] == held(results=ties(), max_near_ties=2).unmet


def test_what_was_not_checked_has_a_ceiling() -> None:
    tie = result(Verdict.NEAR_TIE, not_checked=3)

    (told,) = held(results=[tie], max_not_checked=2).unmet

    assert told.startswith("f: max_not_checked = 2, but there are 3 near ties that were not checke")


def test_a_verb_that_is_lost_is_seen() -> None:
    lost = [result(Verdict.UNSUPPORTED, case=case, unshown={"round()"}) for case in ("a", "b")]

    assert held(results=lost).passed
    (told,) = held(results=lost, max_not_supported=0).unmet
    assert told.startswith("f: max_not_supported = 0, but there are 2 cases that are not supported")
    known = entry(Kind.NOT_SUPPORTED, mode="round", case="[ab]")
    assert held(known, results=lost, max_not_supported=0).passed


# Must pass


@pytest.fixture
def listed(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """listed("small/y", ...): a mustpass list for a corpus of one bundle, and the bundle."""
    bundle = tmp_path / "small.kdtr"
    bundle.write_bytes(b"a bundle")
    digest = hashlib.sha256(b"a bundle").hexdigest()
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{digest}  small.kdtr\n")
    corpus = hashlib.sha256(sums.read_bytes()).hexdigest()

    def listed(*cases: str) -> dict[str, Any]:
        split = [(*case.split("/"), "*")[:3] for case in cases]
        return {"must_pass": MustPass(corpus, tuple(split)), "bundles": [bundle]}  # type: ignore[arg-type]

    return listed


def test_what_must_pass_is_not_excused(listed: Callable[..., dict[str, Any]]) -> None:
    gate = held(entry(case="y"), results=[result(Verdict.FAIL)], **listed("small/y"))

    assert Verdict.FAIL is gate.results[0].verdict
    assert [
        "f: mustpass names small/y: small.kdtr: y / round is 'fail'; expected 'pass'"
    ] == gate.unmet


@pytest.mark.parametrize("verdict", [Verdict.NEAR_TIE, Verdict.BLOCKED, Verdict.UNSUPPORTED])
def test_what_must_pass_does_pass(listed: Callable[..., dict[str, Any]], verdict: Verdict) -> None:
    assert held(results=[result()], **listed("small/y", "sm*/y/round")).passed

    gate = held(results=[result(verdict)], **listed("small/y/round"))

    assert [
        f"f: mustpass names small/y/round: small.kdtr: y / round is {verdict.value!r}; expected "
        "'pass'"
    ] == gate.unmet


def test_what_must_pass_did_run(listed: Callable[..., dict[str, Any]]) -> None:
    gate = held(results=[result()], **listed("small/z"))

    assert [
        "f: mustpass names small/z, which did not run; give its bundle, or correct the name"
    ] == gate.unmet
    assert held(results=[result()], unasked=None, **listed("small/z")).passed


def test_another_corpus_fails_and_says_what_to_do(
    listed: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    terms = listed("small/y")
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  small.kdtr\n")
    now = hashlib.sha256((tmp_path / "SHA256SUMS").read_bytes()).hexdigest()

    (told,) = held(results=[result()], **terms).unmet

    assert told.startswith(f"f: mustpass.corpus = {terms['must_pass'].corpus}, but ")
    assert f"{tmp_path / 'SHA256SUMS'} has {now}" in told
    assert told.endswith(
        "cases or their truths changed; judge the engine by the new corpus, decide again what "
        "must pass, and write the new digest"
    )


def test_a_bundle_that_is_not_the_corpus_s_fails(listed: Callable[..., dict[str, Any]]) -> None:
    terms = listed("small/y")
    terms["bundles"][0].write_bytes(b"another bundle")

    (told,) = held(results=[result()], **terms).unmet

    assert told == (
        f"f: mustpass names small.kdtr, but {terms['bundles'][0]} is not the bundle of that "
        "corpus; record it again, or take the one whose SHA-256 is in SHA256SUMS"
    )


# The command


@pytest.mark.usefixtures("one_x_ray_model")
def test_the_gate_excuses_and_says_so(
    kdtr: Callable[..., SimpleNamespace], small: Path, tmp_path: Path
) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        'kdtr_expectations = 1\n[[expect]]\nid = "layout"\nkind = "fails"\nrule = "POS-1"\n'
        'reason = "rows are numbered by index"\nlink = "https://example.org/3"\n'
        "expires = 2999-12-31\n"
    )
    words = ["gate", small, "--engine", "planted_faults:make_engine"]
    words += ["--engine-option", "fault=position_by_index"]

    plain, run = kdtr(*words), kdtr(*words, "--expectations", file)

    assert 1 == plain.code
    assert "/ round0: positions: " in plain.out
    assert 0 == run.code, run.out
    assert "/ round0: positions: " not in run.out  # told once, by the entry
    flat = " ".join(run.out.split())
    assert f"expected by {file}:".replace("\n", "") in run.out.replace("\n", "")
    assert "layout fails in bundle.kdtr: " in flat
    assert "rows are numbered by index (https://example.org/3); until 2999-12-31" in flat
    assert " excused; " in run.out
    assert "gate passed: " in run.out


@pytest.mark.usefixtures("one_x_ray_model")
def test_the_gate_fails_for_a_stale_entry(
    kdtr: Callable[..., SimpleNamespace], small: Path, tmp_path: Path
) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        'kdtr_expectations = 1\n[[expect]]\nid = "a"\nkind = "fails"\ncase = "ar"\nreason = "b"\n'
    )
    words = ["gate", small, "--engine", "host", "--expectations", file]

    whole, its_case = kdtr(*words), kdtr(*words, "--case", "ar")
    another, its_begin = kdtr(*words, "--case", "y"), kdtr(*words, "--until", "round0")
    its_mode = kdtr(*words, "--mode", "stepwise")

    assert (1, 1) == (whole.code, its_case.code)
    assert "entry 'a' is stale: " in whole.out
    assert "entry 'a' is stale: " in its_case.out
    assert "gate FAILED: the expectations are unmet: " in whole.out
    assert (0, 0, 0) == (another.code, its_begin.code, its_mode.code)
    assert "stale" not in another.out + its_begin.out
    assert "entry 'a' may be stale: what it expects was seen in none of " in its_mode.out


def test_the_quick_corpus_tells_what_is_stale_as_far_as_it_knows(
    kdtr: Callable[..., SimpleNamespace], corpus: Path, tmp_path: Path
) -> None:
    """Of expert-ties it asks the case `ar` alone."""
    file = tmp_path / "e.toml"
    text = "kdtr_expectations = 1\n"
    for name, select in (
        ("gone", 'case = "ar"'),
        ("maybe", 'rule = "ACC-4"'),
        ("elsewhere", 'case = "trees"'),
        ("other-bundle", 'bundle = "yarn"'),
        ("x-rayed", 'bundle = "x-ray"'),
        ("not-there", 'case = "tress"'),
    ):
        text += f'[[expect]]\nid = "{name}"\nkind = "fails"\n{select}\nreason = "known"\n'
    file.write_text(text)

    run = kdtr(
        *("gate", corpus / "expert-ties.kdtr", "--quick"),
        *("--engine", "host", "--expectations", file),
    )

    assert 1 == run.code
    assert f"{file}: entry 'gone' is stale: it expects 'fails', and that was seen in " in run.out
    assert f"{file}: entry 'not-there' is stale: it selects no case of this run; " in run.out
    assert f"{file}: entry 'maybe' may be stale: what it expects was seen in none of " in run.out
    assert not [one for one in ("elsewhere", "other-bundle", "x-rayed") if one in run.out]
    assert "FAILED: the expectations are unmet: " in run.out


def test_a_file_that_is_refused_is_refused_before_the_engine_is_made(
    kdtr: Callable[..., SimpleNamespace], small: Path, tmp_path: Path
) -> None:
    file = tmp_path / "e.toml"
    file.write_text("kdtr_expectations = 1\nmax = 3\n")

    run = kdtr("gate", small, "--engine", "no_such:engine", "--expectations", file)

    assert 2 == run.code
    assert f"kdtr: ExpectationsError: {file}: no key 'max'; expected " in run.err


def test_the_file_belongs_to_golden_bundles(kdtr: Callable[..., SimpleNamespace]) -> None:
    run = kdtr("gate", "--self", "--model", "m", "--engine", "host", "--expectations", "f")

    assert 2 == run.code
    assert "--expectations belongs to golden bundles; leave it out with --self" in run.err


@pytest.fixture
def one_x_ray_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all: it shows positions, and which rows are read."""
    one = [model for model in xray_gate.xray_models() if model.name == "attention"]
    monkeypatch.setattr(xray_gate, "xray_models", lambda: one)


def test_a_draft_on_a_full_disk_leaves_no_file(
    kdtr: Callable[..., SimpleNamespace],
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "e.toml"

    run = kdtr("gate", small, "--engine", "host", "--case", "ar", "--draft-expectations", file)

    said = f"--draft-expectations {file}: No space left on device; expected a place to write to"
    assert (2, f"kdtr: CaseError: {said}\n") == (run.code, run.err)
    assert [] == [*tmp_path.iterdir()]


def test_a_draft_that_is_a_report_too_or_has_no_folder_is_refused_before_the_run(
    kdtr: Callable[..., SimpleNamespace], small: Path, tmp_path: Path
) -> None:
    words = ("gate", small, "--engine", "no_such_module:make", "--draft-expectations")
    file, lost = tmp_path / "e", tmp_path / "no" / "e"

    both = kdtr(*words, file, "--html", file)
    nowhere = kdtr(*words, lost)

    said = f"--draft-expectations {file} is the file of --html too; expected one file for each"
    assert (2, f"kdtr: CaseError: {said}\n") == (both.code, both.err)
    said = f"--draft-expectations {lost}: no directory {lost.parent}; make it first"
    assert (2, f"kdtr: CaseError: {said}\n") == (nowhere.code, nowhere.err)


@pytest.mark.usefixtures("one_x_ray_model")
def test_a_draft_excuses_all_once_its_reasons_are_given(
    kdtr: Callable[..., SimpleNamespace], small: Path, tmp_path: Path
) -> None:
    file = tmp_path / "e.toml"
    words = ["gate", small, "--engine", "planted_faults:make_engine"]
    words += ["--engine-option", "fault=only_c_kv_moves"]

    drafted = kdtr(*words, "--draft-expectations", file)
    unfinished = kdtr(*words, "--expectations", file)
    text = file.read_text()
    file.write_text(text.replace('reason = ""', 'reason = "keys stay behind"'))
    finished = kdtr(*words, "--expectations", file)
    again = kdtr(*words, "--draft-expectations", file)

    assert 1 == drafted.code
    assert "cache_k_pe" in text
    assert 'bundle = ["x-ray"]' in text
    assert 2 == unfinished.code
    assert "reason = ''; say why this is taken as it is" in unfinished.err
    assert 0 == finished.code, finished.out
    assert " excused; " in finished.out
    assert 2 == again.code
    assert f"{file} is there already; name a new file for the draft" in again.err
