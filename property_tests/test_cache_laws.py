"""The cache: verify leaves it alone, commit is plain decoding, and its layout cannot be told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import Acceptance, Array
from kdtr.property_tests.fewer_verbs import answers, place, place_again
from kdtr.property_tests.history import Step, committed_by, histories
from kdtr.property_tests.judge import Judge, different_bits, tree_scene
from kdtr.property_tests.strategies import Scene, SmallModel, nodes_of, scenes, small_models, tokens
from kdtr.property_tests.subject import Answer, Subject
from kdtr.property_tests.trees import path_to, path_tokens


@given(scene=scenes())
def test_a_verify_leaves_the_committed_rows_alone(engine: Subject, scene: Scene) -> None:
    """SLOT-2: a verify changes no bit of slots 0..L-1, nor L, nor the root."""
    model, tree = scene.model, scene.tree
    session = engine.committed(model, scene.prompt)
    session.set_root(tree.tokens[0])
    before = session.snapshot()

    session.verify(tree)

    judge = Judge(engine, model, tree_scene(tree))
    judge.same("L", len(scene.prompt), session.committed_len)
    judge.same("root", tree.tokens[0], session.root)
    judge.same_cache("committed rows", before, session.snapshot())


@given(scene=scenes(), data=st.data())
def test_verify_twice_is_verify_once(engine: Subject, scene: Scene, data: st.DataObject) -> None:
    """SLOT-2, NUM-4, COMMIT-5: the second verify of a tree shows what the first did, and the
    commit after it leaves what a commit after one would; bit for bit in a deterministic engine."""
    if not engine.deterministic:
        pytest.skip(f"{engine.label} does not declare determinism")
    model = scene.model
    placed = place(engine, model, scene.prompt, scene.tree)
    once, tree = placed.session, placed.tree
    last = data.draw(nodes_of(tree), label="last accepted node")
    acceptance = Acceptance(path_to(tree, last), bonus=0)
    twice = place_again(engine, model, placed)

    expected = answers(once, tree)
    first, second = answers(twice, tree), answers(twice, tree)
    once.commit(acceptance)
    twice.commit(acceptance)

    judge = Judge(engine, model, tree_scene(tree, last))
    for what, left, right in (("first", expected, first), ("second", first, second)):
        judge.same_answers(f"{what} verify", left, right)
    judge.same("L", once.committed_len, twice.committed_len)
    if engine.offers("snapshot"):
        judge.same_cache("cache", once.snapshot(), twice.snapshot())


@given(scene=scenes(), data=st.data())
def test_a_commit_is_plain_decoding_of_the_path(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """COMMIT-1, COMMIT-2, COMMIT-3, POS-1: whichever path is committed, the logical cache is that
    of decoding its tokens one by one, L grows by accept_len, and the bonus is the root."""
    model, tree = scene.model, scene.tree
    last = data.draw(nodes_of(tree), label="last accepted node")
    bonus = data.draw(tokens(model.config.vocab_size), label="bonus")
    path = path_to(tree, last)
    decoding, session = (engine.committed(model, scene.prompt) for _ in range(2))
    for token in path_tokens(tree, last):
        decoding.set_root(token)
        decoding.decode()

    session.set_root(tree.tokens[0])
    session.verify(tree)
    session.commit(Acceptance(path, bonus))

    judge = Judge(engine, model, tree_scene(tree, *path))
    judge.same("L", len(scene.prompt) + len(path), session.committed_len)
    judge.same("root", bonus, session.root)
    judge.cache(f"cache after path {path}", decoding.snapshot(), session.snapshot())


@given(scene=scenes(), data=st.data())
def test_a_commit_moves_the_rows_that_the_verify_wrote(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """COMMIT-1: slot L + k holds, bit for bit, the latents that the verify showed for path[k];
    nothing is rotated or rounded again."""
    info = engine.engine.info
    if not {"c_kv", "k_pe"} <= info.stages or info.profile.latents != info.profile.activations:
        pytest.skip(f"{engine.label} does not show the latents that it stores")
    model, tree = scene.model, scene.tree
    last = data.draw(nodes_of(tree), label="last accepted node")
    path = list(path_to(tree, last))
    session = engine.committed(model, scene.prompt)
    session.set_root(tree.tokens[0])
    written: dict[tuple[str, int | None], np.ndarray] = {}

    def trace(stage: str, layer: int | None, array: Array, /) -> None:
        written[stage, layer] = np.array(array)

    session.verify(tree, trace=trace)
    session.commit(Acceptance(tuple(path), bonus=0))

    judge = Judge(engine, model, tree_scene(tree, *path))
    cache = session.snapshot()
    for stage, stored in (("c_kv", cache.c_kv), ("k_pe", cache.k_pe)):
        for layer in range(model.config.num_hidden_layers):
            expected, actual = written[stage, layer][path], stored[layer, len(scene.prompt) :]
            judge.same(f"{stage} of layer {layer}", None, different_bits(expected, actual))


@given(model=small_models(), steps=histories())
def test_positions_are_indices_after_any_history(
    engine: Subject, model: SmallModel, steps: Sequence[Step]
) -> None:
    """POS-1, FWD-1, COMMIT-2, COMMIT-3, FWD-6: after prefills, decodes, commits of any path and
    abandoned verifies the cache holds exactly the tokens that were appended, at 0..L-1, and equals
    that of one prefill of them."""
    session = engine.open(model)
    for step in steps:
        step.play(session)

    held = list(committed_by(steps))
    cache = session.snapshot()
    judge = Judge(engine, model)
    judge.same("L", len(held), session.committed_len)
    judge.same("tokens", held, cache.tokens.tolist())
    judge.same("positions", list(range(len(held))), cache.positions.tolist())
    if held:
        judge.cache("cache", engine.committed(model, held).snapshot(), cache)


@given(model=small_models(), steps=histories())
def test_cache_layouts_are_indistinguishable(
    twins: tuple[Subject, Subject], model: SmallModel, steps: Sequence[Step]
) -> None:
    """LOSSLESS, SLOT-1: append-then-compact and scratch show the same bits after every step of any
    history; so do two page and split sizes, to rounding: roots, tokens, rows and cache."""
    one, other = (subject.open(model) for subject in twins)
    judge = Judge(twins[0], model)
    shown = all(subject.offers("snapshot") for subject in twins)
    for k, step in enumerate(steps):
        expected, actual = step.play(one), step.play(other)

        hold_step(judge, steps[:k], step, expected, actual)
        judge.same(f"L after step {k}", one.committed_len, other.committed_len)
        judge.same(f"root after step {k}", one.root, other.root)
        if shown:
            judge.cache(f"cache after step {k}", one.snapshot(), other.snapshot())


def hold_step(
    judge: Judge,
    before: Sequence[Step],
    step: Step,
    expected: Sequence[Answer],
    actual: Sequence[Answer],
) -> None:
    """Two sessions that hold the same tokens give the same answers to a step."""
    committed = committed_by(before)
    pairs = zip(step.answered(), expected, actual, strict=True)
    for i, (behind, wanted, got) in enumerate(pairs):
        what = f"step {len(before)}, answer {i}"
        judge.answer(what, wanted, got, history=[*committed, *behind])


@given(model=small_models(), steps=histories(max_steps=3), again=histories(max_steps=2))
def test_a_reset_session_is_a_new_one(
    engine: Subject, model: SmallModel, steps: Sequence[Step], again: Sequence[Step]
) -> None:
    """MASK-3, SLOT-1: after reset the slots of the past are as good as NaN: the next history
    shows and leaves what it does in a new session; bit for bit where determinism is declared."""
    used, fresh = engine.open(model), engine.open(model)
    for step in steps:
        step.play(used)

    used.reset()

    judge = Judge(engine, model)
    judge.same("L and root after reset", (0, None), (used.committed_len, used.root))
    for k, step in enumerate(again):
        expected, actual = step.play(fresh), step.play(used)
        if engine.deterministic:
            judge.same_answers(f"step {k} after reset", expected, actual)
        else:
            hold_step(judge, again[:k], step, expected, actual)
    judge.repeated_cache("cache", fresh.snapshot(), used.snapshot())
