"""One sequence: every use of the one forward, every refusal, and nothing changed by either."""

from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.contract import (
    STAGES,
    TRACED,
    Acceptance,
    CacheError,
    DraftTree,
    EmitLimit,
    InputError,
    SessionError,
    Source,
    TreeError,
)
from kdtr.reference import accept, make_engine, path, positions
from kdtr.reference.tree import tree_mask

# The fixture `model` is the small model under both cache strategies, in float64 and fixed order:
# whatever is equal here is equal in every bit.
LAWS = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
)
PROMPT = (3, 1, 4, 1, 5, 9, 15)  # its greedy continuation is 22, 20, 1, 17, 10, 5, 0: no repeats


def state(session):
    held = session.snapshot()
    return (
        session.committed_len,
        session.root,
        *((x.shape, x.tobytes()) for x in (held.tokens, held.positions, held.c_kv, held.k_pe)),
    )


def begun(model, *, max_len=40, prompt=PROMPT):
    session = model.open(max_len=max_len)
    session.prefill(prompt)
    return session


def plain(model, tokens):
    """All logits of one causal run, and the session that committed it."""
    session, seen = model.open(max_len=60), {}
    session.prefill(tokens, trace=lambda stage, _, array: seen.update({stage: array}))
    return seen["logits"], session


def branches(root):
    """A tree with siblings, cousins, a repeated token and a leaf before its cousin's child."""
    return DraftTree(tokens=(root, 11, 12, 11, 5, 11, 0, 22), parents=(-1, 0, 0, 2, 1, 4, 2, 3))


def hitting(model, session, length):
    """A tree whose spine is what the model says, with a wrong sibling before each right node."""
    greedy = model.open(max_len=60)
    held = session.snapshot()
    greedy.prefill(held.tokens)
    greedy.set_root(session.root)
    tokens, parents, above = [session.root], [-1], 0
    for _ in range(length):
        right = greedy.decode()
        tokens += [(right + 1) % 23, right]
        parents += [above, above]
        above = len(tokens) - 1
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents)), above


# One forward for three uses


@LAWS
@given(data=st.data())
def test_every_chunking_of_a_prefill_gives_the_same_bits(data, model):
    """FWD-1."""
    tokens = data.draw(st.lists(st.integers(0, 22), min_size=1, max_size=12), label="tokens")
    cuts = data.draw(st.sets(st.integers(1, max(1, len(tokens) - 1))), label="cuts")
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    whole = begun(model, prompt=tokens)

    chunked = model.open(max_len=40)
    for start, end in pairwise(edges):
        chunked.prefill(tokens[start:end])

    assert state(whole) == state(chunked)


@LAWS
@given(data=st.data())
def test_both_cache_strategies_give_the_same_bits(data, small, draw_tensors, draft_trees):
    """Whatever is done, in whatever order: LOSSLESS in its cache strategy."""
    source = small, draw_tensors(small, 2)
    append, scratch = (
        make_engine(cache=name).load(source).open(max_len=30) for name in ("append", "scratch")
    )
    for session in (append, scratch):
        session.prefill([1, 2, 3])
    for _ in range(data.draw(st.integers(1, 4), label="verbs")):
        verb = data.draw(st.sampled_from(["round", "verify", "decode", "prefill", "root"]))
        if verb in ("round", "verify"):
            tree = data.draw(draft_trees(23, 5, append.root), label="tree")
            first, second = getattr(append, verb)(tree), getattr(scratch, verb)(tree)
            if verb == "round":
                assert first == second
            else:
                assert first.targets == second.targets
                np.testing.assert_array_equal(first.logits, second.logits)
        elif verb == "decode":
            assert append.decode() == scratch.decode()
        else:
            token = data.draw(st.integers(0, 22), label="token")
            for session in (append, scratch):
                session.prefill([token]) if verb == "prefill" else session.set_root(token)
        assert state(append) == state(scratch)


@LAWS
@given(data=st.data())
def test_a_row_of_a_verify_is_the_last_row_of_the_plain_run(data, model, draft_trees):
    """FWD-4, in every bit; FWD-5 where the tree is a chain."""
    session = begun(model)
    tree = data.draw(draft_trees(23, 9, session.root), label="tree")
    i = data.draw(st.integers(0, len(tree) - 1), label="node")

    row = session.verify(tree).logits[i]

    logits, _ = plain(model, [*PROMPT, *(tree.tokens[node] for node in path(tree, i))])
    np.testing.assert_array_equal(logits[-1], row)


