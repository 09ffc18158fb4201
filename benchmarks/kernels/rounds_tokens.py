"""Tokens by decoding and by trees, for rounds.py, beside this file: as many, and the same?

The drafter is an oracle: it knows what decoding gives, and at every depth ranks that token first
with the probability asked for, and third otherwise, among tokens that a generator chooses.
tokens/s counts rounds, captures of graphs and building trees, and not the oracle's own time. Where
trees give another token, all that it drafts from there on is wrong, and the numbers of that row
are no measurement.

Everything is generated twice, and must repeat itself. Trees and decoding may give other tokens at a
near tie alone: a path's rows lie in other slots, and so sums are in another order (NUM-4). Then the
two rows of logits, decoding's and the tree's, lie within MOST_STEPS of each other, and so do the
two tokens in decoding's.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kdtr.contract import DraftTree, ModelConfig

PROMPT = [int(token) for token in np.random.default_rng(3).integers(512, size=24)]
N_TOKENS = 512
BUDGETS, HITS = (4, 16, 64), (0.5, 0.8, 0.95)
# A step: of neighbouring numbers of the dtype at the greatest logit of a row. Rows that differ by
# rounding alone were one step apart (bfloat16, host engine, token 284 of all nine kinds of trees).
MOST_STEPS = {"float32": 64, "bfloat16": 4}
_FRACTION_BITS = {"float32": 23, "bfloat16": 7}
_DEPTH = 12  # tokens that the oracle drafts
_MAX_LEN = 1500


def chain(session: Any, n: int) -> DraftTree:
    return DraftTree((session.root, *range(1, n)), tuple(range(-1, n - 1)))


def generation(model: Any, dtype: str, n_tokens: int = N_TOKENS) -> tuple[list[str], bool]:
    """The table, and whether all tokens are decoding's, or others at a near tie."""
    (again, _), (plain, seconds) = (_decoded(model, n_tokens) for _ in range(2))
    right = again == plain
    lines = [
        "",
        f"## {n_tokens} tokens, {dtype}",
        "",
        "| by | budget | hit rate | tokens/s | times decoding | accept_len | rounds | tokens |",
        "|---|---|---|---|---|---|---|---|",
        f"| decoding | 0 | | {n_tokens / seconds:.0f} | 1 | 1 | {n_tokens} "
        f"| {'' if right else 'NOT those of the first run'} |",
    ]
    for budget in BUDGETS:
        for hit in HITS:
            (first, _), (rounds, by_trees) = (
                _by_trees(model, plain, budget, hit, n_tokens) for _ in range(2)
            )
            tokens = [token for emitted in rounds for token in emitted]
            if first != rounds:
                said, same = "NOT those of the first run", False
            else:
                said, same = _agreement(model, dtype, plain, tokens[:n_tokens], (budget, hit))
            right &= same
            lines.append(
                f"| trees | {budget} | {hit} | {n_tokens / by_trees:.0f} "
                f"| {seconds / by_trees:.2f} | {len(tokens) / (len(rounds) - 1):.2f} "
                f"| {len(rounds) - 1} | {said} |"
            )
    return lines, right


def near_tie(
    dtype: str, one: np.ndarray, other: np.ndarray, token: int, token_of_other: int
) -> tuple[str, bool]:
    """Whether two rows of logits [w] chose two tokens by rounding alone, and what to say of it."""
    if (token, token_of_other) != (int(one.argmax()), int(other.argmax())):
        return "a token that is not the best of its row", False
    one, other = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(all="ignore"):
        step = 2.0 ** (np.floor(np.log2(abs(one).max())) - _FRACTION_BITS[dtype])
        gap, apart = (one[token] - one[token_of_other]) / step, abs(one - other).max() / step
    most = MOST_STEPS[dtype]
    near = bool(gap <= most and apart <= most)  # and neither is NaN
    said = f"{gap:g} steps between the two, rows {apart:g} apart"
    return f"{'a near tie' if near else 'NO near tie'}: {said}", near


def _agreement(
    model: Any, dtype: str, plain: list[int], tokens: list[int], drafted: tuple[int, float]
) -> tuple[str, bool]:
    """Of tokens by trees beside those of decoding."""
    pairs = enumerate(zip(plain, tokens, strict=False))  # decoding has some more, to draft from
    at = next((i for i, (one, other) in pairs if one != other), None)
    if at is None:
        return "identical", True
    if at == 0:
        return "other from the prompt's on", False
    session = model.open(max_len=_MAX_LEN)
    session.prefill(PROMPT)
    for _ in range(at - 1):
        session.decode()
    one = session.verify(chain(session, 1)).logits[0]
    other = _row_by_tree(model, plain, *drafted, at)
    said, near = near_tie(dtype, one, other, plain[at], tokens[at])
    return f"other from {at} on, {said}", near


def _decoded(model: Any, n_tokens: int) -> tuple[list[int], float]:
    session = model.open(max_len=_MAX_LEN)
    tokens = [session.prefill(PROMPT)]
    start = time.perf_counter()
    tokens += [session.decode() for _ in range(n_tokens + _DEPTH)]
    return tokens, (time.perf_counter() - start) * n_tokens / (n_tokens + _DEPTH)


def _by_trees(
    model: Any, plain: list[int], budget: int, hit: float, n_tokens: int
) -> tuple[list[tuple[int, ...]], float]:
    """The prompt's token, what each round emitted, and the seconds of building and rounds."""
    oracle = _Oracle(plain, budget, hit)
    session = model.open(max_len=_MAX_LEN)
    rounds, n, seconds = [(session.prefill(PROMPT),)], 1, 0.0
    while n < n_tokens:
        drafts = oracle.drafts(n)
        start = time.perf_counter()
        done = session.round(session.build(drafts, budget))
        seconds += time.perf_counter() - start
        rounds.append(done.emitted)
        n += len(done.emitted)
    return rounds, seconds


def _row_by_tree(model: Any, plain: list[int], budget: int, hit: float, at: int) -> np.ndarray:
    """The logits [w] by which the same trees chose the token at this place."""
    oracle = _Oracle(plain, budget, hit)
    session = model.open(max_len=_MAX_LEN)
    session.prefill(PROMPT)
    n = 1
    while True:
        tree = session.build(oracle.drafts(n), budget)
        verified = session.verify(tree)
        accepted = session.accept(tree)
        if n + accepted.accept_len > at:
            row: np.ndarray = verified.logits[accepted.path[at - n]]
            return row
        n += len(session.round(tree).emitted)


class _Oracle:
    """Drafts from what decoding gives; the same in the same order, from a budget and a hit rate."""

    def __init__(self, plain: list[int], budget: int, hit: float) -> None:
        self._random = np.random.default_rng(int(budget * 100 + hit * 100))
        self._plain, self._hit = plain, hit

    def drafts(self, n: int) -> np.ndarray:
        """[depth, vocab], after n tokens: the right token first, or third behind two others."""
        right = self._plain[n : n + _DEPTH]
        logits = self._random.standard_normal((len(right), ModelConfig.tiny().vocab_size))
        for depth, token in enumerate(right):
            others = self._random.integers(logits.shape[1], size=2)
            logits[depth, others] = 7.0, 6.0
            logits[depth, token] = 8.0 if self._random.random() < self._hit else 5.5
        return logits
