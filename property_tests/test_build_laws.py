"""The best-first build: optimal by brute force, nested in its budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import fsum

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import DraftTree, Session
from kdtr.property_tests.judge import Judge
from kdtr.property_tests.profiles import cheap
from kdtr.property_tests.strategies import PLAIN, SmallModel, draft_logits
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.trees import path_tokens, picture

# A vocabulary so small that all prefixes can be written down.
VOCAB_SIZE = 4
MODEL = SmallModel(PLAIN.replace(vocab_size=VOCAB_SIZE))
ROOT = 3
# Two scores this close are a tie or not by the last bit of a logarithm, which is not the law's.
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Prefix:
    """A path below the root: its tokens, its ranks by depth, and the log-probabilities it adds."""

    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    log_probs: tuple[float, ...]

    def score(self) -> float:
        return fsum(self.log_probs)

    def ties(self, other: Prefix) -> bool:
        """Equal in any arithmetic: the same terms in the same order, but for zeros."""
        mine, theirs = ([p for p in prefix.log_probs if p] for prefix in (self, other))
        return mine == theirs


def all_prefixes(logits: np.ndarray) -> list[Prefix]:
    """Every prefix that may be taken (TREE-3), best first, ties by rank path."""
    found, level = [], [Prefix((), (), ())]
    for row in logits.astype(np.float64):
        taken = [token for token in range(len(row)) if row[token] > -np.inf]
        if not taken:
            break
        shifted = row - row.max()
        log_probs = shifted - np.log(np.exp(shifted).sum())
        ranked = sorted(taken, key=lambda token, row=row: (-row[token], token))  # type: ignore[misc]
        level = [
            Prefix(
                (*above.tokens, token), (*above.ranks, rank), (*above.log_probs, log_probs[token])
            )
            for above in level
            for rank, token in enumerate(ranked)
        ]
        found += level
    return sorted(found, key=lambda prefix: (-round(prefix.score() / SAME), prefix.ranks))


def rooted(engine: Subject) -> Session:
    """A session with a root: build needs no more."""
    session = engine.open(MODEL)
    session.set_root(ROOT)
    return session


def show(logits: np.ndarray, tree: DraftTree) -> str:
    return f"draft logits:\n{logits}\ntree:\n{picture(tree)}"


@cheap()
@given(logits=draft_logits(VOCAB_SIZE), budget=st.integers(0, 12))
def test_the_build_takes_the_best_prefixes(
    engine: Subject, logits: np.ndarray, budget: int
) -> None:
    """TREE-3: of all prefixes without -inf, above the first row without a finite logit, the tree
    holds the `budget` most probable, best first; ties go by rank path, a prefix first."""
    tree = rooted(engine).build(logits, budget)

    judge = Judge(engine, MODEL, lambda: show(logits, tree))
    best = all_prefixes(logits)
    by_tokens = {prefix.tokens: prefix for prefix in best}
    built = [path_tokens(tree, i)[1:] for i in range(1, len(tree))]
    judge.same("root", ROOT, tree.tokens[0])
    judge.same("number of nodes", min(budget, len(best)), len(built))
    judge.same("nodes that may not be taken", [], [t for t in built if t not in by_tokens])
    scores = [by_tokens[tokens].score() for tokens in built]
    for i, (score, wanted) in enumerate(zip(scores, best, strict=False), start=1):
        judge.same(
            f"node {i} scores {score}, best {wanted.score()}",
            True,
            abs(score - wanted.score()) <= 2 * SAME,
        )
    # Scores equal in exact arithmetic may round either way, unless they are the same sum; those
    # just below the last one taken count too.
    last = best[min(budget, len(best)) - 1].score() if best and budget else 0.0
    near = [prefix for prefix in best if prefix.score() > last - 2 * SAME]
    decided = all(
        one.score() - other.score() > 2 * SAME or one.ties(other) for one, other in pairwise(near)
    )
    if decided:
        judge.same("order", [prefix.tokens for prefix in best[:budget]], built)


@cheap()
@given(logits=draft_logits(VOCAB_SIZE), budget=st.integers(0, 12), more=st.integers(0, 12))
def test_builds_are_nested_in_the_budget(
    engine: Subject, logits: np.ndarray, budget: int, more: int
) -> None:
    """TREE-4: the tree of a budget is the first budget + 1 nodes of every larger one."""
    session = rooted(engine)

    small, large = session.build(logits, budget), session.build(logits, budget + more)

    judge = Judge(engine, MODEL, lambda: show(logits, large))
    n = min(budget + 1, len(large))
    judge.same("smaller tree", DraftTree(large.tokens[:n], large.parents[:n]), small)


@cheap()
@given(logits=draft_logits(VOCAB_SIZE, float_type="float32"), budget=st.integers(0, 12))
def test_a_build_depends_on_the_numbers_alone(
    engine: Subject, logits: np.ndarray, budget: int
) -> None:
    """TREE-3: float32 and float64 arrays of the same numbers, strided or not, and a session with
    or without a pending verify, give the same tree."""
    session = rooted(engine)
    tree = session.build(logits, budget)
    spread = np.full((len(logits), 2 * VOCAB_SIZE), np.nan)
    spread[:, ::2] = logits

    session.verify(DraftTree((ROOT,), (-1,)))
    again = session.build(spread[:, ::2], budget)

    Judge(engine, MODEL, lambda: show(logits, tree)).same("tree", tree, again)
