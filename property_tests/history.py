"""What may happen to a session before a law looks at it, as a list of steps.

Steps bring their own roots and paths, so a history does not depend on what the model answers: two
engines that play it hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kdtr.contract import Acceptance, DraftTree, Session
from kdtr.property_tests.strategies import PLAIN, draft_trees, nodes_of, prompts, tokens
from kdtr.property_tests.trees import path_to, path_tokens


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk of known tokens."""

    tokens: tuple[int, ...]

    def play(self, session: Session) -> np.ndarray | None:
        session.prefill(self.tokens)
        return None

    def appended(self) -> tuple[int, ...]:
        return self.tokens

    def shown(self) -> tuple[tuple[int, ...], ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Decode:
    """One plain token, from a root that is set."""

    root: int

    def play(self, session: Session) -> np.ndarray | None:
        session.set_root(self.root)
        session.decode()
        return None

    def appended(self) -> tuple[int, ...]:
        return (self.root,)

    def shown(self) -> tuple[tuple[int, ...], ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A verify; then a commit of the path to `last` with `bonus`, or none if last is None."""

    tree: DraftTree
    last: int | None
    bonus: int

    def play(self, session: Session) -> np.ndarray | None:
        session.set_root(self.tree.tokens[0])
        logits = session.verify(self.tree).logits
        shown = None if logits is None else np.array(logits)
        if self.last is not None:
            session.commit(Acceptance(path_to(self.tree, self.last), self.bonus))
        return shown

    def appended(self) -> tuple[int, ...]:
        return () if self.last is None else path_tokens(self.tree, self.last)

    def shown(self) -> tuple[tuple[int, ...], ...]:
        """The paths whose logits `play` returns, row by row."""
        return tuple(path_tokens(self.tree, i) for i in range(len(self.tree)))


Step = Prefill | Decode | Draft


def committed_by(steps: Sequence[Step]) -> tuple[int, ...]:
    """The tokens in the cache after these steps."""
    return tuple(token for step in steps for token in step.appended())


@st.composite
def drafts(draw: st.DrawFn, vocab_size: int, *, max_nodes: int = 6) -> Draft:
    tree = draw(draft_trees(vocab_size, max_nodes=max_nodes))
    last = draw(st.one_of(nodes_of(tree), st.none()))
    return Draft(tree, last, draw(tokens(vocab_size)))


def histories(
    vocab_size: int = PLAIN.vocab_size, *, max_steps: int = 5
) -> st.SearchStrategy[tuple[Step, ...]]:
    """Up to max_steps steps: at most 6 tokens each, so 5 fit a session of MAX_LEN slots."""
    step: st.SearchStrategy[Step] = st.one_of(
        prompts(vocab_size, min_size=1, max_size=4).map(Prefill),
        tokens(vocab_size).map(Decode),
        drafts(vocab_size),
    )
    return st.lists(step, max_size=max_steps).map(tuple)
