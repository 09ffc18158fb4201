"""The books of an adapter's session, over a backend that computes nothing: what is refused, kept
and shown. Numbers are judged by the gate, in the environments of the libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdtr.adapters.session import AdapterSession, Rows, Stages
from kdtr.contract import (
    VERBS,
    Acceptance,
    CacheError,
    DraftTree,
    EmitLimit,
    EngineError,
    InputError,
    KdtrError,
    ModelConfig,
    SessionError,
    TreeError,
    UnsupportedError,
)

CONFIG = ModelConfig.tiny().replace(vocab_size=16)
SLOTS = 8


class Backend:
    """The target of every token is the token after it; `kept` are the tokens that were kept."""

    moves_rows = True

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.forwards: list[Rows] = []
        self.closed = 0
        self.width = CONFIG.vocab_size

    def forward(self, rows: Rows, stages: Stages | None) -> np.ndarray:
        self.forwards.append(rows)
        logits = np.zeros((len(rows.tokens), self.width))
        logits[np.arange(len(rows.tokens)), (np.array(rows.tokens) + 1) % self.width] = 1
        if stages is not None:
            stages["tokens", None] = np.array(rows.tokens)
        return logits

    def keep(self, rows: Rows, path: tuple[int, ...]) -> None:
        self.kept = self.kept[: rows.committed_len] + [rows.tokens[node] for node in path]

    def latents(self, committed_len: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((1, committed_len, 2)), np.zeros((1, committed_len, 2))

    def clear(self) -> None:
        self.kept = []

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def session(backend: Backend) -> AdapterSession:
    """After a prompt of three: L = 3, and the root is 5."""
    held = AdapterSession("toy", frozenset(VERBS) - {"build"}, CONFIG, backend, SLOTS)
    held.prefill([2, 3, 4])
    return held


TREE = DraftTree(tokens=(5, 9, 6, 7), parents=(-1, 0, 0, 2))


def state(session: AdapterSession, backend: Backend) -> tuple[Any, ...]:
    return session.committed_len, session.root, list(backend.kept), len(backend.forwards)


def test_a_round_walks_commits_and_emits(session: AdapterSession, backend: Backend) -> None:
    done = session.round(TREE)

    assert (Acceptance((0, 2, 3), 8), (6, 7, 8)) == (done.acceptance, done.emitted)
    assert (6, 8) == (session.committed_len, session.root)
    assert [2, 3, 4, 5, 6, 7] == backend.kept
    rows = backend.forwards[-1]
    assert [3, 4, 4, 5] == rows.positions.tolist()
    expected = [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0]]
    assert [*expected, [1, 1, 1, 1, 0, 1, 1]] == rows.mask.astype(int).tolist()


def test_a_limit_cuts_the_round(session: AdapterSession) -> None:
    done = session.round(TREE, limit=EmitLimit(max_emitted=2))

    assert (Acceptance((0, 2), 7), (6, 7)) == (done.acceptance, done.emitted)


def test_decode_is_the_root_alone(session: AdapterSession, backend: Backend) -> None:
    assert 6 == session.decode()
    assert [2, 3, 4, 5] == backend.kept


def test_the_trace_of_a_round_shows_the_walk(session: AdapterSession) -> None:
    stages: dict[str, Any] = {}

    session.round(TREE, trace=lambda name, layer, array: stages.__setitem__(name, array.tolist()))

    assert {
        "parents": [-1, 0, 0, 2],
        "tokens": [5, 9, 6, 7],
        "targets": [6, 10, 7, 8],
        "path": [0, 2, 3],
        "bonus": 8,
        "emitted": [6, 7, 8],
        "moves": [[3, 3], [5, 4], [6, 5]],
    } == stages


def test_the_session_refuses_verbs_while_a_trace_runs(session: AdapterSession) -> None:
    def trace(*_: object) -> None:
        session.reset()

    with pytest.raises(SessionError, match="reset called from a trace"):
        session.verify(TREE, trace=trace)

    with pytest.raises(SessionError, match="commit without a pending forward"):
        session.commit(Acceptance((0,), 1))


Call = Callable[[AdapterSession], object]
ONES = np.ones((1, 4), bool)
REFUSED: dict[str, tuple[type[KdtrError], str, Call]] = {
    "root": (InputError, "root = 16; expected a token id 0..15", lambda s: s.set_root(16)),
    "bool": (InputError, "root = True; expected an integer", lambda s: s.set_root(True)),
    "no tokens": (InputError, "tokens are empty", lambda s: s.prefill([])),
    "text": (InputError, "tokens are str; expected a sequence", lambda s: s.prefill("12")),
    "2-d": (InputError, "tokens are int64 [1, 1]", lambda s: s.prefill(np.array([[1]]))),
    "prefill": (CacheError, "needs 9 slots, the session has 8", lambda s: s.prefill([1] * 6)),
    "trace": (InputError, "trace is int", lambda s: s.prefill([1], trace=1)),
    "another root": (
        TreeError,
        "tokens[0] = 4, but the session's root is 5",
        lambda s: s.verify(DraftTree((4,), (-1,))),
    ),
    "foreign token": (
        TreeError,
        "tokens[1] = 16; expected a token id 0..15",
        lambda s: s.verify(DraftTree((5, 16), (-1, 0))),
    ),
    "no tree": (TreeError, "tree is tuple", lambda s: s.verify(((5,), (-1,)))),
    "room": (
        CacheError,
        "a forward of 6 rows at committed_len 3 needs 9 slots, the session has 8; open it with "
        "max_len >= 9",
        lambda s: s.verify(DraftTree((5, 1, 2, 3, 4, 6), (-1, 0, 0, 0, 0, 0))),
    ),
    "limit": (InputError, "limit is int", lambda s: s.round(TREE, limit=2)),
    "accept": (SessionError, "not a verify of this tree", lambda s: s.accept(TREE)),
    "targets": (InputError, "1 targets for 4 nodes", lambda s: s.accept(TREE, [1])),
    "commit": (SessionError, "commit without a pending", lambda s: s.commit(Acceptance((0,), 1))),
    "position": (
        InputError,
        "positions[0] = -1; expected 0..",
        lambda s: s.forward_tokens([1], np.array([-1]), ONES),
    ),
    "positions": (
        InputError,
        "positions are float64 [1]; expected integers [1]",
        lambda s: s.forward_tokens([1], np.array([1.0]), ONES),
    ),
    "mask": (
        InputError,
        "mask is bool [1, 4]; expected bool [2, 5]",
        lambda s: s.forward_tokens([1, 2], np.array([3, 4]), ONES),
    ),
    "blind row": (
        InputError,
        "mask[0, 3] is false; expected every row to see itself",
        lambda s: s.forward_tokens([1], np.array([3]), ~ONES),
    ),
    "build": (UnsupportedError, "toy does not offer build()", lambda s: s.build(ONES, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_is_wrong_and_changes_nothing(
    session: AdapterSession, backend: Backend, name: str
) -> None:
    error, text, call = REFUSED[name]
    before = state(session, backend)

    with pytest.raises(error) as refused:
        call(session)

    assert text in str(refused.value)
    assert before == state(session, backend)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((0, 1, 2), "path = (0, 1, 2), but node 2 is a child of node 0, not of 1"),
        ((0, 4), "path ends at node 4, the forward had 4 rows; expected nodes 0..3"),
    ],
)
def test_a_path_that_is_not_the_trees_is_refused_and_the_verify_kept(
    session: AdapterSession, path: tuple[int, ...], text: str
) -> None:
    session.verify(TREE)

    with pytest.raises(InputError) as refused:
        session.commit(Acceptance(path, 1))

    assert text in str(refused.value)
    session.commit(Acceptance((0, 2), 1))
    assert (5, 1) == (session.committed_len, session.root)


def test_set_root_forgets_the_verify(session: AdapterSession) -> None:
    session.verify(TREE)
    session.set_root(5)

    with pytest.raises(SessionError, match="set_root dropped it"):
        session.commit(Acceptance((0,), 1))


def test_reset_empties_the_session(session: AdapterSession, backend: Backend) -> None:
    session.reset()

    assert (0, None, []) == (session.committed_len, session.root, backend.kept)
    with pytest.raises(SessionError, match="no root; prefill or set_root first"):
        session.decode()


def test_a_closed_session_refuses_every_verb_and_closes_once(
    session: AdapterSession, backend: Backend
) -> None:
    session.close()
    session.close()

    assert 1 == backend.closed
    with pytest.raises(SessionError, match="the session is closed; open another"):
        session.decode()


def test_logits_of_another_width_are_the_engines_error(
    session: AdapterSession, backend: Backend
) -> None:
    backend.width = 15

    with pytest.raises(EngineError, match=r"toy gave logits \(4, 15\); expected \(4, 16\)"):
        session.verify(TREE)
