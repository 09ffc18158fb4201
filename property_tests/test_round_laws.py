"""Rounds: greedy output is that of plain decoding, whatever is drafted, and no token is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from kdtr.contract import Acceptance, Array, DraftTree, EmitLimit
from kdtr.property_tests.fewer_verbs import Placed, decoded, lone, place, place_again, played
from kdtr.property_tests.judge import Judge, tree_scene
from kdtr.property_tests.strategies import (
    Plant,
    Scene,
    SmallModel,
    draft_trees,
    emit_limits,
    plants,
    prompts,
    scenes,
    small_models,
    tokens,
)
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.trees import children, path_tokens, under_root
from kdtr.reference import emitted as emitted_by


def continued(engine: Subject, model: SmallModel, placed: Placed, n: int) -> list[int]:
    """The root and the n tokens that follow it by plain decoding."""
    session = place_again(engine, model, placed)
    return [placed.tree.tokens[0], *decoded(session, n)]


def places(plant: Plant) -> str:
    """Which siblings the planted path takes, for Hypothesis' statistics."""
    if len(plant.path) == 1:
        return "no node accepted"
    shape = DraftTree(tuple(range(len(plant.parents))), plant.parents)
    found = set()
    for parent, node in zip(plant.path, plant.path[1:], strict=False):
        siblings = children(shape, parent)
        ends = {siblings[0]: "first", siblings[-1]: "last"}
        found.add("only" if len(siblings) == 1 else ends.get(node, "middle"))
    everything = ", all nodes" if len(plant.path) == len(plant.parents) else ""
    return f"accepted: {', '.join(sorted(found))}{everything}"


@given(model=small_models(), data=st.data())
def test_greedy_output_does_not_depend_on_what_is_drafted(
    engine: Subject, model: SmallModel, data: st.DataObject
) -> None:
    """LOSSLESS, ACC-1 to ACC-3, COMMIT-1 to COMMIT-4: rounds over trees of any shape, size and
    order emit what plain decoding emits. Each tree has its accepted path planted, at any sibling,
    none, or all: with the tokens of plain decoding on it, exactly that path is accepted."""
    vocab_size = model.config.vocab_size
    prompt = data.draw(prompts(vocab_size), label="prompt")
    root = data.draw(tokens(vocab_size), label="root")
    rounds = data.draw(
        st.lists(plants(vocab_size, max_nodes=7), min_size=1, max_size=3), label="rounds"
    )
    placed = place(engine, model, prompt, lone(root))
    session = placed.session
    ahead = continued(engine, model, placed, sum(len(plant.path) for plant in rounds))

    done = 0  # tokens emitted so far; ahead[done] is the root
    for plant in rounds:
        event(places(plant))
        tree = plant.tree(ahead[done:], vocab_size)
        acceptance, emitted = played(session, tree)

        judge = Judge(engine, model, tree_scene(tree, *plant.path))
        expected = ahead[done + 1 : done + 1 + len(plant.path)]
        before = [*placed.prompt, *ahead[: done + 1]]
        judge.continuation("emitted", before, expected, emitted)
        judge.same("path", Acceptance(plant.path, expected[-1]), acceptance)
        done += len(plant.path)
        judge.same("root", ahead[done], session.root)
        judge.same("L", len(placed.prompt) + done, session.committed_len)
    if engine.offers("snapshot"):
        held = [*placed.prompt, *ahead[:done]]
        Judge(engine, model).same("cached tokens", held, session.snapshot().tokens.tolist())


@given(model=small_models(), data=st.data())
def test_greedy_output_does_not_depend_on_drafter_and_budget(
    engine: Subject, model: SmallModel, data: st.DataObject
) -> None:
    """LOSSLESS, TREE-3: rounds over best-first trees, from drafts that favour the right token or
    another one, and with any budget, emit what plain decoding emits."""
    vocab_size = model.config.vocab_size
    prompt = data.draw(prompts(vocab_size), label="prompt")
    root = data.draw(tokens(vocab_size), label="root")
    plans = st.tuples(st.integers(0, 8), st.lists(st.integers(0, 3), max_size=3))
    rounds = data.draw(st.lists(plans, max_size=3), label="rounds (budget, rank of the truth)")
    placed = place(engine, model, prompt, lone(root))
    session = placed.session
    ahead = continued(engine, model, placed, 4 * len(rounds))

    emitted: list[int] = []
    for budget, ranks in rounds:
        draft = np.zeros((len(ranks), vocab_size))
        for depth, rank in enumerate(ranks):
            draft[depth, :3] += [3.0, 2.0, 1.0]
            draft[depth, ahead[len(emitted) + depth + 1]] += 4.0 - 1.5 * rank
        tree = session.build(draft, budget)
        acceptance, told = played(session, tree)
        emitted += told

        judge = Judge(engine, model, tree_scene(tree, *acceptance.path))
        before = [*placed.prompt, ahead[0]]
        judge.continuation("emitted", before, ahead[1 : 1 + len(emitted)], emitted)
        event(f"accept_len {acceptance.accept_len}")


