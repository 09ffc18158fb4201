"""Poison: one token whose rows are not finite shows who reads what he does not see.

Two kinds. An embedding of NaN: many engines refuse such weights. And finite weights that overflow
for that token alone (`SmallModel.overflow`): in float32 its latents are infinite and its row NaN;
where numbers reach further they are astronomical, and no finite mask outweighs them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kdtr.contract import Acceptance, KdtrError
from kdtr.property_tests.fewer_verbs import Placed, answers, place, rooted
from kdtr.property_tests.judge import Judge, tree_scene
from kdtr.property_tests.strategies import (
    Scene,
    SmallModel,
    draft_trees,
    nodes_of,
    scenes,
    tokens,
)
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.trees import path_to, path_tokens, under_root
from kdtr.property_tests.watched import WatchedSession

# The largest power of two that the weights hold: a fourth of infinity, so that 4 times it is it.
_LARGEST = {"float16": 2.0**15}


def clean_and_poisoned(
    engine: Subject, model: SmallModel, token: int, *, overflow: bool
) -> tuple[SmallModel, SmallModel]:
    """Two models that differ in what they make of one token."""
    if overflow:
        largest = _LARGEST.get(engine.engine.info.profile.weights, 2.0**127)
        model = replace(model, overflow=largest)
    poisoned = replace(model, poisoned=token)
    try:
        engine.load(poisoned)
    except KdtrError as error:
        pytest.skip(f"{engine.label} refuses such weights: {error}")
    return model, poisoned


def hold_poison_back(engine: Subject, scene: Scene, poison: int, *, overflow: bool) -> None:
    """Rows whose path has the poison are lost, all others are those of the clean model."""
    with np.errstate(all="ignore"):
        clean, poisoned = clean_and_poisoned(engine, scene.model, poison, overflow=overflow)
        prompt = sound_prompt(engine, scene, poison)
        placed = place(engine, clean, prompt, scene.tree)
        assume(not overflow or poison not in placed.history(0))
        expected = answers(placed.session, placed.tree)
        session = same_place(engine, poisoned, clean, placed)
        actual = answers(session, placed.tree)

    for i, row in enumerate(actual):
        history = placed.history(i)
        judge = Judge(engine, clean, tree_scene(placed.tree, i))
        if poison not in history:
            judge.answer(f"row {i}, token {poison} poisoned", expected[i], row, history=history)
        elif row.logits is not None and not overflow:
            judge.same(f"row {i} is NaN, as its path is", True, bool(np.isnan(row.logits).all()))


def sound_prompt(engine: Subject, scene: Scene, poison: int) -> list[int]:
    """The prompt without the poison; not empty where a root comes from prefill alone."""
    prompt = [token for token in scene.prompt if token != poison]
    if not prompt and not engine.offers("set_root"):
        prompt = [(poison + 1) % scene.model.config.vocab_size]
    return prompt


def same_place(
    engine: Subject, model: SmallModel, other: SmallModel, placed: Placed
) -> WatchedSession:
    """A session of this model where the other one's was placed."""
    again = place(engine, model, placed.prompt, placed.tree)
    root = placed.tree.tokens[0]
    judge = Judge(engine, other)
    judge.target("root", root, again.tree.tokens[0], history=placed.prompt)
    return again.session


def poison_of(scene: Scene) -> st.SearchStrategy[int]:
    """A drafted token, or any: then nothing but padding can have it."""
    drafted = scene.tree.tokens[1:] or (0,)
    return st.one_of(st.sampled_from(drafted), tokens(scene.model.config.vocab_size))


def below_the_root(scene: Scene) -> st.SearchStrategy[int]:
    """Such a token other than the root's: a poisoned root leaves no row to compare."""
    return poison_of(scene).filter(lambda token: token != scene.tree.tokens[0])


@given(scene=scenes(max_nodes=7), data=st.data())
def test_an_overflow_stays_on_its_path(engine: Subject, scene: Scene, data: st.DataObject) -> None:
    """MASK-3, MASK-2, PAD-1, MOE-4: a node whose latents overflow changes no row that does not see
    it, neither in attention nor in the experts that they share; nor does padding of any token."""
    poison = data.draw(below_the_root(scene), label="poison")

    hold_poison_back(engine, scene, poison, overflow=True)


@given(scene=scenes(max_nodes=7), data=st.data())
def test_a_nan_stays_on_its_path(engine: Subject, scene: Scene, data: st.DataObject) -> None:
    """MASK-3, MASK-2, PAD-1, MOE-4, FWD-4: where the embedding of a token is NaN, every row that
    sees it is NaN, and no other row is another one."""
    poison = data.draw(poison_of(scene), label="poison")

    hold_poison_back(engine, scene, poison, overflow=False)


def leave_poison_behind(
    engine: Subject, scene: Scene, data: st.DataObject, *, overflow: bool
) -> None:
    """Verify, abandon, verify, commit past the poison, verify: as if it had never been there."""
    poison = data.draw(below_the_root(scene), label="poison")
    abandoned = data.draw(draft_trees(max_nodes=6), label="abandoned")
    after = data.draw(draft_trees(max_nodes=4), label="next tree")
    with np.errstate(all="ignore"):
        clean, poisoned = clean_and_poisoned(engine, scene.model, poison, overflow=overflow)
        prompt = sound_prompt(engine, scene, poison)
        placed = place(engine, clean, prompt, scene.tree)
        tree = placed.tree
        sound = [i for i in range(len(tree)) if poison not in placed.history(i)]
        assume(sound)  # the root is no poison, also where prefill chose it
        last = data.draw(nodes_of(tree).filter(sound.__contains__), label="last accepted node")
        after = under_root(after, (poison + 1) % clean.config.vocab_size)
        acceptance = Acceptance(path_to(tree, last), after.tokens[0])
        session = same_place(engine, poisoned, clean, placed)

        session.verify(rooted(session, abandoned))
        rooted(session, tree)
        for one in (placed.session, session):
            one.verify(tree)
            one.commit(acceptance)
        expected, actual = answers(placed.session, after), answers(session, after)

    committed = [*placed.prompt, *path_tokens(tree, last)]
    for i in range(len(after)):
        history = [*committed, *path_tokens(after, i)]
        judge = Judge(engine, clean, tree_scene(after, i))
        if poison not in history:
            judge.answer(f"row {i} after the poison", expected[i], actual[i], history=history)
    if engine.offers("snapshot"):
        judge = Judge(engine, clean, tree_scene(tree, *acceptance.path))
        judge.cache("cache", placed.session.snapshot(), session.snapshot())


@given(scene=scenes(max_nodes=6), data=st.data())
def test_a_rejected_overflow_is_never_seen_again(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """COMMIT-4, MASK-3, SLOT-1: rows that overflowed, of a rejected node or of an abandoned verify,
    are read by no later row, though their slots are used again or lie before it."""
    leave_poison_behind(engine, scene, data, overflow=True)


@given(scene=scenes(max_nodes=6), data=st.data())
def test_a_rejected_nan_is_never_seen_again(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """COMMIT-4, MASK-3, SLOT-1: the same with an embedding of NaN."""
    leave_poison_behind(engine, scene, data, overflow=False)
