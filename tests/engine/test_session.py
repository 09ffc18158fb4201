from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import (
    NO_LIMIT,
    Acceptance,
    DraftTree,
    EmitLimit,
    LogicalCache,
    ModelConfig,
)
from kdtr.engine import make_engine
from kdtr.engine.model import TreeModel

Load = Callable[..., TreeModel]
Started = Callable[..., Any]
Same = Callable[[LogicalCache, LogicalCache], bool]
PROMPT = [3, 0, 36, 8, 8, 1]  # what `started` has read


def greedy(started: Started, n: int) -> list[int]:
    """The prompt's first n tokens by plain decoding: the root that prefill chose comes first."""
    session = started()
    return [session.root, *(session.decode() for _ in range(n - 1))]


def good_tree(tokens: list[int]) -> DraftTree:
    """A tree whose right path, 0, 2, 5, 6, runs past wrong siblings, from greedy tokens."""
    root, first, second, third = tokens[:4]
    wrong = [(token + 1) % 37 for token in tokens]
    return DraftTree(
        tokens=(root, wrong[1], first, first, wrong[2], second, third),
        parents=(-1, 0, 0, 1, 2, 2, 5),
    )


# A round


def test_round_by_round_equals_plain_decoding(
    started: Started, small: ModelConfig, float32_bound: Callable[..., float]
) -> None:
    """Rejected siblings, moved rows and a second round on top of them (LOSSLESS, COMMIT-3)."""
    tokens = greedy(started, 12)
    session = started()

    emitted: list[int] = []
    while len(emitted) < 8:
        done = session.round(good_tree(tokens[len(emitted) :]))
        assert (0, 2, 5, 6) == done.acceptance.path
        emitted += done.emitted

    assert tokens[1:9] == emitted
    plain = started()
    for _ in range(8):
        plain.decode()
    ours, theirs = session.snapshot(), plain.snapshot()
    assert np.array_equal(theirs.tokens, ours.tokens)
    assert np.array_equal(np.arange(14), ours.positions)
    assert np.abs(theirs.c_kv - ours.c_kv).max() <= 2 * float32_bound(theirs.c_kv, small)
    assert np.abs(theirs.k_pe - ours.k_pe).max() <= 2 * float32_bound(theirs.k_pe, small)
    assert session.root == plain.root


@pytest.mark.parametrize("limit", [NO_LIMIT, EmitLimit(max_emitted=2), "stop"])
def test_fused_round_equals_the_steps(
    started: Started, same_cache: Same, trace: Any, limit: EmitLimit | str
) -> None:
    tokens = greedy(started, 5)
    tree = good_tree(tokens)
    if limit == "stop":
        limit = EmitLimit(stop_tokens=frozenset({tokens[2]}))
    stepwise, fused = started(), started()

    verified = stepwise.verify(tree)
    acceptance = stepwise.accept(tree, limit=limit)
    stepwise.commit(acceptance)
    done = fused.round(tree, limit=limit, trace=trace)

    path = acceptance.path
    assert acceptance == done.acceptance
    assert (tree, (*(tree.tokens[i] for i in path[1:]), acceptance.bonus)) == (
        done.tree,
        done.emitted,
    )
    assert stepwise.root == fused.root
    assert same_cache(stepwise.snapshot(), fused.snapshot())
    assert np.array_equal(verified.logits, trace["logits", None])
    assert list(verified.targets) == trace["targets", None].tolist()
    assert list(path) == trace["path", None].tolist()
    assert acceptance.bonus == trace["bonus", None]
    assert list(done.emitted) == trace["emitted", None].tolist()
    assert [[6 + i, 6 + k] for k, i in enumerate(path)] == trace["moves", None].tolist()


def test_limits_cut_the_path(started: Started) -> None:
    """prompt + emitted = committed + root, wherever the round stops (ACC-4)."""
    tokens = greedy(started, 5)

    for max_emitted in (1, 2, 3, 4, 9):
        session = started()
        done = session.round(good_tree(tokens), limit=EmitLimit(max_emitted=max_emitted))
        n = min(max_emitted, 4)
        assert tokens[1 : n + 1] == list(done.emitted)
        assert [*PROMPT, *tokens[:n]] == session.snapshot().tokens.tolist()
        assert tokens[n] == session.root


