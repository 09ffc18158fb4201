"""Tokens by decoding and by trees, for rounds.py, beside this file: as many, and the same?

The drafter is an oracle: it knows what decoding gives, and at every depth ranks that token first
with the probability asked for, and third otherwise, among tokens that a generator chooses.
tokens/s counts rounds, captures of graphs and building trees, and not the oracle's own time.

Everything is generated twice, and must repeat itself. Trees and decoding may give other tokens at a
near tie alone: a path's rows lie in other slots, and so sums are in another order (NUM-4). Then the
two rows of logits, decoding's and the tree's, lie within MOST_STEPS of each other, and so do the
two tokens in decoding's. After a near tie decoding is given the tree's token as its root and goes
on from there, for the oracle to know and for the tokens to be compared with. After a token that is
no near tie nothing is compared any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    n_decoded = n_tokens + _DEPTH  # the oracle looks ahead
    (first, _), (plain, seconds) = (_decoded(model, n_decoded) for _ in range(2))
    per_token, right = seconds / (n_decoded - 1), first == plain
    lines = [
        "",
        f"## {n_tokens} tokens, {dtype}",
        "",
        "| by | budget | hit rate | tokens/s | times decoding | accept_len | rounds | tokens |",
        "|---|---|---|---|---|---|---|---|",
        f"| decoding | 0 | | {1 / per_token:.0f} | 1 | 1 | {n_decoded - 1} "
        f"| {'' if right else 'NOT those of the first run'} |",
    ]
    for budget in BUDGETS:
        for hit in HITS:
            runs = [_by_trees(model, dtype, plain, budget, hit, n_tokens) for _ in range(2)]
            rounds, beside, by_trees = runs[1]
            said, same = beside.verdict()
            if runs[0][0] != rounds:
                said, same = "NOT those of the first run", False
            right &= same
            n_emitted = sum(len(emitted) for emitted in rounds)
            lines.append(
                f"| trees | {budget} | {hit} | {n_emitted / by_trees:.0f} "
                f"| {n_emitted / by_trees * per_token:.2f} "
                f"| {n_emitted / len(rounds):.2f} | {len(rounds)} | {said} |"
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


class Beside:
    """The tokens of one generation by trees beside those of decoding, round by round.

    plain  what decoding gives after those before it, over near ties: the trees' tokens so far, and
           more than the trees are to give
    """

    def __init__(self, model: Any, dtype: str, plain: list[int], first: int) -> None:
        """plain: of decoding alone; first: the token that the trees' session has from the prompt"""
        self.plain = plain
        self._model, self._dtype, self._n_compared = model, dtype, 1
        self._tokens, self._trees, self._near, self._wrong = [first], [], [], ""
        if first != plain[0]:
            self._wrong = "other from the prompt's on"

    def add(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        self._trees.append(tree)
        self._tokens += emitted
        for at in range(self._n_compared, len(self._tokens)):
            if self._wrong or self._tokens[at] == self.plain[at]:
                continue
            said, near = near_tie(
                self._dtype,
                _row_by_decoding(self._model, self._tokens[:at]),
                _row_by_trees(self._model, self._trees, at),
                self.plain[at],
                self._tokens[at],
            )
            if near:
                self._near.append(f"at {at} {said}")
                self.plain, _ = _decoded(self._model, len(self.plain), self._tokens[: at + 1])
            else:
                self._wrong = f"other from {at} on, {said}"
        self._n_compared = len(self._tokens)

    def verdict(self) -> tuple[str, bool]:
        """What to say of the tokens, and whether all are decoding's or others at a near tie."""
        if self._wrong:
            return self._wrong, False
        return "; ".join(self._near) or "identical", True


def _decoded(model: Any, n_tokens: int, given: Sequence[int] = ()) -> tuple[list[int], float]:
    """The tokens, of which the first are those that are given, and the seconds of decoding."""
    session = model.open(max_len=_MAX_LEN)
    tokens = [session.prefill(PROMPT)]
    start = time.perf_counter()
    while len(tokens) < n_tokens:
        if len(tokens) <= len(given):
            tokens[-1] = given[len(tokens) - 1]
            session.set_root(tokens[-1])
        tokens.append(session.decode())
    return tokens, time.perf_counter() - start


def _by_trees(
    model: Any, dtype: str, plain: list[int], budget: int, hit: float, n_tokens: int
) -> tuple[list[tuple[int, ...]], Beside, float]:
    """What each round emitted, beside decoding, and the seconds of building and rounds."""
    session = model.open(max_len=_MAX_LEN)
    beside = Beside(model, dtype, plain, session.prefill(PROMPT))
    oracle = _Oracle(budget, hit)
    rounds, n, seconds = [], 1, 0.0
    while n < n_tokens:
        drafts = oracle.drafts(beside.plain[n : n + _DEPTH])
        start = time.perf_counter()
        tree = session.build(drafts, budget)
        done = session.round(tree)
        seconds += time.perf_counter() - start
        beside.add(tree, done.emitted)
        rounds.append(done.emitted)
        n += len(done.emitted)
    return rounds, beside, seconds


def _row_by_decoding(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """The logits [w] by which decoding chooses a token after these."""
    session = model.open(max_len=_MAX_LEN)
    session.prefill(PROMPT)
    for token in tokens[:-1]:
        session.set_root(token)
        session.decode()
    session.set_root(tokens[-1])
    row: np.ndarray = session.verify(chain(session, 1)).logits[0]
    return row


def _row_by_trees(model: Any, trees: Sequence[DraftTree], at: int) -> np.ndarray:
    """The logits [w] by which the trees, round by round, chose the token at this place."""
    session = model.open(max_len=_MAX_LEN)
    session.prefill(PROMPT)
    n = 1
    for tree in trees:
        verified = session.verify(tree)
        accepted = session.accept(tree)
        if n + accepted.accept_len > at:
            row: np.ndarray = verified.logits[accepted.path[at - n]]
            return row
        n += len(session.round(tree).emitted)
    raise IndexError(f"token {at}: these {len(trees)} trees give {n} tokens")


class _Oracle:
    """Drafts from what decoding gives; the same in the same order, from a budget and a hit rate."""

    def __init__(self, budget: int, hit: float) -> None:
        self._random = np.random.default_rng(int(budget * 100 + hit * 100))
        self._hit = hit

    def drafts(self, right: Sequence[int]) -> np.ndarray:
        """[depth, vocab]: the right token of a depth first, or third behind two others."""
        logits = self._random.standard_normal((len(right), ModelConfig.tiny().vocab_size))
        for depth, token in enumerate(right):
            others = self._random.integers(logits.shape[1], size=2)
            logits[depth, others] = 7.0, 6.0
            logits[depth, token] = 8.0 if self._random.random() < self._hit else 5.5
        return logits
