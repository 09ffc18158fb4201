"""The quick corpus: pinned to the corpus, no case too many, and every mutant of the list dies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdtr.conformance import load_engine
from kdtr.conformance.gate import Selection, run_gate
from kdtr.conformance.golden_corpus import read_sums
from kdtr.conformance.mutants import MUTANTS, make_engine
from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.mutants.engine_run import EngineRun
from kdtr.conformance.mutants.families.families_run import FIRST, SUBJECTS
from kdtr.conformance.mutants.families.hunt import make_variant
from kdtr.conformance.quick_corpus import (
    FILE,
    QuickCase,
    QuickCorpus,
    read_quick,
    shipped_corpus,
)
from kdtr.contract import CaseError

QUICK = read_quick()
SHIPPED = QUICK.of_bundles(shipped_corpus())


def _entry(one: QuickCase) -> Entry:
    return Entry(one.bundle.removesuffix(".kdtr"), one.case)


@pytest.fixture(scope="module")
def docket() -> Iterator[Docket]:
    with Docket([path for path in shipped_corpus() if Path(path).name in QUICK.sums]) as docket:
        yield docket


# The file


def test_it_is_pinned_to_the_sums_of_the_corpus(corpus: Path) -> None:
    """If they differ, the corpus was recorded anew: `make quick-corpus`."""
    sums = read_sums(corpus)

    assert {name: sums[name] for name in QUICK.sums} == QUICK.sums
    assert {one.bundle for one in QUICK.cases} == set(QUICK.sums)


def test_its_cases_are_those_of_the_corpus(docket: Docket) -> None:
    assert {one.case_id for one in SHIPPED.cases} == {
        docket.case(_entry(one)).inputs.case_id for one in SHIPPED.cases
    }


def test_it_is_written_as_it_is_read(corpus: Path) -> None:
    text = (corpus.parent / FILE).read_text(encoding="utf-8")

    assert text == QUICK.text()
    assert json.loads(text)["of"] > 4 * len(QUICK.cases)


def test_every_case_is_there_for_a_subject_that_it_alone_kills() -> None:
    for one in QUICK.cases:
        assert one.kills or _entry(one) == FIRST
        assert set(one.kills) <= set(SUBJECTS)


@pytest.mark.parametrize(
    "one",
    [one for one in SHIPPED.cases if one.kills][::4],  # `make quick-corpus` has asked of all
    ids=lambda one: f"{one.bundle}/{one.case}",
)
def test_no_other_case_of_it_kills_that_subject(docket: Docket, one: QuickCase) -> None:
    subject = SUBJECTS[one.kills[0]]

    killers = [
        other
        for other in SHIPPED.cases
        if EngineRun(docket, make_variant(subject)).finding(_entry(other)) is not None
    ]

    assert [one] == killers


@pytest.mark.parametrize("number", MUTANTS)
def test_it_kills_every_mutant_of_the_list(docket: Docket, number: str) -> None:
    run = EngineRun(docket, make_engine(number))
    likely_first = sorted(map(_entry, SHIPPED.cases), key=lambda entry: entry != FIRST)

    assert any(run.finding(entry) is not None for entry in likely_first)


# The gate


HONEST: tuple[dict[str, Any], ...] = (
    {},
    {"page_size": 3, "split_size": 5},
    {"summation": "shuffled", "summation_seed": 3},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "page_size": 1},
)


@pytest.mark.parametrize("options", HONEST, ids=str)
def test_an_honest_engine_passes_it_and_is_asked_no_other_case(options: dict[str, Any]) -> None:
    gate = run_gate(
        load_engine("host", options),
        shipped_corpus(),
        engine_name="host",
        selection=Selection(quick=SHIPPED),
    )

    assert [] == [finding.lines() for finding in gate.findings if finding.verdict.is_bad]
    assert gate.passed
    ran = {(Path(one.bundle).name, one.case) for one in gate.results}
    assert {(one.bundle, one.case) for one in SHIPPED.cases} == ran


@pytest.mark.parametrize("options", HONEST[2:4], ids=str)
def test_an_honest_engine_passes_the_whole_of_the_base(
    corpus: Path, options: dict[str, Any]
) -> None:
    gate = run_gate(load_engine("host", options), [corpus / "base.kdtr"], engine_name="host")

    assert [] == [finding.lines() for finding in gate.findings if finding.verdict.is_bad]
    assert gate.passed


def test_the_command_says_that_it_is_not_the_whole_gate(
    kdtr: Callable[..., SimpleNamespace],
) -> None:
    run = kdtr("gate", "--quick", "--engine", "host")

    assert 0 == run.code
    last = run.out.rstrip().splitlines()[-1]
    n, bundles = len(SHIPPED.cases), len({one.bundle for one in SHIPPED.cases})
    assert last.startswith(
        f"quick corpus ({n} of {QUICK.of} cases, of {bundles} bundles; not the whole gate) passed: "
    )
    assert not re.search(r"^gate passed", run.out, re.MULTILINE)


def test_a_fault_fails_it(kdtr: Callable[..., SimpleNamespace]) -> None:
    run = kdtr(
        *("gate", "--quick", "--engine", "kdtr.conformance.mutants:make_engine"),
        *("--engine-option", "mutant=M002"),
    )

    assert 1 == run.code
    assert "not the whole gate) FAILED: " in run.out


# Refusals


def test_another_bundle_of_the_name_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "base.kdtr"
    other.write_bytes(b"no bundle")

    with pytest.raises(
        CaseError,
        match=r"base\.kdtr: its SHA-256 is [0-9a-f]{12}\.\.\., the quick corpus was chosen for "
        r"[0-9a-f]{12}\.\.\.; choose the cases anew with `make quick-corpus`",
    ):
        QUICK.of_bundles([other])


def test_a_bundle_that_has_no_quick_case_is_refused() -> None:
    quick = QuickCorpus(QUICK.cases[:1], {QUICK.cases[0].bundle: "00"}, 9, {})

    with pytest.raises(CaseError, match=r"^other\.kdtr: the quick corpus has no case of it; "):
        quick.of_bundles(["other.kdtr"])


def test_a_part_of_it_keeps_what_it_is_a_part_of() -> None:
    part = QUICK.of_bundles([path for path in shipped_corpus() if path.endswith("base.kdtr")])

    assert {"base.kdtr"} == {one.bundle for one in part.cases}
    assert replace(part, cases=QUICK.cases) == QUICK


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--self", "--model", "m"), "--quick is of golden bundles; leave it out with --self"),
        (("nothing.kdtr",), "nothing.kdtr: the quick corpus has no case of it; expected some of "),
    ],
)
def test_a_request_is_refused(
    kdtr: Callable[..., SimpleNamespace], words: tuple[str, ...], said: str
) -> None:
    run = kdtr("gate", "--engine", "host", "--quick", *words)

    assert 2 == run.code
    assert f"kdtr: CaseError: {said}" in run.err
