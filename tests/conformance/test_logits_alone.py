"""Mutants that show logits and nothing else: the first finding, or an x-ray, says what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kdtr.conformance import GateResult, Verdict, load_engine
from kdtr.conformance.diagnosis_merges import _WRONG, _by, _powered, _without_sum
from kdtr.conformance.diagnosis_pages import _sharing
from kdtr.conformance.mutants import MUTANTS, make_engine
from kdtr.conformance.mutants.docket import Docket
from kdtr.conformance.mutants.padded import Padded
from kdtr.conformance.mutants.trial import LogitsOnly, by_logits_alone
from kdtr.conformance.xray import run_xray, xray_models

Judge = Callable[..., GateResult]
VISIBLE = [model for model in xray_models() if model.name == "visible"]


@pytest.fixture(scope="module")
def dockets(corpus: Path) -> Iterator[dict[str, Docket]]:
    names = ("all-moe", "base", "negative-bias")
    with ExitStack() as stack:
        yield {n: stack.enter_context(Docket([corpus / f"{n}.kdtr"])) for n in names}


@pytest.mark.parametrize(
    ("number", "bundle", "says"),
    [
        ("M009", "all-moe", "the prefix is 7 columns short, and the tree's block as far too far"),
        ("M049", "all-moe", "lie in one page of 3 slots: 12 and 15 are one slot"),
        ("M073", "all-moe", "in the prefill before this point attention was as if "),
        ("M082", "all-moe", "the inverse frequencies of the rotation are rounded to bfloat16"),
        ("M083", "all-moe", "the angles of the rotation are rounded to bfloat16"),
        ("M093", "all-moe", "splits of 5 slots are merged in the wrong base: their LSE is mult"),
        ("M100", "all-moe", "softmax is not divided by the sum of its weights"),
        ("M152", "base", "kept in words of 64 bits: nodes j and j + 64 are one bit"),
    ],
)
def test_a_forward_that_goes_so_wrong_explains_the_logits(
    dockets: dict[str, Docket], number: str, bundle: str, says: str
) -> None:
    trial = by_logits_alone(dockets[bundle], MUTANTS[number], make_engine(number))

    assert ("logits", True) == (trial.stage, trial.named)
    assert says in trial.says
    assert "(fits every element" in trial.says


def test_rows_that_nobody_asked_for_are_padding(dockets: dict[str, Docket]) -> None:
    """With room for them the answer has four rows; without, the engine finds none."""
    mutant, engine = MUTANTS["M072"], make_engine("M072")

    crowded = by_logits_alone(dockets["all-moe"], mutant, engine)
    roomy = by_logits_alone(dockets["negative-bias"], mutant, engine)

    assert (("SLOT-3", "PAD-1"), True) == (crowded.rules, crowded.named)
    assert "verify of 4 rows at committed_len 4 needs 8 slots" in crowded.says
    assert (("PAD-1",), True) == (roomy.rules, roomy.named)
    assert "verify() returned logits [4, 61]; expected [1, 61]" in roomy.says


def test_an_x_ray_tells_the_slot_from_which_on_rows_are_lost() -> None:
    finding = run_xray(LogitsOnly(make_engine("M051")), models=VISIBLE).findings[0]

    assert ("SLOT-1", "MASK-3") == finding.rules
    assert (
        "; they are those that see slot 3 or a later one, and no others: the rows of these slots "
        "are not where attention reads them"
    ) in finding.summary


@pytest.mark.parametrize("number", ["M053", "M097"])
def test_what_is_read_behind_every_row_has_no_such_slot(number: str) -> None:
    finding = run_xray(LogitsOnly(make_engine(number)), models=VISIBLE).findings[0]

    assert ("MASK-3", "FWD-4") == finding.rules
    assert "rows cannot be read" in finding.summary
    assert "no others" not in finding.summary


def test_a_weight_that_is_no_number_of_rows_is_told_as_a_weight() -> None:
    """Splits that are merged in the wrong base: slots 0..4 weigh twice as much, and a bit more."""
    result = run_xray(LogitsOnly(make_engine("M093")), models=VISIBLE)

    (finding,) = result.findings
    assert ("scores", ("MLA-3",)) == (finding.stage, finding.rules)
    assert "the weight of slot 0 against the row itself is 2.039 times what it should be" in (
        finding.summary
    )


# Merges


def _scores(seed: int, slots: int = 11) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(4, 2, slots)) * 3
    scores[1, :, 4:] = -np.inf  # sees the beginning alone
    scores[2, :, :6] = -np.inf  # the end alone
    scores[3, :, 3:9] = -np.inf
    return scores


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 16])
def test_a_merge_by_lse_is_a_softmax_whatever_the_splits(size: int) -> None:
    scores = _scores(size)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))

    merged = _by(size, _powered(1.0))(scores)

    np.testing.assert_allclose(merged, e / e.sum(axis=-1, keepdims=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("says", "weigh"), _WRONG, ids=[says for says, _ in _WRONG])
def test_a_wrong_merge_shows_where_there_are_two_splits_and_not_in_one(
    says: str, weigh: Callable[..., np.ndarray]
) -> None:
    scores = _scores(7)[:1]
    right = _by(4, _powered(1.0))(scores)

    assert abs(_by(4, weigh)(scores) - right).max() > 1e-3
    if says != "without the last one":
        np.testing.assert_allclose(_by(11, weigh)(scores), right, rtol=1e-12)


def test_a_softmax_without_its_sum_has_the_largest_weight_1() -> None:
    weights = _without_sum(_scores(3))

    np.testing.assert_array_equal(np.ones((4, 2)), weights.max(axis=-1))


# Pages


def test_pages_that_are_one_hold_the_later_row() -> None:
    """L = 4, pages of 2: slots 6 and 8 are one, and 7 and 9."""
    old, new = np.zeros((10, 1)), np.arange(1.0, 7.0)[:, None]
    old[:4] = -1

    held = _sharing(2, in_page_0=False)(old, new, 4)

    assert [-1, -1, -1, -1, 1, 2, 5, 6, 5, 6] == held[:, 0].tolist()


def test_pages_that_are_page_0_overwrite_it() -> None:
    old, new = np.zeros((8, 1)), np.arange(1.0, 5.0)[:, None]
    old[:4] = -1

    held = _sharing(2, in_page_0=True)(old, new, 4)

    assert [3, 4, -1, -1, 1, 2, 3, 4] == held[:, 0].tolist()


# Padding


@pytest.mark.parametrize("bucket", [8, 32])
def test_padding_without_a_fault_is_not_seen(judge: Judge, small: Path, bucket: int) -> None:
    padded = load_engine("host", {"page_size": 3, "split_size": 5})
    Padded(padded, bucket=bucket)

    gate = judge(padded, small)

    assert gate.passed
    assert {Verdict.PASS} == {result.verdict for result in gate.results}
