"""What the table of rounds says where trees and decoding differ (benchmarks/kernels/rounds.py)."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import ModelConfig
from kdtr.engine import make_engine

KERNELS = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
N = 24  # tokens


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


@pytest.mark.parametrize("at", [0, 1, N - 1])
@pytest.mark.parametrize("whose", ["trees", "decoding"])
def test_a_wrong_token_is_no_near_tie(table: Any, model: Any, at: int, whose: str) -> None:
    plain, _ = table._decoded(model, N)
    wrong = [*plain[:at], (plain[at] + 1) % 512, *plain[at + 1 :]]
    decoded, by_trees = (wrong, plain) if whose == "decoding" else (plain, wrong)

    said, right = table._agreement(model, "float32", decoded, by_trees[:N], (4, 0.8))

    assert not right
    assert said.startswith("other from the prompt's on" if at == 0 else f"other from {at} on, ")


def test_a_generation_that_does_not_repeat_itself(
    table: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, by_trees = table._decoded, table._by_trees
    runs = iter(range(100))

    def unsteady(*arguments: Any) -> Any:
        rounds, seconds = by_trees(*arguments)
        return (rounds[:-1] if next(runs) == 3 else rounds), seconds

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
