"""Sampling: a token drawn per node, and the walk of plain sampling with the same uniforms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import Acceptance
from kdtr.property_tests.fewer_verbs import answers, lone, place, place_again, walked
from kdtr.property_tests.judge import Judge, tree_scene
from kdtr.property_tests.near_ties import cumulative
from kdtr.property_tests.strategies import Scene, plants, scenes
from kdtr.property_tests.subject import Answer, Subject
from kdtr.reference import emitted

# Halfway between the thousandths: no uniform is at an end of the distribution.
UNIFORMS = st.integers(0, 999).map(lambda k: (k + 0.5) / 1000)
TEMPERATURES = st.sampled_from([1.0, 0.5, 3.0])


def drawn(engine: Subject, row: Answer, uniform: float, temperature: float) -> int:
    """The first token whose distribution function exceeds the uniform."""
    if row.logits is None:
        pytest.skip(f"{engine.label} does not show logits to draw from")
    cdf = cumulative(row.logits, temperature)
    return min(int(np.searchsorted(cdf, uniform, side="right")), len(cdf) - 1)


@given(scene=scenes(max_nodes=2), data=st.data(), temperature=TEMPERATURES)
def test_sampled_output_is_that_of_plain_sampling(
    engine: Subject, scene: Scene, data: st.DataObject, temperature: float
) -> None:
    """ACC-5, FWD-4, LOSSLESS: with one token drawn per node from its own distribution in place of
    the argmax, a tree emits what plain decoding draws with the uniforms of its path."""
    model = scene.model
    vocab_size = model.config.vocab_size
    plant = data.draw(plants(vocab_size, max_nodes=6), label="plant")
    size = len(plant.parents)
    uniforms = data.draw(st.lists(UNIFORMS, min_size=size, max_size=size), label="uniforms")
    placed = place(engine, model, scene.prompt, scene.tree)
    root = placed.tree.tokens[0]
    plain = place_again(engine, model, placed)
    ahead = [root]
    for node in plant.path:
        row = answers(plain, lone(ahead[-1]))[0]
        ahead.append(drawn(engine, row, uniforms[node], temperature))
        plain.commit(Acceptance((0,), ahead[-1]))

    tree = plant.tree(ahead, vocab_size)
    rows = answers(placed.session, tree)
    targets = [
        drawn(engine, row, uniform, temperature)
        for row, uniform in zip(rows, uniforms, strict=True)
    ]
    acceptance = walked(placed.session, tree, targets)
    placed.session.commit(acceptance)

    judge = Judge(engine, model, tree_scene(tree, *plant.path))
    for k, node in enumerate(plant.path):
        judge.draw(
            f"draw of node {node}",
            ahead[k + 1],
            targets[node],
            uniform=uniforms[node],
            temperature=temperature,
            history=[*placed.prompt, *ahead[: k + 1]],
        )
    judge.same("path", Acceptance(plant.path, ahead[-1]), acceptance)
    judge.same("emitted", tuple(ahead[1:]), emitted(tree, acceptance))
    judge.same("root", ahead[-1], placed.session.root)
    judge.same("L", len(placed.prompt) + len(plant.path), placed.session.committed_len)
