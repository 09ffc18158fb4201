"""Refusals: the class, the text, and that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.contract import (
    Acceptance,
    CacheError,
    DraftTree,
    EmitLimit,
    InputError,
    KdtrError,
    LogicalCache,
    SessionError,
    TreeError,
)
from kdtr.engine.checks import draft_logits, row_positions

PENDING = DraftTree(tokens=(7, 1, 2, 3), parents=(-1, 0, 0, 2))
INF, NAN = float("inf"), float("nan")


def draft(value: float) -> np.ndarray:
    logits = np.zeros((2, 37), np.float32)
    logits[1, 4] = value
    return logits


def mask(rows: int = 1, columns: int = 6) -> np.ndarray:
    return np.ones((rows, columns), bool)


def blind() -> np.ndarray:
    visible = mask(2, 7)
    visible[1, 6] = False
    return visible


def forward(tokens: Any = (1,), positions: Any = (5,), visible: Any = None) -> Any:
    return lambda s: s.forward_tokens(tokens, positions, mask() if visible is None else visible)


def tree(*tokens: int) -> DraftTree:
    return DraftTree(tokens=tokens, parents=(-1, *range(len(tokens) - 1)))


VOCAB = "expected a token id in 0..36"
REFUSALS: list[tuple[Callable[[Any], Any], type[KdtrError], str]] = [
    (lambda s: s.set_root(37), InputError, f"token = 37; {VOCAB}"),
    (lambda s: s.set_root(-1), InputError, f"token = -1; {VOCAB}"),
    (lambda s: s.set_root(1.0), InputError, "token = 1.0; expected an integer"),
    (lambda s: s.prefill([]), InputError, "tokens is empty; expected at least one token"),
    (lambda s: s.prefill([1, 37]), InputError, f"tokens[1] = 37; {VOCAB}"),
    (lambda s: s.prefill([1, "a"]), InputError, "tokens[1] = 'a'; expected an integer"),
    (lambda s: s.prefill("ab"), InputError, "tokens = 'ab'; expected a sequence of token ids"),
    (
        lambda s: s.prefill(np.array(3)),
        InputError,
        "tokens = array(3); expected a sequence of token ids",
    ),
    (lambda s: s.prefill(3), InputError, "tokens = 3; expected a sequence of token ids"),
    (
        lambda s: s.prefill([1] * 16),
        CacheError,
        "prefill of 16 rows at committed_len 5 needs 21 slots, the session has 20; "
        "open it with max_len >= 21",
    ),
    (forward(tokens=[]), InputError, "tokens is empty; expected at least one token"),
    (forward(tokens=[40]), InputError, f"tokens[0] = 40; {VOCAB}"),
    (forward(positions=[5.0]), InputError, "positions have dtype float64; expected integers"),
    (
        forward(positions=[5, 6]),
        InputError,
        "positions have shape [2]; expected [1], one per token",
    ),
    (
        forward(positions=[-1]),
        InputError,
        "positions[0] = -1; expected 0 <= position < 2147483648",
    ),
    (
        forward(visible=np.ones((1, 6), np.float32)),
        InputError,
        "mask has dtype float32; expected bool, true where visible",
    ),
    (
        forward(visible=mask(1, 5)),
        InputError,
        "mask has shape [1, 5]; expected [1, 6]: 1 rows over 5 committed tokens and themselves",
    ),
    (
        forward([1, 2], [5, 6], blind()),
        InputError,
        "mask[1, 6] is false, but every row sees itself (MASK-1); expected true",
    ),
    (
        forward([1] * 16, [5] * 16, mask(16, 21)),
        CacheError,
        "forward_tokens of 16 rows at committed_len 5 needs 21 slots, the session has 20; "
        "open it with max_len >= 21",
    ),
    (
        lambda s: s.build(draft(NAN), 3),
        InputError,
        "draft_logits[1, 4] = nan; expected a finite number, or -inf for a token that is never "
        "taken",
    ),
    (
        lambda s: s.build(draft(INF), 3),
        InputError,
        "draft_logits[1, 4] = inf; expected a finite number, or -inf for a token that is never "
        "taken",
    ),
    (
        lambda s: s.build(np.zeros((2, 36)), 3),
        InputError,
        "draft_logits have shape [2, 36]; expected [depth, 37]",
    ),
    (
        lambda s: s.build(np.zeros(37), 3),
        InputError,
        "draft_logits have shape [37]; expected [depth, 37]",
    ),
    (
        lambda s: s.build(np.zeros((2, 37), int), 3),
        InputError,
        "draft_logits have dtype int64; expected floating point",
    ),
    (lambda s: s.build(draft(0), -1), InputError, "budget = -1; expected at least 0"),
    (lambda s: s.build(draft(0), 2.5), InputError, "budget = 2.5; expected an integer"),
    (
        lambda s: s.verify(tree(8, 1)),
        TreeError,
        "tokens[0] = 8, but the session's root is 7; expected a tree under 7, or set_root(8) first",
    ),
    (lambda s: s.verify(tree(7, 37)), TreeError, f"tokens[1] = 37; {VOCAB}"),
    (lambda s: s.verify([7, 1]), TreeError, "tree is list; expected a DraftTree"),
    (
        lambda s: s.verify(tree(7, *range(15))),
        CacheError,
        "verify of 16 rows at committed_len 5 needs 21 slots, the session has 20; "
        "open it with max_len >= 21",
    ),
    (
        lambda s: s.round(tree(8, 1)),
        TreeError,
        "tokens[0] = 8, but the session's root is 7; expected a tree under 7, or set_root(8) first",
    ),
    (lambda s: s.round(tree(7, 37)), TreeError, f"tokens[1] = 37; {VOCAB}"),
    (
        lambda s: s.round(tree(7, *range(15))),
        CacheError,
        "round of 16 rows at committed_len 5 needs 21 slots, the session has 20; "
        "open it with max_len >= 21",
    ),
    (
        lambda s: s.round(PENDING, limit=3),
        InputError,
        "limit is int; expected an EmitLimit",
    ),
    (
        lambda s: s.accept(PENDING, [1, 2, 3]),
        InputError,
        "3 targets for a tree of 4 nodes; expected one per node",
    ),
    (lambda s: s.accept(PENDING, [1, 2, 3, 37]), InputError, f"targets[3] = 37; {VOCAB}"),
    (lambda s: s.accept(PENDING, [1, 2, 3, -1]), InputError, f"targets[3] = -1; {VOCAB}"),
    (lambda s: s.accept(tree(7, 99), [1, 2]), TreeError, f"tokens[1] = 99; {VOCAB}"),
    (
        lambda s: s.accept(PENDING, limit=None),
        InputError,
        "limit is NoneType; expected an EmitLimit",
    ),
    (
        lambda s: s.commit(Acceptance(path=(0, 2, 4), bonus=1)),
        InputError,
        "path[2] = 4, but 4 rows are pending; expected node ids in 0..3",
    ),
    (
        lambda s: s.commit(Acceptance(path=(0, 1, 3), bonus=1)),
        InputError,
        "path[2] = 3 is a child of node 2, not of path[1] = 1; expected a path of the verified "
        "tree",
    ),
    (
        lambda s: s.commit(Acceptance(path=(0, 3), bonus=1)),
        InputError,
        "path[1] = 3 is a child of node 2, not of path[0] = 0; expected a path of the verified "
        "tree",
    ),
    (lambda s: s.commit(Acceptance(path=(0,), bonus=37)), InputError, f"bonus = 37; {VOCAB}"),
    (lambda s: s.commit((0, 2)), InputError, "acceptance is tuple; expected an Acceptance"),
]


@pytest.mark.parametrize(
    ("verb", "error", "text"), REFUSALS, ids=[str(i) for i in range(len(REFUSALS))]
)
def test_a_refusal_says_what_and_changes_nothing(
    load: Callable[..., Any],
    same_cache: Callable[[LogicalCache, LogicalCache], bool],
    verb: Callable[[Any], Any],
    error: type[KdtrError],
    text: str,
) -> None:
    """Not the rows, not the root, and not the verify that waits for its commit."""
    session = load(page_size=4).open(max_len=20)
    session.prefill([1, 2, 3, 4, 5])
    session.set_root(7)
    untouched = load(page_size=4).open(max_len=20)
    untouched.prefill([1, 2, 3, 4, 5])
    untouched.set_root(7)
    for each in (session, untouched):
        each.verify(PENDING)
    before = session.snapshot()

    with pytest.raises(error) as refusal:
        verb(session)

    assert error is type(refusal.value)
    assert text == str(refusal.value)
    assert (5, 7) == (session.committed_len, session.root)
    assert same_cache(before, session.snapshot())
    assert untouched.accept(PENDING) == session.accept(PENDING)
    for each in (session, untouched):
        each.commit(Acceptance(path=(0, 2, 3), bonus=9))
    assert same_cache(untouched.snapshot(), session.snapshot())


@pytest.mark.parametrize(
    "verb",
    [
        lambda s: s.decode(),
        lambda s: s.build(draft(0), 3),
        lambda s: s.verify(PENDING),
        lambda s: s.round(PENDING),
    ],
    ids=["decode", "build", "verify", "round"],
)
def test_verbs_that_need_a_root(session: Any, verb: Callable[[Any], Any]) -> None:
    with pytest.raises(SessionError, match="needs a root, the session has none; call prefill or"):
        verb(session)

    assert (0, None) == (session.committed_len, session.root)


def test_decode_in_a_full_session(load: Callable[..., Any]) -> None:
    session = load().open(max_len=3)
    session.prefill([1, 2, 3])

    with pytest.raises(CacheError, match="decode of 1 rows at committed_len 3 needs 4 slots"):
        session.decode()

    assert 3 == session.committed_len


def test_any_array_is_read() -> None:
    """__array__, __dlpack__, strides, small integers: the values count, and they are copied."""

    class Dlpack:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__ = array.__dlpack__
            self.__dlpack_device__ = array.__dlpack_device__

    strided = np.arange(8, dtype=np.uint8)[::2]
    positions = row_positions(strided, 4)
    strided[:] = 0

    assert [0, 2, 4, 6] == positions.tolist()
    assert [0, 2, 4, 6] == row_positions(Dlpack(np.arange(0, 8, 2)), 4).tolist()


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(InputError, match="positions is list, which NumPy cannot read"):
        row_positions([[1], [2, 3]], 2)
    with pytest.raises(InputError, match="expected integers"):
        row_positions(object(), 1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_draft_logits_of_any_float_become_float64(dtype: Any) -> None:
    logits = draft_logits(np.array([[0.5, -INF]], dtype), 2)

    assert np.float64 == logits.dtype
    assert [[0.5, -INF]] == logits.tolist()


def test_a_limit_of_stop_tokens_outside_the_vocabulary_never_stops(
    load: Callable[..., Any],
) -> None:
    session = load().open(max_len=9)
    session.set_root(7)

    session.round(tree(7, 1), limit=EmitLimit(stop_tokens=frozenset({999})))
