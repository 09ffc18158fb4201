"""Logits, and top-k log-probabilities, read as attention weights."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kdtr.conformance.xray_models import MIRROR, RESERVED, START
from kdtr.conformance.xray_reading import read_logits, read_top_k
from kdtr.contract import InputError


@pytest.fixture
def logits() -> np.ndarray:
    """Half the attention on token 3, a quarter each on token 9 and START, in both of two blocks."""
    row = np.zeros(256)
    row[START] = 32
    row[[3, 9, MIRROR]] = 8, 4, 4
    row[[128 + 3, 128 + 9, 128 + START]] = 8, 4, 4
    return row


def test_weights_are_logits_against_that_of_start(logits: np.ndarray) -> None:
    weights = read_logits(logits).weights

    assert [{3: 0.5, 9: 0.25, START: 0.25}] * 2 == [
        {int(token): row[token] for token in np.flatnonzero(row)} for row in weights
    ]


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    return (logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()).astype(np.float32)


def test_the_log_probabilities_of_a_reserved_token_and_of_all_above_it_are_enough(
    logits: np.ndarray,
) -> None:
    row = log_probabilities(logits)
    listed = [*np.flatnonzero(logits), RESERVED]

    weights = read_top_k([(int(t), float(row[t])) for t in listed], 256).weights

    wanted = read_logits(logits).weights
    assert np.array_equal(wanted == 0, weights == 0)
    assert np.allclose(wanted, weights, rtol=1e-5)


def test_too_few_log_probabilities_are_refused(logits: np.ndarray) -> None:
    row = log_probabilities(logits)

    with pytest.raises(InputError, match=r"3 log-probabilities without one of token 125.*larger k"):
        read_top_k([(t, float(row[t])) for t in (START, 3, 9)], 256)


@pytest.mark.parametrize(
    ("token", "value", "why"),
    [
        (3, np.nan, "1 logits are inf or NaN"),
        (START, 0, "logit 127, a constant of the model, is 0"),
    ],
)
def test_a_row_without_numbers_or_without_its_constant_is_unreadable(
    logits: np.ndarray, token: int, value: float, why: str
) -> None:
    logits[token] = value

    assert re.fullmatch(why, read_logits(logits).unreadable)
