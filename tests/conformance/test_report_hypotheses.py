"""Explanations ranked by what all cases show, and the experiment that tells one from the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kdtr.conformance import CaseResult, Finding, GateResult, Verdict, load_engine
from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.finding import Place
from kdtr.conformance.finding_groups import Group, grouped
from kdtr.conformance.report_experiments import Bench, Kind, kind
from kdtr.conformance.report_group import group_lines
from kdtr.conformance.report_hypotheses import hypothesis_lines
from kdtr.contract import EngineInfo, NumericProfile

Judge = Callable[..., GateResult]

AGAIN = (
    "kdtr gate b.kdtr --engine my:make --engine-option page_size=16 --case y --mode stepwise "
    "--until round0"
)
LEAK = Hint("it leaks", ("MASK-2",))
INDEX = Hint("it counts", ("POS-1",))
STALE = Hint("it is stale", ("COMMIT-1",))
SCALE = Hint("it is scaled", ("MLA-4",))
COARSE = Hint("it is rounded", ("NUM-1",))
EDGE = Hint("rows from 3 on differ: an edge of a page?", ("SLOT-1",), fit=0.5)
WRAPS = Hint("slots wrap at 3, in one page", ("SLOT-1",))


def group(*hints: Hint, mode: str = "stepwise") -> Group:
    place = Place("b.kdtr", "y", mode, "round0")
    return Group(
        [Finding(Verdict.FAIL, place, "logits", "differ", looks_like=hints, reproduce=AGAIN)]
    )


def bench(verbs: Iterable[str] = (), options: Iterable[str] = (), *results: CaseResult) -> Bench:
    info = EngineInfo("mine", "1", "cpu", NumericProfile(), frozenset(verbs))
    golden = results or (CaseResult("b.kdtr", "y", "stepwise", Verdict.FAIL), other("z"))
    return Bench(info, frozenset(options), golden)


def other(case: str, mode: str = "stepwise", verdict: Verdict = Verdict.PASS) -> CaseResult:
    return CaseResult("b.kdtr", case, mode, verdict)


def lines(found: Group, on: Bench) -> list[str]:
    return hypothesis_lines(found, on, 200)


def test_kinds_go_by_rule_and_pages_by_their_name() -> None:
    assert [Kind.LAYOUT, Kind.CACHE, Kind.OTHER, Kind.ROUNDING, Kind.PAGE, Kind.OTHER] == [
        kind(hint) for hint in (INDEX, STALE, SCALE, COARSE, EDGE, Hint("it is odd"))
    ]


def test_one_explanation_is_not_numbered_and_needs_no_experiment() -> None:
    assert ["  looks like it leaks (fits every element, MASK-2)"] == lines(group(LEAK), bench())


def test_the_edge_of_a_page_is_made_sure_of_by_another_size() -> None:
    assert [
        "  looks like rows from 3 on differ: an edge of a page? (fits 50%, SLOT-1)",
        "  to be sure rerun with page_size=64: the fault moves if it is the edge of a page",
        f"  run       {AGAIN.replace('page_size=16', 'page_size=64')}",
    ] == lines(group(EDGE), bench(options=["page_size"]))
    assert (
        "  to be sure rerun with another size of pages: the fault moves if it is the edge of a page"
    ) == lines(group(EDGE), bench())[1]


def test_another_page_size_than_the_one_at_hand() -> None:
    found = group(EDGE)
    again = AGAIN.replace("page_size=16", "page_size=64")
    found.findings[0] = Finding(
        Verdict.FAIL, found.first.place, "logits", "differ", looks_like=(EDGE,), reproduce=again
    )

    assert f"  run       {AGAIN}" in lines(found, bench(options=["page_size"]))


@pytest.mark.parametrize(
    ("hints", "verbs", "options", "says", "command"),
    [
        (
            (WRAPS, SCALE),
            (),
            ("page_size",),
            "rerun with page_size=64: the fault moves if it is 1, and stays if it is 2",
            AGAIN.replace("page_size=16", "page_size=64"),
        ),
        (
            (SCALE, LEAK),
            ("forward_tokens", "commit"),
            (),
            "rerun in the mode forward, where positions and mask are given: it passes if it is 2, "
            "and fails as before if it is 1",
            AGAIN.replace("stepwise", "forward"),
        ),
        (
            (SCALE, COARSE),
            (),
            ("dtype",),
            "rerun with dtype=float32: the error shrinks if it is 2, and stays if it is 1",
            f"{AGAIN} --engine-option dtype=float32",
        ),
        (
            (STALE, SCALE),
            (),
            (),
            "offer snapshot(): the rows that commit left are wrong if it is 1, and right if it is "
            "2",
            "",
        ),
        (
            (LEAK, INDEX),
            ("prefill", "verify", "commit"),
            (),
            "an x-ray reads from logits what every row saw, at which distance, and how weighted",
            "kdtr xray --engine my:make --engine-option page_size=16",
        ),
        (
            (LEAK, INDEX),
            (),
            (),
            "no case here tells them apart; random trees and models may",
            "pytest --pyargs kdtr.property_tests --kdtr-engine my:make "
            "--kdtr-engine-option page_size=16",
        ),
    ],
    ids=["page", "forward", "dtype", "snapshot", "x-ray", "laws"],
)
def test_what_tells_two_apart(
    hints: tuple[Hint, ...],
    verbs: tuple[str, ...],
    options: tuple[str, ...],
    says: str,
    command: str,
) -> None:
    found = lines(group(*hints), bench(verbs, options))

    assert f"  looks like 1: {hints[0]}" == found[0]
    assert f"  or like   2: {hints[1]}" == found[1]
    assert f"  1 or 2    {says}" == found[2]
    assert ([f"  run       {command}"] if command else []) == found[3:]


def test_an_experiment_that_tells_three_is_told_once() -> None:
    found = lines(group(LEAK, INDEX, Hint("it turns", ("POS-1",))), bench())

    assert "  1, 2 or 3 no case here tells them apart; random trees and models may" == found[3]
    assert 5 == len(found)


def test_a_single_case_sends_to_all_of_them() -> None:
    alone = CaseResult("b.kdtr", "y", "stepwise", Verdict.FAIL)

    found = lines(group(LEAK, INDEX), bench((), (), alone))

    assert "  1 or 2    judge all cases: another tree may fit one of them alone" == found[2]
    assert "  run       kdtr gate b.kdtr --engine my:make --engine-option page_size=16" == found[3]


def test_a_case_that_is_blocked_is_judged_alone() -> None:
    blocked = other("star", verdict=Verdict.BLOCKED)
    blocked.branched = True

    found = lines(group(LEAK, INDEX), bench(("prefill", "verify", "commit"), (), blocked))

    assert (
        "  1 or 2    judge star, which this one blocks: its branches may fit one of them alone"
        == found[2]
    )
    assert found[3].endswith("--mode stepwise --case star")


@pytest.mark.parametrize(
    ("verdict", "first", "ended"),
    [
        (Verdict.PASS, LEAK, "passes here, which speaks for 1"),
        (Verdict.FAIL, SCALE, "fails here too: it is 1"),
    ],
)
def test_a_mode_that_has_run_is_an_experiment_made(
    verdict: Verdict, first: Hint, ended: str
) -> None:
    """And what it speaks for comes first, whatever the order of the diagnosis."""
    hints = (SCALE, LEAK) if first is LEAK else (LEAK, SCALE)

    found = lines(group(*hints), bench((), (), other("y", "forward", verdict)))

    assert f"  looks like 1: {first}" == found[0]
    assert f"  1 or 2    the mode forward, where positions and mask are given, {ended}" == found[2]


def test_no_explanation_is_ruled_out_where_none_would_be_left() -> None:
    found = group(LEAK)
    place = Place("b.kdtr", "z", "stepwise", "round0")
    found.findings.append(Finding(Verdict.FAIL, place, "logits", "x", looks_like=(SCALE,)))

    assert [f"  looks like {LEAK}"] == lines(found, bench())


def test_what_does_not_fit_is_named_with_its_bundle_where_that_is_another() -> None:
    found = group(LEAK, INDEX)
    others = [
        Finding(
            Verdict.FAIL,
            Place(f"d/{name}.kdtr", "y", "stepwise", "round0"),
            "logits",
            "differ",
            looks_like=(LEAK,),
        )
        for name in ("other", "third")
    ]

    found.findings += others

    not_fitting = next(line for line in lines(found, bench()) if line.startswith("  not "))
    assert not_fitting.endswith(": it does not fit other: y / stepwise and 1 more")


# On engines


def told(judge: Judge, bundle: Path, fault: str, *cases: str) -> list[str]:
    """The report of the one group, in one line per entry."""
    gate = judge("planted_faults:make_engine", bundle, *cases, modes=["stepwise"], fault=fault)
    (one,) = grouped(gate.findings)
    on = Bench(load_engine("host").info, frozenset({"page_size"}), gate.results)
    return group_lines(one, on, 400)


def test_star_alone_cannot_tell_siblings_from_causal_by_index(judge: Judge, tiny: Path) -> None:
    text = "\n".join(told(judge, tiny, "sibling_visible", "star"))

    assert "  looks like 1: a node sees its earlier siblings (" in text
    assert "  or like   2: causal by index: a node sees every earlier node" in text
    assert "  1 or 2    an x-ray reads from logits" in text
    assert "  not  " not in text


def test_a_best_first_tree_tells_them_apart(judge: Judge, tiny: Path) -> None:
    text = "\n".join(told(judge, tiny, "sibling_visible", "star", "best-first"))

    assert "  looks like a node sees its earlier siblings (" in text
    assert (
        "  not       causal by index: a node sees every earlier node, as if the tree were a chain: "
        "it does not fit best-first / stepwise\n"
    ) in text
    assert "  also in   1 case: best-first\n" in text


def test_an_empty_cache_hides_l_and_a_prompt_shows_it(judge: Judge, tiny: Path) -> None:
    text = "\n".join(told(judge, tiny, "position_by_index", "from-root", "y-tree"))

    assert "  looks like positions are L + index, as if the tree were a chain (" in text
    assert (
        "  not       positions are the index of the node, without L: it does not fit y-tree / "
        "stepwise\n"
    ) in text


def test_the_report_names_cases_and_modes_and_stays_within_the_width(
    judge: Judge, tiny: Path
) -> None:
    gate = judge("planted_faults:make_engine", tiny, "y-tree", "star", fault="sibling_visible")
    (one,) = grouped(gate.findings)

    text = group_lines(one, Bench(load_engine("host").info, frozenset(), gate.results))

    assert "  also in   1 case: star; in the modes stepwise, round, shipped" in text
    assert all(len(line) <= 80 for line in text if not line.startswith("  again "))
