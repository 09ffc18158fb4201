"""Margins: how firm a decision is, in units of what an honest engine may move it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kdtr.conformance import GoldenBundle
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.golden import Models, record_case
from kdtr.conformance.golden_margins import (
    PRECISIONS,
    SAFETY,
    ForwardRecorder,
    Shadow,
    clear_rows,
    token_gaps,
)
from kdtr.conformance.seed_model import seed_tensors

PROMPT = (3, 0, 36, 8)


@pytest.fixture(scope="module")
def models(small_model: SimpleNamespace) -> Models:
    return Models(small_model.config, small_model.weights)


def test_the_gap_is_between_the_two_best() -> None:
    logits = np.array([[1.0, 5.0, 4.5], [2.0, 2.0, 1.0], [-3.0, -9.0, -4.0]])

    assert [0.5, 0.0, 1.0] == token_gaps(logits).tolist()


def test_at_a_margin_of_1_nothing_is_clear() -> None:
    margins = np.array([0.0, 1.0, np.nextafter(1, 2), np.inf])

    assert [False, False, True, True] == clear_rows(margins).tolist()


def shadowed(models: Models, precision: str, first_target: int = 0) -> np.ndarray:
    recorder = ForwardRecorder(models.truth)
    models.truth.open(max_len=9).prefill(PROMPT, trace=recorder)
    return Shadow(models.emulated[precision], 9).margins(PROMPT, recorder.shown(), first_target)


def test_a_shadow_without_noise_decides_everything_clearly(models: Models) -> None:
    recorder = ForwardRecorder(models.truth)
    models.truth.open(max_len=9).prefill(PROMPT, trace=recorder)

    margins = Shadow(models.truth, 9).margins(PROMPT, recorder.shown())

    assert (margins > 1e100).all()


def test_a_margin_of_infinity_is_of_rows_that_decide_nothing(small_model: SimpleNamespace) -> None:
    """A large gap over no noise at all is a finite number still."""
    config = small_model.config.replace(first_k_dense_replace=2)
    head = small_model.weights["lm_head.weight"].astype(np.float32) * 2.0**20
    weights = {**seed_tensors(config, 1), "lm_head.weight": head}
    truth = Models(config, weights).truth
    recorder = ForwardRecorder(truth)
    truth.open(max_len=9).prefill(PROMPT, trace=recorder)
    shown = recorder.shown()

    margins = Shadow(truth, 9).margins(PROMPT, shown, first_target=3)

    assert token_gaps(shown.logits)[3] > 100
    assert [True, True, True, False] == np.isinf(margins).tolist()


def test_a_coarser_shadow_finds_less_clear(models: Models) -> None:
    fine, coarse = (shadowed(models, precision) for precision in PRECISIONS)

    assert ("float32", "bfloat16") == PRECISIONS
    assert (fine > 1000 * coarse).all()
    assert (coarse > 0).all()


def test_the_margin_is_the_thinnest_of_tokens_and_experts(models: Models) -> None:
    """Two logits move, by SAFETY times the noise of the row."""
    recorder, mine = ForwardRecorder(models.truth), ForwardRecorder(models.emulated["bfloat16"])
    models.truth.open(max_len=9).prefill(PROMPT, trace=recorder)
    models.emulated["bfloat16"].open(max_len=9).prefill(PROMPT, trace=mine)
    truth, coarse = recorder.shown(), mine.shown()
    noise = np.abs(truth.logits - coarse.logits).max(axis=1)
    of_tokens = token_gaps(truth.logits) / (2 * SAFETY * noise)
    drift = np.abs(truth.scores[1] - coarse.scores[1]).max(axis=1)
    of_experts = truth.gaps[1] / (SAFETY * drift)

    margins = shadowed(models, "bfloat16")

    np.testing.assert_allclose(margins, np.minimum(of_tokens, of_experts), rtol=1e-12)
    alone = shadowed(models, "bfloat16", first_target=3)  # the prompt's last row chooses a token
    np.testing.assert_allclose(alone[:3], of_experts[:3], rtol=1e-12)
    assert margins[3] == alone[3]


def test_thin_rows_are_counted_all_in_float32_and_on_the_path_in_bfloat16(models: Models) -> None:
    plan = CasePlan("a", "", ("NUM-2",), (Planted((-1, 0, 0, 0), (0, 3)),) * 2, (PROMPT,))

    inputs, expected, thin = record_case(models, plan)

    assert set(PRECISIONS) == set(thin)
    for precision in PRECISIONS:
        counted = 0
        for point in inputs.points():
            margins = expected[f"{point}/margin_{precision}"]
            path = expected.get(f"{point}/path")
            rows = slice(None) if precision == "float32" or path is None else path
            counted += int((margins[rows] <= 1).sum())
        assert counted == thin[precision], precision


def test_margins_are_recorded_for_every_row_of_every_point(small: Path) -> None:
    bundle = GoldenBundle.open(small)
    for case in bundle.cases:
        for point in case.inputs.points():
            at = case.expectation(point)
            tokens = at.get("tokens")
            assert tokens is not None
            for precision in PRECISIONS:
                margins = at.get(f"margin_{precision}")
                assert margins is not None
                assert tokens.shape == margins.shape
    bundle.close()
