"""Numbers: what the model's equations give, what positions do, and the same bits again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import Acceptance, LogicalCache
from kdtr.property_tests.fewer_verbs import (
    Placed,
    answers,
    lone,
    place,
    place_again,
    plain_answer,
    played,
)
from kdtr.property_tests.judge import Judge, different_bits, tree_scene
from kdtr.property_tests.strategies import (
    Scene,
    SmallModel,
    draft_logits,
    nodes_of,
    prompts,
    scenes,
    small_models,
)
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.trees import chain, path_to, path_tokens
from kdtr.reference import make_engine


@given(scene=scenes(max_nodes=4))
def test_rows_are_those_of_the_model(engine: Subject, scene: Scene) -> None:
    """MLA-1 to MLA-7, NORM-1, MOE-1 to MOE-4, NUM-1 to NUM-3: the last row of a tree is the truth's
    in float64, within the bound of the engine's precision."""
    placed = place(engine, scene.model, scene.prompt, scene.tree)
    last = len(placed.tree) - 1

    row = answers(placed.session, placed.tree)[last]

    judge = Judge(engine, scene.model, tree_scene(placed.tree, last))
    truth = Subject("truth", make_engine())
    history = placed.history(last)
    expected = plain_answer(truth, engine.as_declared(scene.model), (), history)
    assert expected.logits is not None
    if row.logits is not None:
        what, logits = f"row {last}", row.logits[None]
        judge.numbers(
            what,
            "logits",
            expected.logits[None],
            logits,
            histories=[history],
            to_rounding=True,
            bounds=1,
        )
    judge.target(f"row {last}", expected.target, row.target, history=history)


def at(
    engine: Subject, model: SmallModel, prompt: Sequence[int], rows: Sequence[int], shift: int
) -> tuple[np.ndarray, LogicalCache | None]:
    """Logits of `rows` behind the prompt, all positions moved on by `shift`; and the cache."""
    session = engine.open(model)
    for n_before, tokens in ((0, prompt), (len(prompt), rows)):
        n = len(tokens)
        positions = shift + n_before + np.arange(n)
        mask = np.tri(n, n_before + n, n_before, dtype=bool)
        logits = np.array(session.forward_tokens(tokens, positions, mask))
        session.commit(Acceptance(tuple(range(n)), 0))
    return logits, session.snapshot() if engine.offers("snapshot") else None


@given(model=small_models(), data=st.data(), shift=st.integers(0, 40))
def test_attention_sees_differences_of_positions_alone(
    engine: Subject, model: SmallModel, data: st.DataObject, shift: int
) -> None:
    """POS-1, MLA-7, MLA-6: all positions moved on by the same number give the same rows to
    rounding, also under YaRN; and other rotated keys, or positions would not matter."""
    vocab_size = model.config.vocab_size
    prompt = data.draw(prompts(vocab_size, min_size=1, max_size=5), label="prompt")
    rows = data.draw(prompts(vocab_size, min_size=1, max_size=4), label="rows")

    expected, before = at(engine, model, prompt, rows, 0)
    actual, after = at(engine, model, prompt, rows, shift)

    judge = Judge(engine, model)
    histories = [[*prompt, *rows[: i + 1]] for i in range(len(rows))]
    judge.numbers(
        f"positions moved by {shift}",
        "logits",
        expected,
        actual,
        histories=histories,
        to_rounding=True,
    )
    if before is None or after is None:
        return
    positions = list(range(shift, shift + len(prompt) + len(rows)))
    judge.same("positions", positions, after.positions.tolist())
    judge.numbers(
        f"positions moved by {shift}",
        "cache_c_kv",
        before.c_kv,
        after.c_kv,
        histories=histories[-1:],
        to_rounding=True,
    )
    equal = different_bits(before.k_pe, after.k_pe) is None
    judge.same(f"k_pe is the same, moved by {shift}", shift == 0, equal)


@given(scene=scenes(max_nodes=5), data=st.data())
def test_the_same_calls_give_the_same_bits(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """NUM-4: in two sessions of an engine that declares determinism prefill, build, verify, commit,
    round and decode give the same bits, one after the other."""
    if not engine.deterministic:
        pytest.skip(f"{engine.label} does not declare determinism")
    model = scene.model
    drafts = data.draw(draft_logits(model.config.vocab_size, max_depth=2), label="draft logits")
    last = data.draw(nodes_of(scene.tree), label="last accepted node")
    placed = place(engine, model, scene.prompt, scene.tree)
    again = Placed(place_again(engine, model, placed), placed.prompt, placed.tree)

    one, other = (same_calls(each, drafts, last) for each in (placed, again))

    judge = Judge(engine, model, tree_scene(placed.tree, last))
    for (what, expected), (_, actual) in zip(one, other, strict=True):
        if isinstance(expected, list):
            judge.same_answers(what, expected, actual)
        else:
            judge.same(what, expected, actual)
    if engine.offers("snapshot"):
        judge.same_cache("cache", placed.session.snapshot(), again.session.snapshot())


def same_calls(placed: Placed, drafts: np.ndarray, last: int) -> list[tuple[str, Any]]:
    """What each of the verbs gives, of those that there are."""
    session, tree = placed.session, placed.tree
    shown: list[tuple[str, Any]] = []
    if session.offers("build"):
        shown.append(("build", session.build(drafts, 4)))
    shown.append(("verify", answers(session, tree)))
    session.commit(Acceptance(path_to(tree, last), tree.tokens[0]))
    shown.append(("round", played(session, tree)))
    assert session.root is not None
    if session.offers("decode"):
        shown.append(("decode", session.decode()))
    shown.append(("prefill", session.prefill(tree.tokens)))
    shown.append(("verify behind them", answers(session, lone(session.root))))
    return shown


@given(scene=scenes(max_nodes=6), data=st.data())
def test_a_row_alone_has_the_same_bits(engine: Subject, scene: Scene, data: st.DataObject) -> None:
    """NUM-4: where batch invariance is declared, a row of a tree has the bits that it has when its
    path is verified alone."""
    if not engine.exact:
        pytest.skip(f"{engine.label} does not declare batch invariance")
    model = scene.model
    placed = place(engine, model, scene.prompt, scene.tree)
    node = data.draw(nodes_of(placed.tree), label="node")
    alone = place_again(engine, model, placed)
    row = answers(placed.session, placed.tree)[node]

    path = answers(alone, chain(path_tokens(placed.tree, node)))

    judge = Judge(engine, model, tree_scene(placed.tree, node))
    judge.same_answers(f"row {node} alone", path[-1:], [row])