def test_decode_is_a_round_of_the_root_alone(model):
    """FWD-2."""
    one, other = begun(model), begun(model)

    for _ in range(3):
        root = one.root
        chosen = one.decode()
        round_ = other.round(DraftTree(tokens=(root,), parents=(-1,)))

        assert (chosen,) == round_.emitted
        assert state(one) == state(other)


def test_decode_is_prefill_of_the_root(model):
    decoded, prefilled = begun(model), begun(model)

    decoded.decode()
    prefilled.prefill([prefilled.root])

    assert state(prefilled) == state(decoded)


def test_a_verify_is_forward_tokens_under_the_trees_mask(model):
    session = begun(model)
    tree = branches(session.root)

    verified = session.verify(tree)
    logits = session.forward_tokens(
        tree.tokens, positions(tree, len(PROMPT)), tree_mask(tree, len(PROMPT))
    )

    np.testing.assert_array_equal(verified.logits, logits)
    assert tuple(logits.argmax(axis=1)) == verified.targets


def test_a_verify_alone_changes_no_committed_row(model):
    """SLOT-2."""
    session = begun(model)
    before = state(session)

    session.verify(branches(session.root))

    assert before == state(session)


def test_a_forward_alone_changes_no_committed_row(model):
    session = begun(model)
    before = state(session)

    session.forward_tokens([5, 6], [0, 50], np.ones((2, len(PROMPT) + 2), dtype=bool))

    assert before == state(session)


def test_a_second_verify_repeats_the_first(model):
    """NUM-4; a wider one between them leaves nothing behind (MASK-3)."""
    session = begun(model)
    tree = branches(session.root)

    first = session.verify(tree)
    kept = first.logits.copy()
    session.verify(DraftTree(tokens=(session.root, *range(20)), parents=(-1, *[0] * 20)))
    second = session.verify(tree)

    np.testing.assert_array_equal(kept, second.logits)
    assert first.targets == second.targets


def test_commit_then_verify_is_prefill_of_the_longer_prompt(model):
    """COMMIT-1, COMMIT-3: the accepted rows, moved past rejected ones, are those of a plain run."""
    session = begun(model)
    tree, last = hitting(model, session, 4)
    round_ = session.round(tree)
    kept = [tree.tokens[i] for i in round_.acceptance.path]
    after = branches(session.root)

    verified = session.verify(after)

    fresh = begun(model, prompt=[*PROMPT, *kept])
    assert last == round_.acceptance.path[-1]
    assert 5 == len(kept)
    assert round_.acceptance.path != tuple(range(5))  # rows did move
    assert state(fresh) == state(session)
    np.testing.assert_array_equal(fresh.verify(after).logits, verified.logits)


def test_greedy_output_does_not_depend_on_the_trees(model):
    """LOSSLESS: decoded one by one, and in rounds of trees that hit and trees that miss."""
    decoded = begun(model)
    expected = [decoded.decode() for _ in range(12)]
    session, emitted = begun(model), []

    for length in (3, 0, 1, 2):
        tree, _ = hitting(model, session, length)
        emitted += session.round(tree).emitted
    emitted += session.round(branches(session.root)).emitted

    assert 10 + 1 <= len(emitted) <= 12
    assert expected[: len(emitted)] == emitted


def test_stepwise_and_fused_rounds_are_the_same(model):
    fused, stepwise = begun(model), begun(model)
    tree, _ = hitting(model, fused, 2)

    round_ = fused.round(tree)
    stepwise.verify(tree)
    acceptance = stepwise.accept(tree)
    stepwise.commit(acceptance)

    assert (tree, acceptance) == (round_.tree, round_.acceptance)
    assert state(fused) == state(stepwise)


def test_an_empty_cache_takes_a_root_and_a_tree(model):
    """L = 0: the same rows as a prompt that is the tree's path."""
    session = model.open(max_len=20)
    session.set_root(7)
    tree = DraftTree(tokens=(7, 2, 3), parents=(-1, 0, 0))

    verified = session.verify(tree)
    session.commit(Acceptance(path=(0, 2), bonus=9))

    logits, fresh = plain(model, [7, 3])
    fresh.set_root(9)
    np.testing.assert_array_equal(logits, verified.logits[[0, 2]])
    assert state(fresh) == state(session)
    assert (0, 1) == tuple(session.snapshot().positions)


