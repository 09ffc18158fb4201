"""The moves of any history, in step with a model that is a list of tokens.

The model of a session is its committed tokens, its root and the tree that is pending. Moves whose
verb an engine lacks are not among its moves; prefill, verify and commit are enough. The contract
has no verb that forks a session or shares a prefix, so no move does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kdtr.contract import (
    NO_LIMIT,
    Acceptance,
    CacheError,
    DraftTree,
    EmitLimit,
    LogicalCache,
    SessionError,
)
from kdtr.property_tests.fewer_verbs import answers, lone, plain_answer
from kdtr.property_tests.judge import Judge, different_bits, tree_scene
from kdtr.property_tests.refusals import Wrong, wrong_calls
from kdtr.property_tests.strategies import (
    SmallModel,
    draft_trees,
    emit_limits,
    nodes_of,
    prompts,
    small_models,
    tokens,
)
from kdtr.property_tests.subject import Answer, Subject, causal_rows
from kdtr.property_tests.trees import led, path_to, path_tokens, under_root, walk
from kdtr.property_tests.watch import Example, Sink, watching
from kdtr.property_tests.watched import WatchedSession

MAX_LEN = 20  # slots: a few moves fill them, so that moves over capacity are among the moves
STEPS = 10  # at most, of an example
_SESSIONS = 3  # at most, at once
_Y = (-1, 0, 0, 2)
_WHICH = st.integers(0, _SESSIONS - 1)  # a session, counted round
_TREES = draft_trees(max_nodes=5)


@dataclass(slots=True)
class Sequence:
    """What a session must be.

    tokens   committed, by what was asked
    told     prompts, and what verbs and acceptances emitted: at all times the tokens that the
             engine holds, and its root (ACC-4)
    pending  the tree of an uncommitted verify, or the chain of a forward by hand
    rows     what the pending verify showed; None after a forward by hand
    cache    the rows as they were last seen
    """

    session: WatchedSession
    tokens: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    root: int | None = None
    pending: DraftTree | None = None
    rows: list[Answer] | None = None
    cache: LogicalCache | None = None

    def fits(self, n: int) -> bool:
        return len(self.tokens) + n <= self.session.slots

    def advance(self, appended: tuple[int, ...], root: int, told: tuple[int, ...]) -> None:
        self.tokens += appended
        self.told += told
        self.root = root
        self.forget()

    def forget(self) -> None:
        self.pending = self.rows = None


class Histories(RuleBasedStateMachine):
    """Every move of the contract, on sessions of one model; subclassed for one engine."""

    law: str
    subject: Subject
    sink: Sink

    def __init__(self) -> None:
        super().__init__()
        self._watch: AbstractContextManager[Example] = watching(self.law, self.sink)
        self._example = self._watch.__enter__()
        self.sequences: list[Sequence] = []

    def teardown(self) -> None:
        ended = sys.exc_info()
        try:
            if ended[0] is None:
                for sequence in self.sequences:
                    self.compare(sequence)
                self._example.aim()
        except BaseException:
            ended = sys.exc_info()
            raise
        finally:
            self._watch.__exit__(*ended)

    @initialize(model=small_models())
    def load(self, model: SmallModel) -> None:
        self.model = model
        self.judge = Judge(self.subject, model)
        self.open()

    # Moves

    @precondition(lambda self: len(self.sequences) < _SESSIONS)
    @rule()
    def open(self) -> None:
        """Another session of the model."""
        session = self.subject.open(self.model, max_len=MAX_LEN)
        self.sequences.append(Sequence(session))

    @precondition(lambda self: len(self.sequences) > 1)
    @rule(which=_WHICH)
    def close(self, which: int) -> None:
        """Its memory goes back; the others notice nothing."""
        closed = self.sequences.pop(which % len(self.sequences))
        closed.session.close()
        with pytest.raises(SessionError):
            closed.session.prefill([0])

    @rule(which=_WHICH, chunk=prompts(min_size=1, max_size=4))
    def prefill(self, which: int, chunk: tuple[int, ...]) -> None:
        one = self.chosen(which)
        if not one.fits(len(chunk)):
            self.refused(lambda: one.session.prefill(chunk))
            return
        root = one.session.prefill(chunk)
        if one.root is not None:
            one.told.pop()  # replaced, and nobody passed it on (FWD-6)
        one.advance(chunk, root, (*chunk, root))

    @precondition(lambda self: self.offers("decode") and self.rooted())
    @rule(which=_WHICH)
    def decode(self, which: int) -> None:
        one = self.chosen(which, rooted=True)
        root = self.root_of(one)
        if not one.fits(1):
            self.refused(one.session.decode)
            return
        token = one.session.decode()
        one.advance((root,), token, (token,))

    @precondition(lambda self: self.rooted())
    @rule(which=_WHICH, drafted=_TREES)
    def verify(self, which: int, drafted: DraftTree) -> None:
        one = self.chosen(which, rooted=True)
        tree = under_root(drafted, self.root_of(one))
        if not one.fits(len(tree)):
            self.refused(lambda: one.session.verify(tree))
            return
        one.rows = answers(one.session, tree)
        one.pending = tree

    @precondition(lambda self: self.pending())
    @rule(which=_WHICH, data=st.data())
    def commit(self, which: int, data: st.DataObject) -> None:
        """Any path and any bonus; of a forward by hand, a beginning of its rows."""
        one = self.chosen(which, pending=True)
        tree = self.pending_of(one)
        last = data.draw(nodes_of(tree), label="last accepted node")
        acceptance = Acceptance(path_to(tree, last), data.draw(tokens(), label="bonus"))
        self.commit_path(one, tree, acceptance)

    @precondition(lambda self: self.rooted())
    @rule(which=_WHICH, drafted=_TREES, data=st.data())
    def draft(self, which: int, drafted: DraftTree, data: st.DataObject) -> None:
        """Verify, perhaps a wrong call in between, commit: what engines are for, in one move."""
        one = self.chosen(which, rooted=True)
        tree = under_root(drafted, self.root_of(one))
        if not one.fits(len(tree)):
            return
        one.rows, one.pending = answers(one.session, tree), tree
        if data.draw(st.booleans(), label="a wrong call"):
            self.call_wrongly(one, data)
            self.all_is_as_it_must_be()
        last = data.draw(nodes_of(tree), label="last accepted node")
        acceptance = Acceptance(path_to(tree, last), data.draw(tokens(), label="bonus"))
        self.commit_path(one, tree, acceptance)

    @precondition(lambda self: self.pending(verified=True))
    @rule(which=_WHICH, limit=st.one_of(st.just(NO_LIMIT), emit_limits()))
    def commit_greedily(self, which: int, limit: EmitLimit) -> None:
        """The path that the engine's own targets choose."""
        one = self.chosen(which, pending=True, verified=True)
        tree, rows = self.pending_of(one), one.rows
        assert rows is not None
        acceptance = Acceptance(*walk(tree, [row.target for row in rows], limit))
        if one.session.offers("accept"):
            own = one.session.accept(tree, limit=limit)
            self.judge.same("accept with its own targets", acceptance, own)
        self.commit_path(one, tree, acceptance)

    @precondition(lambda self: self.offers("round") and self.rooted())
    @rule(
        which=_WHICH,
        drafted=_TREES,
        limit=st.one_of(st.just(NO_LIMIT), emit_limits()),
        verified=st.booleans(),
    )
    def round(self, which: int, drafted: DraftTree, limit: EmitLimit, verified: bool) -> None:
        """A fused round; of a tree that was verified before, so that its walk is known.

        Drawn tokens are hardly ever targets: there a child of the root gets the root's.
        """
        one = self.chosen(which, rooted=True)
        tree = under_root(drafted, self.root_of(one))
        if not one.fits(len(tree)):
            self.refused(lambda: one.session.round(tree, limit=limit))
            return
        rows: list[Answer] = []
        if verified:
            tree = led(tree, answers(one.session, tree)[0].target)
            rows = answers(one.session, tree)
        done = one.session.round(tree, limit=limit)
        path, bonus = done.acceptance.path, done.acceptance.bonus
        judge = Judge(self.subject, self.model, tree_scene(tree, *path))
        if rows:
            expected, last = walk(tree, [row.target for row in rows], limit)
            emitted = (*path_tokens(tree, expected[-1])[1:], last)
            history = [*one.tokens, tree.tokens[0]]
            judge.continuation("emitted by the round", history, emitted, done.emitted)
            judge.same("acceptance", Acceptance(expected, last), done.acceptance)
        judge.same("path of the round", path_to(tree, path[-1]), path)
        appended = path_tokens(tree, path[-1])
        judge.same("emitted", (*appended[1:], bonus), done.emitted)
        stopped = [k for k, token in enumerate(done.emitted) if token in limit.stop_tokens]
        most = min([limit.max_emitted or len(path), *(k + 1 for k in stopped)])
        judge.same("emitted within the limit", True, len(done.emitted) <= most)
        one.advance(appended, bonus, done.emitted)

    @precondition(lambda self: self.offers("set_root"))
    @rule(which=_WHICH, token=tokens())
    def set_root(self, which: int, token: int) -> None:
        one = self.chosen(which)
        one.session.set_root(token)
        if one.root is not None:
            one.told.pop()
        one.advance((), token, (token,))

    @precondition(lambda self: self.offers("build") and self.rooted())
    @rule(which=_WHICH, budget=st.integers(0, 3))
    def build(self, which: int, budget: int) -> None:
        """A tree, and nothing else: a pending verify stays."""
        one = self.chosen(which, rooted=True)
        draft = np.zeros((2, self.model.config.vocab_size))
        if not one.fits(budget + 1):
            self.refused(lambda: one.session.build(draft, budget))
            return
        tree = one.session.build(draft, budget)
        expected = (self.root_of(one), *range(budget))
        self.judge.same("built tokens", expected, tree.tokens)

    @precondition(lambda self: self.offers("forward_tokens"))
    @rule(which=_WHICH, chunk=prompts(min_size=1, max_size=3))
    def forward_by_hand(self, which: int, chunk: tuple[int, ...]) -> None:
        """A chunk at its positions; a commit may keep it."""
        one = self.chosen(which)
        if not one.fits(len(chunk)):
            self.refused(lambda: causal_rows(one.session, chunk))
            return
        causal_rows(one.session, chunk)
        one.pending = DraftTree(chunk, tuple(range(-1, len(chunk) - 1)))
        one.rows = None

    @precondition(lambda self: self.offers("reset"))
    @rule(which=_WHICH)
    def reset(self, which: int) -> None:
        one = self.chosen(which)
        one.session.reset()
        one.tokens.clear()
        one.told.clear()
        one.root = one.cache = None
        one.forget()

    @rule(which=_WHICH, data=st.data())
    def wrong_call(self, which: int, data: st.DataObject) -> None:
        """Refused, and nothing has changed: what is pending can still be committed."""
        self.call_wrongly(self.chosen(which), data)

    def call_wrongly(self, one: Sequence, data: st.DataObject) -> None:
        calls = wrong_calls(one.session, pending=one.pending is not None)
        if one.pending is not None and one.rows is None:  # rows by hand have no parents
            calls = [call for call in calls if call.label != "commit what is no path"]
        wrong: Wrong = data.draw(st.sampled_from(calls), label="call")
        tree = one.pending or lone(one.root or 0)
        if one.root is not None:
            tree = under_root(tree, one.root)
        with pytest.raises(wrong.error):
            wrong.call(one.session, tree, self.model.config.vocab_size)

    # What is seen

    @precondition(lambda self: self.pending(verified=True))
    @rule(which=_WHICH, data=st.data())
    def a_row_is_a_plain_run(self, which: int, data: st.DataObject) -> None:
        one = self.chosen(which, pending=True, verified=True)
        tree, rows = self.pending_of(one), one.rows
        assert rows is not None
        node = data.draw(nodes_of(tree), label="row")
        plain = plain_answer(self.subject, self.model, one.tokens, path_tokens(tree, node))
        judge = Judge(self.subject, self.model, tree_scene(tree, node))
        history = [*one.tokens, *path_tokens(tree, node)]
        judge.answer(f"row {node}", plain, rows[node], history=history)

    @rule(which=_WHICH)
    def compare_with_one_prefill(self, which: int) -> None:
        self.compare(self.chosen(which))

    def compare(self, one: Sequence) -> None:
        """The cache is that of one prefill of the tokens, and so are the rows that follow."""
        if one.cache is not None and one.tokens:
            self.look(one)
            fresh = self.subject.committed(self.model, one.tokens)
            self.judge.cache("cache", fresh.snapshot(), one.cache)
            fresh.close()
        if one.root is None or not one.fits(1):
            return
        # The root is committed with the bonus that a fresh session would have: both stand alike.
        fresh = self.subject.committed(self.model, [*one.tokens, one.root])
        assert fresh.root is not None
        one.session.verify(lone(one.root))
        one.pending = lone(one.root)
        self.commit_path(one, one.pending, Acceptance((0,), fresh.root))
        if one.fits(len(_Y)):
            tree = DraftTree((fresh.root, 1, 2, 0), _Y)
            expected = answers(fresh, tree)
            one.rows, one.pending = answers(one.session, tree), tree
            for i, row in enumerate(one.rows):
                history = [*one.tokens, *path_tokens(tree, i)]
                judge = Judge(self.subject, self.model, tree_scene(tree, i))
                judge.answer(f"row {i} at the end", expected[i], row, history=history)
        fresh.close()

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        """POS-1, SLOT-2, ACC-4: after every move, whichever session made it."""
        for i, one in enumerate(self.sequences):
            self.judge.same(f"session {i}, L", len(one.tokens), one.session.committed_len)
            self.judge.same(f"session {i}, root", one.root, one.session.root)
            self.look(one)
            held = one.tokens if one.cache is None else one.cache.tokens.tolist()
            rooted = [] if one.session.root is None else [one.session.root]
            self.judge.same(f"session {i}, prompt and emitted tokens", one.told, [*held, *rooted])

    def look(self, one: Sequence) -> None:
        """The rows: those that were there are there, to the last bit."""
        if not one.session.offers("snapshot"):
            return
        before, now = one.cache, one.session.snapshot()
        self.judge.same("tokens", one.tokens, now.tokens.tolist())
        self.judge.same("positions", list(range(len(one.tokens))), now.positions.tolist())
        if before is not None:
            n = len(before.tokens)
            for name in ("c_kv", "k_pe"):
                kept = different_bits(getattr(before, name), getattr(now, name)[:, :n])
                self.judge.same(f"{name} of rows that were committed", None, kept)
        one.cache = now

    # Which session a move is for

    def offers(self, verb: str) -> bool:
        return self.subject.offers(verb)

    def rooted(self) -> bool:
        return any(one.root is not None for one in self.sequences)

    def pending(self, *, verified: bool = False) -> bool:
        return any(self._is_pending(one, verified) for one in self.sequences)

    @staticmethod
    def _is_pending(one: Sequence, verified: bool) -> bool:
        return one.pending is not None and (one.rows is not None or not verified)

    def chosen(
        self, which: int, *, rooted: bool = False, pending: bool = False, verified: bool = False
    ) -> Sequence:
        fit = [
            one
            for one in self.sequences
            if (not rooted or one.root is not None)
            and (not pending or self._is_pending(one, verified))
        ]
        return fit[which % len(fit)]

    @staticmethod
    def root_of(one: Sequence) -> int:
        assert one.root is not None
        return one.root

    @staticmethod
    def pending_of(one: Sequence) -> DraftTree:
        assert one.pending is not None
        return one.pending

    def commit_path(self, one: Sequence, tree: DraftTree, acceptance: Acceptance) -> None:
        one.session.commit(acceptance)
        appended = path_tokens(tree, acceptance.path[-1])
        if one.root is not None:
            one.told.pop()  # a tree begins with it; a forward by hand replaces it
        one.advance(appended, acceptance.bonus, (*appended, acceptance.bonus))

    def refused(self, call: Callable[[], object]) -> None:
        with pytest.raises(CacheError):
            call()
