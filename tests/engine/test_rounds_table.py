"""What the table of rounds says where trees and decoding differ (benchmarks/kernels/rounds.py)."""

from __future__ import annotations

import importlib
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import DraftTree, ModelConfig
from kdtr.engine import make_engine

KERNELS = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
N = 24  # tokens
PROMPT = [int(token) for token in np.random.default_rng(3).integers(512, size=24)]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(KERNELS)
    return importlib.import_module("rounds_tokens")


@pytest.fixture(scope="module")
def model() -> Any:
    config = ModelConfig.tiny()
    return make_engine().load((config, seed_tensors(config, 7)))


def rows(*changes: tuple[int, float]) -> np.ndarray:
    """[8] logits: token 2 the best, 3.0; a step of bfloat16 there is 1/64."""
    row = np.array([0.5, -1.0, 3.0, 2.0, 2.9375, -2.5, 0.0, 1.0], np.float32)
    for token, logit in changes:
        row[token] = logit
    return row


@pytest.mark.parametrize(
    ("one", "other", "tokens", "said", "near"),
    [
        (rows((4, 3.0)), rows((4, 3.015625)), (2, 4), "a near tie: 0 steps", True),
        (rows((4, 2.953125)), rows((4, 3.015625)), (2, 4), "a near tie: 3 steps", True),
        (
            rows(),
            rows((2, 2.921875)),
            (2, 4),
            "NO near tie: 4 steps between the two, rows 5",
            False,
        ),
        (rows(), rows((3, 3.5)), (2, 3), "NO near tie: 64 steps between the two, rows 96", False),
        (rows((4, 3.0)), rows((4, 3.015625), (0, 0)), (2, 4), "NO near tie: 0 steps", False),
        (rows(), rows(), (4, 2), "a token that is not the best of its row", False),
        (rows(), rows(), (2, 4), "a token that is not the best of its row", False),
        (rows((0, math.nan)), rows(), (2, 4), "a token that is not the best of its row", False),
        (rows((5, -math.inf)), rows((4, 3.5)), (2, 4), "NO near tie: 0 steps", False),
        (np.zeros(8), rows(), (0, 2), "NO near tie: nan steps between the two, rows inf", False),
    ],
)
def test_rounding_moves_two_rows_by_little(
    table: Any, one: np.ndarray, other: np.ndarray, tokens: tuple[int, int], said: str, near: bool
) -> None:
    text, is_near = table.near_tie("bfloat16", one, other, *tokens)

    assert near == is_near
    assert text.startswith(said)


def test_trees_that_give_what_decoding_gives(table: Any, model: Any) -> None:
    lines, right = table.generation(model, "float32", N)

    assert right
    trees = [line for line in lines if line.startswith("| trees")]
    assert 9 == len(trees)
    assert all(line.endswith("| identical |") for line in trees)


def rounds_of(model: Any, other: dict[int, int] | None = None) -> list[tuple[DraftTree, list[int]]]:
    """Lone roots and what each emitted, N in all; `other` tokens for what decoding gives."""
    session = model.open(max_len=200)
    session.prefill(PROMPT)
    rounds = []
    for at in range(N):
        if at in (other or {}):
            session.set_root(other[at])
        rounds.append((DraftTree((session.root,), (-1,)), [session.root]))
        session.decode()
    # The token of a round is the root of the next.
    return [(tree, emitted) for (tree, _), (_, emitted) in pairwise(rounds)]


def beside_decoding(table: Any, model: Any, plain: list[int], rounds: Any, first: int) -> Any:
    beside = table.Beside(model, "float32", plain, first)
    for tree, emitted in rounds:
        beside.add(tree, emitted)
    return beside


@pytest.mark.parametrize("at", [0, 1, N - 1])
@pytest.mark.parametrize("whose", ["trees", "decoding"])
def test_a_wrong_token_is_no_near_tie(table: Any, model: Any, at: int, whose: str) -> None:
    plain, _ = table._decoded(model, N)
    rounds, first, wrong = rounds_of(model), plain[0], (plain[at] + 1) % 512
    if whose == "decoding":
        plain[at] = wrong
    elif at == 0:
        first = wrong
    else:
        rounds[at - 1] = (rounds[at - 1][0], [wrong])

    said, right = beside_decoding(table, model, plain, rounds, first).verdict()

    assert not right
    assert said.startswith("other from the prompt's on" if at == 0 else f"other from {at} on, ")


def test_decoding_follows_the_trees_over_a_near_tie(
    table: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = table._decoded(model, N)
    others = {5: (plain[5] + 1) % 512, 6: 77, 15: 3}
    rounds = rounds_of(model, others)
    asked = []

    def near(dtype: str, one: np.ndarray, other: np.ndarray, *tokens: int) -> tuple[str, bool]:
        asked.append(tokens)
        assert tokens[0] == one.argmax()  # what decoding gives there
        return "a near tie", True

    monkeypatch.setattr(table, "near_tie", near)
    monkeypatch.setattr(table, "_row_by_trees", lambda *_: None)
    beside = beside_decoding(table, model, plain, rounds, plain[0])

    assert ("at 5 a near tie; at 6 a near tie; at 15 a near tie", True) == beside.verdict()
    assert list(others.values()) == [of_trees for _, of_trees in asked]
    assert [plain[0], *(token for _, emitted in rounds for token in emitted)] == beside.plain


def test_the_two_rows_are_of_the_same_tokens(table: Any, model: Any) -> None:
    plain, _ = table._decoded(model, N)
    session, oracle = model.open(max_len=200), table._Oracle(16, 0.8)
    session.prefill(PROMPT)
    trees, n = [], 1
    while n < N - 12:
        trees.append(session.build(oracle.drafts(plain[n : n + 12]), 16))
        n += len(session.round(trees[-1]).emitted)
    assert len(trees) < n - 1  # paths of several tokens

    for at in range(1, n):
        by_trees = table._row_by_trees(model, trees, at)
        by_decoding = table._row_by_decoding(model, plain[:at])
        assert plain[at] == by_trees.argmax()
        assert np.allclose(by_trees, by_decoding, rtol=0, atol=1e-4)


def test_a_generation_that_does_not_repeat_itself(
    table: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, by_trees = table._decoded, table._by_trees
    runs = iter(range(100))

    def unsteady(*arguments: Any) -> Any:
        rounds, *rest = by_trees(*arguments)
        return (rounds[:-1] if next(runs) == 3 else rounds), *rest

    monkeypatch.setattr(table, "_by_trees", unsteady)
    lines, right = table.generation(model, "float32", N)
    assert not right
    trees = [line.split(" | ")[-1] for line in lines if line.startswith("| trees")]
    assert ["identical |", "NOT those of the first run |"] + ["identical |"] * 7 == trees

    monkeypatch.setattr(table, "_by_trees", by_trees)
    monkeypatch.setattr(
        table, "_decoded", lambda *a: (decoded(*a)[0] + [next(runs)], decoded(*a)[1])
    )
    lines, right = table.generation(model, "float32", N)
    assert not right
    assert lines[5].endswith("| NOT those of the first run |")