def test_a_prefill_appends_its_tokens_and_replaces_the_root(model):
    """FWD-6: the old root is not cached unless the caller passes it."""
    session = begun(model)
    session.set_root(20)

    root = session.prefill([6, 7])

    assert [*PROMPT, 6, 7] == session.snapshot().tokens.tolist()
    assert list(range(9)) == session.snapshot().positions.tolist()
    assert plain(model, [*PROMPT, 6, 7])[0][-1].argmax() == root == session.root


def test_set_root_replaces_the_root_and_nothing_else(model):
    session = begun(model)
    before = session.snapshot()

    session.set_root(np.uint8(22))

    assert 22 == session.root
    assert int is type(session.root)
    for old, new in zip(astuple(before), astuple(session.snapshot()), strict=True):
        np.testing.assert_array_equal(old, new)


def test_reset_is_a_new_session(model):
    session = begun(model)
    session.verify(branches(session.root))

    session.reset()

    assert state(model.open(max_len=40)) == state(session)
    session.prefill(PROMPT)
    assert state(begun(model)) == state(session)


def test_sessions_of_a_model_do_not_see_each_other(model):
    one, other = begun(model), model.open(max_len=40)

    other.prefill([20, 21])
    one.decode()

    alone = begun(model)
    alone.decode()
    assert state(alone) == state(one)


def test_a_snapshot_is_a_copy(model):
    session = begun(model)
    before = state(session)

    for array in astuple(session.snapshot()):
        array[...] = 0

    assert before == state(session)


def test_a_tie_of_logits_goes_to_the_lowest_id(small, draw_tensors):
    """ACC-1: two equal rows of lm_head make equal logits."""
    tensors = draw_tensors(small, 3)
    tensors["lm_head.weight"][:] = tensors["lm_head.weight"][4]
    session = make_engine().load((small, tensors)).open(max_len=9)

    root = session.prefill([1, 2])

    assert 0 == root


def test_forward_tokens_may_commit_any_ascending_rows(model):
    """It has no tree: the mask is the caller's, and so is the path."""
    session = begun(model)
    n = len(PROMPT)
    seen = {}
    session.forward_tokens(
        [8, 9, 10],
        [n, n + 3, n + 1],
        np.ones((3, n + 3), dtype=bool),
        trace=lambda stage, layer, array: seen.update({(stage, layer): np.array(array)}),
    )

    session.commit(Acceptance(path=(0, 2), bonus=1))

    held = session.snapshot()
    assert [*PROMPT, 8, 10] == held.tokens.tolist()
    assert [n, n + 1] == held.positions[n:].tolist()
    np.testing.assert_array_equal(seen["c_kv", 1][[0, 2]], held.c_kv[1, n:])
    np.testing.assert_array_equal(seen["k_pe", 0][[0, 2]], held.k_pe[0, n:])


# What is traced


def traced(verb):
    calls = []
    verb(lambda stage, layer, array: calls.append((stage, layer)))
    return calls


def test_a_round_traces_every_stage_once_per_layer_in_order(model):
    session = begun(model)
    names = [stage.name for stage in STAGES]

    calls = traced(lambda trace: session.round(branches(session.root), trace=trace))

    assert TRACED == {stage for stage, _ in calls}
    assert len(set(calls)) == len(calls)
    for stage in STAGES:
        layers = [layer for name, layer in calls if name == stage.name]
        routed = stage.name in ("router_scores", "expert_ids", "expert_weights")
        if stage.source is Source.LAYER:
            assert ([1] if routed else [0, 1]) == layers, stage.name  # layer 0 is dense
        elif stage.name in TRACED:
            assert [None] == layers, stage.name
    for layer in (None, 0, 1):
        order = [names.index(stage) for stage, where in calls if where == layer]
        assert sorted(order) == order


def test_prefill_and_forward_trace_the_forward_without_a_tree(model):
    session = begun(model)
    forward = {s.name for s in STAGES if s.source in (Source.FORWARD, Source.LAYER)}
    n = len(PROMPT)

    prefill = traced(lambda trace: session.prefill([1, 2], trace=trace))
    rows = traced(
        lambda trace: session.forward_tokens([1], [n], np.ones((1, n + 3), dtype=bool), trace=trace)
    )

    assert forward - {"parents"} == {stage for stage, _ in prefill}
    assert prefill == rows


