"""TREE: the arrays of a tree, as they are built and handed to the target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import on_open, wrap

TREE_ARRAYS = MutantClass("tree arrays")


@TREE_ARRAYS.mutant("M019", "TREE-1", breaks="TREE-3", first_seen_at="build_tokens", needs="core")
def sorted_without_parents(engine: Any) -> None:
    """Nodes of a built tree are sorted by their own score, and the parents stay as they were."""

    def build_best_first(original: Any, draft_logits: Any, budget: int) -> Any:
        parents, tokens = original(draft_logits, budget)
        depths = np.zeros(len(parents), int)
        for i, parent in enumerate(parents[1:].tolist(), start=1):
            depths[i] = depths[parent] + 1
        scores = draft_logits[depths[1:] - 1, tokens[1:]]
        order = np.argsort(-scores, kind="stable")
        return parents, np.concatenate([tokens[:1], tokens[1:][order]])

    wrap(engine, build_best_first=build_best_first)


@TREE_ARRAYS.mutant("M021", "TREE-3", breaks="TREE-3", first_seen_at="build_tokens", needs="core")
def tokens_of_half_a_vocabulary(engine: Any) -> None:
    """A node's token is its column modulo half of the vocabulary."""

    def build_best_first(original: Any, draft_logits: Any, budget: int) -> Any:
        parents, tokens = original(draft_logits, budget)
        half = draft_logits.shape[-1] // 2
        return parents, np.where(tokens < 0, tokens, tokens % half)

    wrap(engine, build_best_first=build_best_first)


TREE_ARRAYS.waits("M023", "TREE-5", "batch", "rows of a request begin where the first round's did")


@TREE_ARRAYS.mutant(
    "M024",
    "TREE-6",
    breaks="FWD-3",
    first_seen_at="verify of a token outside the vocabulary",
    needs="core",
)
def tokens_wrap(engine: Any) -> None:
    """A node's token is not checked, and the vocabulary's end wraps to its begin."""

    def change(session: Any) -> None:
        vocab_size = session._forward.config.vocab_size

        def within(tree: Any) -> Any:
            return replace(tree, tokens=tuple(token % vocab_size for token in tree.tokens))

        verify, round_ = session.verify, session.round
        session.verify = lambda tree, **rest: verify(within(tree), **rest)
        session.round = lambda tree, **rest: round_(within(tree), **rest)

    on_open(engine, change)