def test_decode_is_the_round_of_the_root_alone(
    started: Started, same_cache: Same, trace: Any
) -> None:
    """FWD-2; the walk's stages belong to round."""
    decoded, rounded = started(), started()

    token = decoded.decode(trace=trace)
    done = rounded.round(DraftTree(tokens=(rounded.root,), parents=(-1,)))

    assert (token,) == done.emitted
    assert same_cache(decoded.snapshot(), rounded.snapshot())
    assert [-1] == trace["parents", None].tolist()
    assert ("path", None) not in trace


def test_a_first_token_without_a_prompt(load: Load) -> None:
    """L = 0: the root sees itself alone and lands in slot 0."""
    session = load().open(max_len=1)
    session.set_root(4)

    session.decode()

    assert [4] == session.snapshot().tokens.tolist()
    assert [0] == session.snapshot().positions.tolist()


def test_the_last_slot_can_be_used(load: Load) -> None:
    """Up to equality, with rejected rows in the last slots (SLOT-3)."""
    session = load(page_size=4).open(max_len=9)
    tree = DraftTree(tokens=(session.prefill(PROMPT), 1, 2), parents=(-1, 0, 0))

    session.verify(tree)
    session.commit(Acceptance(path=(0, 2), bonus=5))

    assert 8 == session.committed_len
    session.decode()
    assert 9 == session.committed_len


# Options and chunks change rounding at most


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("split_size", [1, 5, 64])
def test_pages_and_splits_do_not_matter(
    started: Started,
    same_cache: Same,
    small: ModelConfig,
    float32_bound: Callable[..., float],
    page_size: int,
    split_size: int,
) -> None:
    """Pages change nothing at all, splits the order of sums."""
    tree = good_tree(greedy(started, 5))

    one_page = started(page_size=60, split_size=split_size)
    paged = started(page_size=page_size, split_size=split_size)
    unsplit = started(page_size=60, split_size=60)
    logits = [session.verify(tree).logits for session in (one_page, paged, unsplit)]
    for session in (one_page, paged, unsplit):
        session.commit(session.accept(tree))

    assert np.array_equal(logits[0], logits[1])
    assert same_cache(one_page.snapshot(), paged.snapshot())
    bound = 2 * float32_bound(logits[2], small)
    assert np.abs(logits[1] - logits[2]).max() <= bound
    assert paged.root == unsplit.root