def test_traced_arrays_have_the_axes_of_their_stage(model, small):
    session = begun(model)
    tree = branches(session.root)
    shapes = {}

    round_ = session.round(
        tree, trace=lambda stage, _, array: shapes.update({stage: np.shape(array)})
    )

    lengths = {
        "n": len(tree),
        "s": len(PROMPT) + len(tree),
        "h": 3,
        "d": 6,
        "r": 4,
        "c": 10,
        "m": 20,
        "e": 12,
        "k": 3,
        "w": 23,
        "a": round_.acceptance.accept_len,
        "2": 2,
    }
    expected = {
        stage.name: tuple(lengths[axis] for axis in stage.axes)
        for stage in STAGES
        if stage.name in TRACED
    }
    assert expected == shapes


# Limits (ACC-4)


@pytest.mark.parametrize("kind", ["stop at depth 1", "stop at the bonus", "one", "enough"])
def test_a_limit_cuts_the_round_and_the_cache_together(kind, model):
    """At all times: prompt + emitted tokens = committed tokens + [root]."""
    session = begun(model)
    first = session.root
    tree, _ = hitting(model, session, 3)
    free = begun(model).round(tree).emitted
    assert 4 == len(set(free))  # or a stop token would cut elsewhere
    limit, emitted = {
        "stop at depth 1": (EmitLimit(stop_tokens=frozenset({free[0]})), free[:1]),
        "stop at the bonus": (EmitLimit(stop_tokens=frozenset({free[3]})), free),
        "one": (EmitLimit(max_emitted=1), free[:1]),
        "enough": (EmitLimit(max_emitted=9), free),
    }[kind]

    round_ = session.round(tree, limit=limit)

    held = session.snapshot().tokens.tolist()
    assert emitted == round_.emitted
    assert [*PROMPT, first, *emitted] == [*held, session.root]
    assert len(PROMPT) + len(emitted) == session.committed_len
    assert state_after(model, [*PROMPT, first, *emitted]) == state(session)


def state_after(model, tokens):
    """Of a plain run over all but the last token, which is the root."""
    session = begun(model, prompt=tokens[:-1])
    session.set_root(tokens[-1])
    return state(session)


def test_accept_takes_a_limit_as_round_does(model):
    session = begun(model)
    tree, _ = hitting(model, session, 3)
    targets = session.verify(tree).targets
    limit = EmitLimit(max_emitted=2)

    acceptance = session.accept(tree, limit=limit)

    assert 2 == acceptance.accept_len
    assert accept(tree, targets, limit=limit) == acceptance


def test_pinned_targets_need_no_verify(model):
    session = begun(model)
    tree = DraftTree(tokens=(9, 3, 4), parents=(-1, 0, 1))

    acceptance = session.accept(tree, [3, 4, 8])

    assert Acceptance(path=(0, 1, 2), bonus=8) == acceptance


# Capacity (SLOT-3)


def test_every_verb_is_legal_up_to_the_last_slot(model):
    n = len(PROMPT)
    for verb in ("prefill", "verify", "round", "forward_tokens", "decode"):
        session = begun(model, max_len=n + (1 if verb == "decode" else 3))
        tree = DraftTree(tokens=(session.root, 1, 2), parents=(-1, 0, 1))
        full = {
            "prefill": lambda s=session: s.prefill([1, 2, 3]),
            "verify": lambda s=session, t=tree: s.verify(t),
            "round": lambda s=session, t=tree: s.round(t),
            "forward_tokens": lambda s=session: s.forward_tokens(
                [1, 2, 3], [0, 1, 2], np.ones((3, n + 3), dtype=bool)
            ),
            "decode": lambda s=session: s.decode(),
        }[verb]

        full()

        roomy = begun(model)
        if verb == "decode":
            roomy.decode()
            assert state(roomy) == state(session)


def test_a_prompt_may_fill_the_session(model):
    session = begun(model, max_len=len(PROMPT))

    with pytest.raises(CacheError) as refusal:
        session.decode()
    expected = (
        "a forward of 1 rows at committed_len 7 needs 8 slots, the session has 7; "
        "open it with max_len >= 8"
    )
    assert expected == str(refusal.value)
    assert len(PROMPT) == session.committed_len


