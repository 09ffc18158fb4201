"""The near-tie policy: a decision thinner than the bounds is not called wrong (NUM-2)."""

from __future__ import annotations

import numpy as np

from kdtr.conformance.bundle import Expectation
from kdtr.conformance.tolerance import UNIT_ROUNDOFF, row_bound
from kdtr.contract import STAGE, ModelConfig, NumericProfile, Stage


def near_tie(
    expectation: Expectation,
    stage: Stage,
    layer: int | None,
    expected: np.ndarray,
    actual: np.ndarray,
    config: ModelConfig,
    profile: NumericProfile,
    logits: np.ndarray | None = None,
    bonus: int | None = None,
) -> str | None:
    """NUM-2: why a decision that differs is no failure, or None when it is one.

    logits [n, w], bonus: the engine's own, where it shows them
    Every row that differs must be thinner than the bounds allow to tell apart. A token that is
    not the engine's own top one is no tie but a wrong argmax (ACC-1).
    """
    if stage.name == "targets" and actual.shape == expected.shape:
        return _token_tie(expectation, expected, actual, config, profile, logits)
    if stage.name in ("root", "bonus") and expected.ndim == 0:
        return _last_token_tie(expectation, expected, actual, config, profile, logits)
    if stage.name == "path" and bonus is not None:
        return _path_tie(expectation, expected, actual, bonus, config, profile, logits)
    if stage.name == "expert_ids" and actual.shape == expected.shape:
        assert layer is not None
        scores = expectation.get("router_scores", layer)
        assert scores is not None
        bound = row_bound(STAGE["router_scores"], layer, scores, config, profile)[:, 0]
        rows = np.flatnonzero((expected != actual).any(axis=1))
        gap = expectation.expert_gap(layer)[rows]
        if (gap <= bound[rows]).all():
            return (
                f"the choice of row {rows[0]} hangs on {gap[0]:.2g}, less than {bound[rows[0]]:.2g}"
            )
    return None


def _token_tie(
    expectation: Expectation,
    expected: np.ndarray,
    actual: np.ndarray,
    config: ModelConfig,
    profile: NumericProfile,
    own: np.ndarray | None,
) -> str | None:
    logits = expectation.get("logits")
    assert logits is not None
    allowed = 2 * row_bound(STAGE["logits"], None, logits, config, profile)[:, 0]
    rows = np.flatnonzero(expected != actual)
    in_range = (actual[rows] >= 0) & (actual[rows] < config.vocab_size)
    if not in_range.all():
        return None
    gap = logits[rows, expected[rows]] - logits[rows, actual[rows]]
    if (gap > allowed[rows]).any():
        return None
    if own is not None and not _is_top(own[rows].astype(np.float64), actual[rows], profile).all():
        return None
    return f"the logits of row {rows[0]} differ by {gap[0]:.2g}, less than {allowed[rows[0]]:.2g}"


def _path_tie(
    expectation: Expectation,
    expected: np.ndarray,
    actual: np.ndarray,
    bonus: int,
    config: ModelConfig,
    profile: NumericProfile,
    own: np.ndarray | None,
) -> str | None:
    """The walks part after a node whose target hangs on little: known from what each took next."""
    tokens, last = expectation.get("tokens"), expectation.get("bonus")
    assert tokens is not None
    assert last is not None
    shared = 0
    while shared < min(len(expected), len(actual)) and expected[shared] == actual[shared]:
        shared += 1
    if shared == 0 or actual.max() >= len(tokens):
        return None
    took = tokens[actual[shared]] if shared < len(actual) else bonus
    right = tokens[expected[shared]] if shared < len(expected) else last
    row = int(expected[shared - 1])
    return _one_token_tie(expectation, row, int(right), int(took), config, profile, own)


def _last_token_tie(
    expectation: Expectation,
    expected: np.ndarray,
    actual: np.ndarray,
    config: ModelConfig,
    profile: NumericProfile,
    own: np.ndarray | None,
) -> str | None:
    """The root after a prefill, the bonus of a decode: the target of one known row."""
    path = expectation.get("path")
    logits = expectation.get("logits")
    assert logits is not None
    row = len(logits) - 1 if path is None else int(path[-1])
    return _one_token_tie(expectation, row, int(expected), int(actual), config, profile, own)


def _one_token_tie(
    expectation: Expectation,
    row: int,
    expected: int,
    actual: int,
    config: ModelConfig,
    profile: NumericProfile,
    own: np.ndarray | None,
) -> str | None:
    """The tie of one row, as the targets of a forward in which no other row differs."""
    logits = expectation.get("logits")
    assert logits is not None
    right = np.zeros(len(logits), dtype=np.int64)
    took = right.copy()
    right[row], took[row] = expected, actual
    if expected == actual:
        return None
    return _token_tie(expectation, right, took, config, profile, own)


def _is_top(own: np.ndarray, tokens: np.ndarray, profile: NumericProfile) -> np.ndarray:
    """own [n, w], tokens [n] -> whether each is the argmax of its row, the lowest id (ACC-1).

    Logits stored more coarsely than they were summed tie where the engine saw no tie: then any
    top id will do.
    """
    if UNIT_ROUNDOFF[profile.logits] > UNIT_ROUNDOFF[profile.accumulation]:
        return own[np.arange(len(own)), tokens] == own.max(axis=-1)
    return own.argmax(axis=-1) == tokens