@pytest.mark.parametrize("chunks", [(1, 5), (3, 3), (1, 1, 1, 1, 1, 1)])
def test_prefill_in_chunks(
    load: Load,
    started: Started,
    small: ModelConfig,
    float32_bound: Callable[..., float],
    chunks: tuple[int, ...],
) -> None:
    whole, chunked = started(page_size=4), load(page_size=4).open(max_len=60)

    first = 0
    for n in chunks:
        root = chunked.prefill(PROMPT[first : first + n])
        first += n

    assert whole.root == root == chunked.root
    expected, found = whole.snapshot(), chunked.snapshot()
    assert np.array_equal(expected.tokens, found.tokens)
    assert np.array_equal(expected.positions, found.positions)
    bound = 2 * float32_bound(expected.c_kv, small)
    assert np.abs(expected.c_kv - found.c_kv).max() <= bound


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Node by node: steps back to the parent, and a token that its siblings do not have."""
    tokens, parents = [7], [-1]
    children: dict[int, set[int]] = {}
    for _ in range(draw(st.integers(0, 8))):
        parent = len(tokens) - 1 - draw(st.integers(0, len(tokens) - 1))
        token = draw(st.integers(0, 36))
        while token in children.setdefault(parent, set()):
            token = (token + 1) % 37
        children[parent].add(token)
        tokens.append(token)
        parents.append(parent)
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


@given(tree=trees(), page_size=st.sampled_from([1, 4]), split_size=st.sampled_from([2, 64]))
def test_every_row_equals_a_plain_run_of_its_path(
    load: Load,
    started: Started,
    small: ModelConfig,
    float32_bound: Callable[..., float],
    tree: DraftTree,
    page_size: int,
    split_size: int,
) -> None:
    """FWD-4, with NaN in every slot that is not written."""
    session = started(root=7, page_size=page_size, split_size=split_size)
    before = session.snapshot()

    verified = session.verify(tree)

    after = session.snapshot()
    assert np.array_equal(before.c_kv, after.c_kv)  # SLOT-2
    assert np.array_equal(before.k_pe, after.k_pe)
    causal = load().open(max_len=60)
    for i, logits in enumerate(verified.logits):
        path = [i]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        run = [*PROMPT, *(tree.tokens[node] for node in path)]
        plain = causal.forward_tokens(run, np.arange(len(run)), np.tri(len(run), dtype=bool))
        bound = 2 * float32_bound(plain[-1], small)
        assert np.abs(plain[-1] - logits).max() <= bound


# The one forward


def test_forward_tokens_is_verify_under_its_own_mask(
    started: Started, trace: Any, small: ModelConfig, float32_bound: Callable[..., float]
) -> None:
    tree = DraftTree(tokens=(7, 5, 6, 9), parents=(-1, 0, 0, 2))
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    mask = np.concatenate([np.ones((4, 6), bool), mask], axis=1)
    session = started(root=7)

    logits = session.forward_tokens(tree.tokens, np.array([6, 7, 7, 8]), mask, trace=trace)

    assert np.array_equal(mask, trace["mask", None])
    verified = session.verify(tree)
    assert np.abs(verified.logits - logits).max() <= 2 * float32_bound(logits, small)


def test_any_rising_path_of_a_forward_is_committed(started: Started) -> None:
    """Its rows have no parents; tokens, positions and latents move together (COMMIT-1)."""
    session = started()
    mask = np.concatenate([np.ones((4, 6), bool), np.eye(4, dtype=bool)], axis=1)
    seen: dict[Any, np.ndarray] = {}
    session.forward_tokens(
        [4, 5, 6, 7],
        np.array([100, 90, 80, 70]),
        mask,
        trace=lambda stage, layer, array: seen.__setitem__((stage, layer), np.array(array)),
    )

    session.commit(Acceptance(path=(0, 2, 3), bonus=9))

    cache = session.snapshot()
    assert [*PROMPT, 4, 6, 7] == cache.tokens.tolist()
    assert [0, 1, 2, 3, 4, 5, 100, 80, 70] == cache.positions.tolist()
    for layer in range(3):
        assert np.array_equal(seen["c_kv", layer][[0, 2, 3]], cache.c_kv[layer, 6:])
        assert np.array_equal(seen["k_pe", layer][[0, 2, 3]], cache.k_pe[layer, 6:])
    assert (9, 9) == (session.root, session.committed_len)


def test_forward_tokens_hides_committed_rows_too(load: Load, started: Started) -> None:
    """A row that sees only itself does not depend on the prompt."""
    mask = np.zeros((1, 7), bool)
    mask[0, 6] = True
    first, second = started(), load().open(max_len=60)
    second.prefill([9, 9, 2, 4, 4, 4])

    logits = [session.forward_tokens([5], [3], mask) for session in (first, second)]

    assert np.array_equal(*logits)


def test_build_hangs_the_draft_under_the_root(started: Started) -> None:
    session = started(root=7)
    logits = np.full((2, 37), -np.inf, np.float32)
    logits[0, [4, 9]] = [1.0, 3.0]
    logits[1, 20] = 0.0

    tree = session.build(logits, 10)

    assert DraftTree(tokens=(7, 9, 20, 4, 20), parents=(-1, 0, 1, 0, 3)) == tree
    assert DraftTree(tokens=(7, 9), parents=(-1, 0)) == session.build(logits, 1)
    assert DraftTree(tokens=(7,), parents=(-1,)) == session.build(logits[:0], 10)


def test_targets_are_the_lowest_of_equal_logits(
    small: ModelConfig, small_weights: dict[str, np.ndarray]
) -> None:
    """A head of equal rows ties every token (ACC-1)."""
    head = np.tile(small_weights["lm_head.weight"][:1], (37, 1))
    session = make_engine().load((small, {**small_weights, "lm_head.weight": head})).open(max_len=9)

    assert 0 == session.prefill([5, 6])
    verified = session.verify(DraftTree(tokens=(0, 1), parents=(-1, 0)))
    assert (0, 0) == verified.targets