# Refusals: (verb, error, text). The session holds PROMPT and a pending verify, and has 15 slots.

NO_ROWS = "expected integers [n], n >= 1"
ALL = np.ones((1, 8), dtype=bool)


def fits(session):
    return branches(session.root)


REFUSALS = {
    "set_root above": (
        lambda s: s.set_root(23),
        InputError,
        "root = 23; expected a token id 0..22",
    ),
    "set_root below": (
        lambda s: s.set_root(-1),
        InputError,
        "root = -1; expected a token id 0..22",
    ),
    "set_root real": (
        lambda s: s.set_root(1.0),
        InputError,
        "root = 1.0; expected a token id",
    ),
    "prefill nothing": (
        lambda s: s.prefill([]),
        InputError,
        f"tokens are int64 [0]; {NO_ROWS}",
    ),
    "prefill two axes": (
        lambda s: s.prefill(np.array([[1, 2]])),
        InputError,
        f"tokens are int64 [1, 2]; {NO_ROWS}",
    ),
    "prefill booleans": (
        lambda s: s.prefill([True]),
        InputError,
        "tokens[0] = True; expected a token id",
    ),
    "prefill above": (
        lambda s: s.prefill([1, 2, 40, 50]),
        InputError,
        "tokens[2] = 40; expected a token id 0..22",
    ),
    "prefill past the end": (
        lambda s: s.prefill([1] * 9),
        CacheError,
        "a forward of 9 rows at committed_len 7 needs 16 slots, the session has 15; "
        "open it with max_len >= 16",
    ),
    "forward below": (
        lambda s: s.forward_tokens([-2], [7], ALL),
        InputError,
        "tokens[0] = -2; expected a token id 0..22",
    ),
    "forward past the end": (
        lambda s: s.forward_tokens([1] * 9, range(9), np.ones((9, 16), dtype=bool)),
        CacheError,
        "a forward of 9 rows at committed_len 7 needs 16 slots, the session has 15; "
        "open it with max_len >= 16",
    ),
    "forward positions shape": (
        lambda s: s.forward_tokens([1], [7, 8], ALL),
        InputError,
        "positions are int64 [2]; expected integers [1]",
    ),
    "forward positions real": (
        lambda s: s.forward_tokens([1], [7.0], ALL),
        InputError,
        "positions are float64 [1]; expected integers [1]",
    ),
    "forward positions below": (
        lambda s: s.forward_tokens([1, 1], [7, -1], np.ones((2, 9), dtype=bool)),
        InputError,
        "positions[1] = -1; expected 0..2147483647",
    ),
    "forward positions above": (
        lambda s: s.forward_tokens([1], [2**32], ALL),
        InputError,
        "positions[0] = 4294967296; expected 0..2147483647",
    ),
    "forward mask shape": (
        lambda s: s.forward_tokens([1], [7], np.ones((1, 7), dtype=bool)),
        InputError,
        "mask is bool [1, 7]; expected bool [1, 8]: rows, committed_len + rows",
    ),
    "forward mask numbers": (
        lambda s: s.forward_tokens([1], [7], np.ones((1, 8))),
        InputError,
        "mask is float64 [1, 8]; expected bool [1, 8]: rows, committed_len + rows",
    ),
    "forward mask blind": (
        lambda s: s.forward_tokens([1, 2], [7, 8], np.array([[True] * 9, [True] * 8 + [False]])),
        InputError,
        "mask[1, 8] is false; expected every row to see itself (MASK-1)",
    ),
    "build width": (
        lambda s: s.build(np.zeros((2, 22)), 4),
        InputError,
        "draft_logits are [2, 22]; expected [depth, 23]",
    ),
    "build axes": (
        lambda s: s.build(np.zeros(23), 4),
        InputError,
        "draft_logits are float64 [23]; expected floating-point numbers [depth, vocab]",
    ),
    "build nan": (
        lambda s: s.build(np.full((1, 23), np.nan), 4),
        InputError,
        "draft_logits[0, 0] = nan; expected a finite number or -inf",
    ),
    "build budget": (
        lambda s: s.build(np.zeros((2, 23)), -1),
        InputError,
        "budget = -1; expected an integer of at least 0",
    ),
    "verify another root": (
        lambda s: s.verify(branches((s.root + 1) % 23)),
        TreeError,
        "the tree's root is token {other}, the session's is {root}; expected tokens[0] = {root} "
        "(FWD-3)",
    ),
    "verify above": (
        lambda s: s.verify(DraftTree(tokens=(s.root, 3, 23), parents=(-1, 0, 0))),
        TreeError,
        "tokens[2] = 23; expected a token id 0..22",
    ),
    "verify past the end": (
        lambda s: s.verify(DraftTree(tokens=(s.root, *range(8)), parents=(-1, *[0] * 8))),
        CacheError,
        "a forward of 9 rows at committed_len 7 needs 16 slots, the session has 15; "
        "open it with max_len >= 16",
    ),
    "round another root": (
        lambda s: s.round(branches((s.root + 1) % 23)),
        TreeError,
        "the tree's root is token {other}, the session's is {root}; expected tokens[0] = {root} "
        "(FWD-3)",
    ),
    "round past the end": (
        lambda s: s.round(DraftTree(tokens=(s.root, *range(8)), parents=(-1, *[0] * 8))),
        CacheError,
        "a forward of 9 rows at committed_len 7 needs 16 slots, the session has 15; "
        "open it with max_len >= 16",
    ),
    "accept another tree": (
        lambda s: s.accept(DraftTree(tokens=(s.root, 3), parents=(-1, 0))),
        SessionError,
        "accept without targets, but the latest forward is not a verify of this tree; "
        "verify it first, or give the targets",
    ),
    "accept too few": (
        lambda s: s.accept(fits(s), [1, 2]),
        InputError,
        "2 targets for 8 nodes; expected one per node",
    ),
    "accept above": (
        lambda s: s.accept(fits(s), [1, 2, 3, 23, 0, 0, 0, 0]),
        InputError,
        "targets[3] = 23; expected a token id 0..22",
    ),
    "accept real": (
        lambda s: s.accept(fits(s), [0.5] * 8),
        InputError,
        "targets[0] = 0.5; expected a token id",
    ),
    "commit past the tree": (
        lambda s: s.commit(Acceptance(path=(0, 2, 8), bonus=1)),
        InputError,
        "path ends at node 8, the forward had 8 rows; expected nodes 0..7",
    ),
    "commit no path": (
        lambda s: s.commit(Acceptance(path=(0, 2, 4), bonus=1)),
        InputError,
        "path = (0, 2, 4); expected the path to node 4, (0, 1, 4)",
    ),
    "commit a path with a gap": (
        lambda s: s.commit(Acceptance(path=(0, 3), bonus=1)),
        InputError,
        "path = (0, 3); expected the path to node 3, (0, 2, 3)",
    ),
    "commit bonus above": (
        lambda s: s.commit(Acceptance(path=(0,), bonus=23)),
        InputError,
        "bonus = 23; expected a token id 0..22",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_its_reason_and_changes_nothing(name, model):
    """The state, and the pending verify: it can still be accepted and committed."""
    call, error, text = REFUSALS[name]
    session, undisturbed = begun(model, max_len=15), begun(model, max_len=15)
    tree = branches(session.root)
    before = state(session)
    session.verify(tree)
    undisturbed.verify(tree)

    with pytest.raises(error) as refusal:
        call(session)

    other = (session.root + 1) % 23
    assert text.replace("{root}", str(session.root)).replace("{other}", str(other)) == str(
        refusal.value
    )
    assert error is refusal.type
    assert before == state(session)
    assert undisturbed.accept(tree) == session.accept(tree)
    for each in (session, undisturbed):
        each.commit(Acceptance(path=(0, 2, 3), bonus=1))
    assert state(undisturbed) == state(session)


PENDING = (
    "commit without a pending forward: there was none, it was committed already, or "
    "set_root dropped it; verify first (COMMIT-5)"
)
UNVERIFIED = (
    "accept without targets, but the latest forward is not a verify of this tree; "
    "verify it first, or give the targets"
)
FIRST = Acceptance(path=(0,), bonus=1)


@pytest.mark.parametrize(
    "before",
    [
        lambda s: None,
        lambda s: s.round(fits(s)),
        lambda s: (s.verify(fits(s)), s.commit(FIRST)),
        lambda s: (s.verify(fits(s)), s.set_root(s.root)),
        lambda s: s.decode(),
        lambda s: (s.verify(fits(s)), s.prefill([1])),
        lambda s: (s.verify(fits(s)), s.reset(), s.set_root(1)),
    ],
    ids=["prefill", "round", "commit", "set_root", "decode", "verify, prefill", "reset"],
)
def test_a_commit_applies_to_the_latest_forward_once(before, model):
    """COMMIT-5."""
    session = begun(model)
    before(session)
    held = state(session)

    with pytest.raises(SessionError) as commit_refusal:
        session.commit(FIRST)
    with pytest.raises(SessionError) as accept_refusal:
        session.accept(fits(session))

    assert PENDING == str(commit_refusal.value)
    assert UNVERIFIED == str(accept_refusal.value)
    assert held == state(session)


def test_a_forward_replaces_the_pending_verify(model):
    session = begun(model)
    session.verify(fits(session))
    session.forward_tokens([1], [7], ALL)

    with pytest.raises(SessionError) as refusal:
        session.accept(fits(session))
    with pytest.raises(InputError):
        session.commit(Acceptance(path=(0, 1), bonus=1))
    session.commit(FIRST)

    assert UNVERIFIED == str(refusal.value)
    assert [*PROMPT, 1] == session.snapshot().tokens.tolist()


def test_a_forward_that_dies_half_way_leaves_nothing_to_commit(model):
    """Its rows have replaced those of the verify before: committing either would be wrong."""
    session = begun(model)
    session.verify(fits(session))
    held = state(session)

    def interrupt(stage, layer, _):
        if (stage, layer) == ("hidden", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.verify(branches(session.root), trace=interrupt)
    with pytest.raises(SessionError):
        session.commit(FIRST)

    assert held == state(session)


@pytest.mark.parametrize(
    "verb",
    [
        lambda s: s.decode(),
        lambda s: s.build(np.zeros((2, 23)), 4),
        lambda s: s.verify(branches(1)),
        lambda s: s.round(branches(1)),
    ],
    ids=["decode", "build", "verify", "round"],
)
def test_a_session_without_a_root_says_so(verb, model):
    session = model.open(max_len=9)

    with pytest.raises(SessionError) as refusal:
        verb(session)

    assert "the session has no root; prefill or set_root first" == str(refusal.value)
    assert state(model.open(max_len=9)) == state(session)


@pytest.mark.parametrize(
    "verb",
    [
        lambda s: s.set_root(1),
        lambda s: s.forward_tokens([1], [7], ALL),
        lambda s: s.prefill([1]),
        lambda s: s.decode(),
        lambda s: s.build(np.zeros((2, 23)), 4),
        lambda s: s.verify(branches(1)),
        lambda s: s.accept(branches(1), [0] * 8),
        lambda s: s.commit(FIRST),
        lambda s: s.round(branches(1)),
        lambda s: s.snapshot(),
        lambda s: s.reset(),
    ],
    ids=[
        "set_root",
        "forward_tokens",
        "prefill",
        "decode",
        "build",
        "verify",
        "accept",
        "commit",
        "round",
        "snapshot",
        "reset",
    ],
)
def test_a_closed_session_refuses_every_verb(verb, model):
    session = begun(model)
    session.verify(branches(session.root))

    session.close()

    with pytest.raises(SessionError) as refusal:
        verb(session)
    assert "the session is closed; open another" == str(refusal.value)


def test_closing_twice_and_closing_one_of_two_is_harmless(model):
    one, other = begun(model), begun(model)

    one.close()
    one.close()

    assert other.decode() == begun(model).decode()


def test_a_model_that_may_not_close_yet_closes_no_session(model):
    """Asked from within a trace of one of its sessions."""
    sessions = [begun(model) for _ in range(7)]

    def trace(*_):
        with pytest.raises(SessionError, match="close called from a trace"):
            model.close()

    sessions[0].decode(trace=trace)

    assert all(session.decode() >= 0 for session in sessions)


def test_build_puts_the_best_first_tree_under_the_sessions_root(model):
    session = begun(model)
    logits = np.zeros((2, 23))
    logits[0, 5], logits[1, 8] = 9, 8

    tree = session.build(logits, 2)

    assert DraftTree(tokens=(session.root, 5, 8), parents=(-1, 0, 1)) == tree
