"""What may happen to a session before a law looks at it, as a list of steps.

Steps bring their own roots and paths, so a history does not depend on what the model answers: two
engines that play it hold the same tokens. What they answer on the way is the law's to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from kdtr.contract import Acceptance, DraftTree
from kdtr.property_tests.fewer_verbs import answers
from kdtr.property_tests.strategies import (
    PLAIN,
    draft_trees,
    nodes_of,
    tokens,
    with_distinct_siblings,
)
from kdtr.property_tests.subject import Answer
from kdtr.property_tests.trees import path_to, path_tokens
from kdtr.property_tests.watched import WatchedSession


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk of known tokens."""

    tokens: tuple[int, ...]

    def play(self, session: WatchedSession) -> list[Answer]:
        return [Answer(None, session.prefill(self.tokens))]

    def appended(self) -> tuple[int, ...]:
        return self.tokens

    def answered(self) -> tuple[tuple[int, ...], ...]:
        return (self.tokens,)


@dataclass(frozen=True, slots=True)
class Decode:
    """One plain token, from a root that is set."""

    root: int

    def play(self, session: WatchedSession) -> list[Answer]:
        session.set_root(self.root)
        return [Answer(None, session.decode())]

    def appended(self) -> tuple[int, ...]:
        return (self.root,)

    def answered(self) -> tuple[tuple[int, ...], ...]:
        return ((self.root,),)


@dataclass(frozen=True, slots=True)
class Draft:
    """A verify; then a commit of the path to `last` with `bonus`, or none if last is None."""

    tree: DraftTree
    last: int | None
    bonus: int

    def play(self, session: WatchedSession) -> list[Answer]:
        session.set_root(self.tree.tokens[0])
        shown = answers(session, self.tree)
        if self.last is not None:
            session.commit(Acceptance(path_to(self.tree, self.last), self.bonus))
        return shown

    def appended(self) -> tuple[int, ...]:
        return () if self.last is None else path_tokens(self.tree, self.last)

    def answered(self) -> tuple[tuple[int, ...], ...]:
        return tuple(path_tokens(self.tree, i) for i in range(len(self.tree)))


# play      what the session answers: roots, decoded tokens, rows
# appended  the tokens that are then in the cache besides
# answered  the tokens behind the committed ones that each answer comes from
Step = Prefill | Decode | Draft


def committed_by(steps: Sequence[Step]) -> tuple[int, ...]:
    """The tokens in the cache after these steps."""
    return tuple(token for step in steps for token in step.appended())


@st.composite
def drafts(draw: st.DrawFn, vocab_size: int, *, max_nodes: int = 6) -> Draft:
    tree = draw(draft_trees(vocab_size, max_nodes=max_nodes))
    last = draw(st.one_of(nodes_of(tree), st.none()))
    return Draft(tree, last, draw(tokens(vocab_size)))


_Row = tuple[int, int, bool]  # token, steps back to its parent, whether it is accepted


@st.composite
def histories(
    draw: st.DrawFn, vocab_size: int = PLAIN.vocab_size, *, max_steps: int = 5
) -> tuple[Step, ...]:
    """Up to max_steps runs of at most 6 tokens, so 5 fit a session of MAX_LEN slots.

    Every run is drawn alike and then told what it is, and it may join the run before. So what
    needs a number of rows, whatever brought them, shrinks to one chunk of a prompt: no step has to
    be taken out of one list and put into another, which Hypothesis cannot do.
    """
    row = st.tuples(tokens(vocab_size), st.integers(0, 4), st.booleans())
    run = st.tuples(
        st.sampled_from([True, False, False, False]),  # joins
        st.sampled_from([_prefill, _decodes, _draft]),
        st.lists(row, min_size=1, max_size=6),
    )
    runs: list[tuple[Callable[[list[_Row], int], list[Step]], list[_Row]]] = []
    for joins, kind, rows in draw(st.lists(run, max_size=max_steps)):
        if joins and runs:
            runs[-1][1].extend(rows)
        else:
            runs.append((kind, list(rows)))
    return tuple(step for kind, rows in runs for step in kind(rows, vocab_size))


def _prefill(rows: list[_Row], vocab_size: int) -> list[Step]:
    return [Prefill(tuple(token for token, _, _ in rows))]


def _decodes(rows: list[_Row], vocab_size: int) -> list[Step]:
    return [Decode(token) for token, _, _ in rows]


def _draft(rows: list[_Row], vocab_size: int) -> list[Step]:
    """Committed up to the last row that is accepted; abandoned if none is."""
    wanted = [(i + token) % vocab_size for i, (token, _, _) in enumerate(rows)]
    parents = [-1, *(max(0, i - back) for i, (_, back, _) in enumerate(rows[1:]))]
    tree = with_distinct_siblings(wanted, parents, vocab_size)
    last = max((i for i, (_, _, accepted) in enumerate(rows) if accepted), default=None)
    return [Draft(tree, last, tree.tokens[-1])]