@given(model=small_models(), data=st.data())
def test_no_token_is_lost_or_told_twice(
    engine: Subject, model: SmallModel, data: st.DataObject
) -> None:
    """ACC-3, ACC-4, FWD-1: after every round, also one cut by a stop token or the length limit,
    prompt + emitted tokens, the root of prefill included, = committed tokens + root."""
    vocab_size = model.config.vocab_size
    prompt = data.draw(prompts(vocab_size, min_size=1), label="prompt")
    rounds = data.draw(
        st.lists(
            st.tuples(draft_trees(vocab_size, max_nodes=5), emit_limits(vocab_size)), max_size=4
        ),
        label="rounds",
    )
    session = engine.open(model)
    emitted = [session.prefill(prompt)]

    for drafted, limit in rounds:
        root, committed_len = session.root, session.committed_len
        assert root is not None
        tree = under_root(drafted, root)
        acceptance, told = played(session, tree, limit)
        emitted += told

        judge = Judge(engine, model, tree_scene(tree, *acceptance.path))
        accept_len = acceptance.accept_len
        judge.same("emitted in the round", accept_len, len(told))
        judge.same("L", committed_len + accept_len, session.committed_len)
        judge.same("bonus", acceptance.bonus, session.root)
        judge.same("tokens", len(prompt) + len(emitted), session.committed_len + 1)
        if engine.offers("snapshot"):
            committed = session.snapshot().tokens.tolist()
            judge.same("committed + root", [*prompt, *emitted], [*committed, session.root])
        stopped = [token in limit.stop_tokens for token in told]
        judge.same("a stop token before the end", False, any(stopped[:-1]))
        allowed = limit.max_emitted or accept_len
        judge.same("within the length limit", True, accept_len <= allowed)


@given(scene=scenes(), limit=emit_limits(), data=st.data())
def test_a_fused_round_is_its_steps(
    engine: Subject, scene: Scene, limit: EmitLimit, data: st.DataObject
) -> None:
    """COMMIT-1, COMMIT-2, ACC-3: round shows and leaves what verify, accept and commit do, and its
    moves are those of its path."""
    model = scene.model
    plant = data.draw(plants(model.config.vocab_size, max_nodes=6), label="plant")
    placed = place(engine, model, scene.prompt, scene.tree)
    fused, stepwise = placed.session, place_again(engine, model, placed)
    ahead = continued(engine, model, placed, len(plant.path))
    tree = plant.tree(ahead, model.config.vocab_size)
    traced: dict[str, list[Any]] = {}

    def trace(stage: str, layer: int | None, array: Array, /) -> None:
        if stage in ("moves", "targets"):
            traced[stage] = np.array(array).tolist()

    shows = {"trace": trace} if engine.engine.info.stages else {}
    outcome = fused.round(tree, limit=limit, **shows)
    answer = stepwise.verify(tree)
    acceptance = stepwise.accept(tree, limit=limit)
    stepwise.commit(acceptance)

    judge = Judge(engine, model, tree_scene(tree, *acceptance.path))
    judge.continuation("emitted", placed.history(0), emitted_by(tree, acceptance), outcome.emitted)
    judge.same("acceptance", acceptance, outcome.acceptance)
    judge.same("root", acceptance.bonus, fused.root)
    judge.same("L", stepwise.committed_len, fused.committed_len)
    if engine.offers("snapshot"):
        judge.cache("cache", stepwise.snapshot(), fused.snapshot())
    committed_len = len(placed.prompt)
    moves = [[committed_len + node, committed_len + k] for k, node in enumerate(acceptance.path)]
    if "moves" in traced:
        judge.same("moves", moves, traced["moves"])
    for i, got in enumerate(traced.get("targets", [])):
        history = [*placed.prompt, *path_tokens(tree, i)]
        judge.target(f"target {i}", answer.targets[i], got, history=history)
