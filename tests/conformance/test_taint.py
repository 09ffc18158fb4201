"""What another choice of experts may move: rows, from a layer on, and no latent before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planted_faults import make_engine

from kdtr.conformance import GateResult, Verdict, load_engine
from kdtr.conformance.taint import Taint
from kdtr.contract import STAGE, stage_order

LAYERS = 3
COMMITTED = 2
# The Y tree: 1 and 2 under the root, 3 under 2.
PARENTS = (-1, 0, 0, 2)
MASK = np.array(
    [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ],
    dtype=bool,
)
PATH = np.array([0, 2, 3])
BASE = Path(__file__).resolve().parents[2] / "conformance" / "corpus" / "base.kdtr"


def judged_rows(
    layer: int, row: int, *, given_up: bool = False, path: np.ndarray = PATH
) -> dict[tuple[str, int | None], list[int]]:
    """By stage: the rows that are judged as firm when this row may choose otherwise there."""
    taint = Taint(LAYERS, MASK, path)
    rows = np.arange(4) == row
    found = {}
    for stage, at in stage_order(LAYERS):
        taint.enter(stage, at)
        if stage.axes.startswith("n"):
            shape = (4, *(2 for _ in stage.axes[1:]))
            judged = taint.judged(stage, np.zeros(shape), np.ones(shape), suspects=False)
            taken = np.zeros(4) if judged is None else judged.reshape(4, -1)[:, 0]
            found[stage.name, at] = np.flatnonzero(taken).tolist()
        if (stage.name, at) == ("expert_ids", layer):
            taint.suspect(rows, layer)
            if given_up:
                taint.give_up()
    return found


@pytest.mark.parametrize("given_up", [False, True])
def test_the_row_moves_behind_the_choice_and_who_sees_it_from_the_next_scores_on(
    given_up: bool,
) -> None:
    judged = judged_rows(0, 2, given_up=given_up)

    everything, others, apart = [0, 1, 2, 3], [0, 1, 3], [0, 1]
    assert everything == judged["scores", 0] == judged["expert_ids", 0]
    for name in ("expert_weights", "mlp_out", "hidden"):
        assert others == judged[name, 0]
    # Row 3 reads the moved latent of row 2, but its own query and latent do not know it yet.
    for name in ("q_nope", "q_pe", "c_kv", "k_pe"):
        assert others == judged[name, 1]
    for name in ("scores", "out_latent", "attn_out", "router_scores", "mlp_out", "hidden"):
        assert apart == judged[name, 1]
    for name in ("q_nope", "c_kv", "hidden"):
        assert apart == judged[name, 2]
    assert apart == judged["final_hidden", None] == judged["logits", None]


def test_a_choice_in_the_last_layer_moves_one_row_of_logits() -> None:
    judged = judged_rows(2, 2)

    assert [0, 1, 3] == judged["logits", None]


def after(layer: int, row: int, *, given_up: bool = False) -> Taint:
    taint = Taint(LAYERS, MASK, PATH)
    for stage, at in stage_order(LAYERS):
        taint.enter(stage, at)
        if (stage.name, at) == ("expert_ids", layer):
            taint.suspect(np.arange(4) == row, layer)
    if given_up:
        taint.give_up()
    return taint


def test_the_cache_is_judged_in_the_layers_up_to_the_choice() -> None:
    expected, actual = np.zeros((LAYERS, 5, 2)), np.ones((LAYERS, 5, 2))

    judged = after(0, 2).judged(STAGE["cache_c_kv"], expected, actual, suspects=False)

    assert judged is not None
    # Slots 0, 1 are committed before; 2, 3, 4 are nodes 0, 2, 3; 3 is moved by 2 from layer 2 on.
    assert [[1, 1, 1, 1, 1], [1, 1, 1, 0, 1], [1, 1, 1, 0, 0]] == judged[..., 0].tolist()


def test_a_choice_in_the_last_layer_reaches_no_cache() -> None:
    taint = after(2, 2, given_up=True)
    expected, actual = np.zeros((LAYERS, 5, 2)), np.ones((LAYERS, 5, 2))

    judged = taint.judged(STAGE["cache_c_kv"], expected, actual, suspects=False)

    assert judged is not None
    assert judged.all()
    assert not taint.commits_moved
    assert taint.decides_moved


@pytest.mark.parametrize(("layer", "since"), [(0, 1), (1, 2), (2, None)])
def test_a_suspect_that_is_committed_is_remembered_by_its_layer(
    layer: int, since: int | None
) -> None:
    assert since == after(layer, 2).commits_suspect_since


def test_a_suspect_off_the_path_is_forgotten() -> None:
    assert after(0, 1).commits_suspect_since is None
    assert not after(0, 1, given_up=True).commits_moved


def test_suspect_latents_of_before_make_suspects_of_all_rows_from_their_layer_on() -> None:
    taint = Taint(LAYERS, MASK, PATH, committed_suspect_since=1)
    firm = {}
    for stage, at in stage_order(LAYERS):
        taint.enter(stage, at)
        if stage.axes == "nm":
            zeros = np.zeros((4, 2))
            firm[stage.name, at] = taint.judged(stage, zeros, zeros + 1, suspects=False) is not None

    assert firm["hidden", 0]
    assert not firm["attn_out", 1]
    assert taint.commits_suspect_since == 1


def test_what_was_seen_to_differ_is_judged_no_more() -> None:
    taint = after(0, 2)
    zeros = np.zeros((4, 2))
    taint.enter(STAGE["logits"], None)
    assert taint.judged(STAGE["logits"], zeros, zeros + 1, suspects=True) is not None

    taint.give_up()

    assert taint.judged(STAGE["logits"], zeros, zeros + 1, suspects=True) is None
    assert taint.commits_moved


# base.kdtr / trees has a thin choice in its last layer, in bfloat16, which an engine without
# stages does not show: whatever it excuses, it must not excuse a broken cache.


@pytest.mark.parametrize(
    "fault", ["no_compaction", "only_c_kv_moves", "last_move_skipped", "rotated_again"]
)
def test_a_thin_choice_in_the_last_layer_hides_no_broken_cache(
    judge: Callable[..., GateResult], fault: str
) -> None:
    gate = judge(unshown(make_engine(fault, dtype="bfloat16")), BASE, "trees")

    assert not gate.passed
    assert {"cache_c_kv", "cache_k_pe"} & {f.stage for f in gate.findings if f.verdict.is_bad}


def test_and_the_honest_engine_passes(judge: Callable[..., GateResult]) -> None:
    gate = judge(unshown(load_engine("host", {"dtype": "bfloat16"})), BASE, "trees")

    assert gate.passed
    assert {Verdict.PASS, Verdict.NEAR_TIE} >= {result.verdict for result in gate.results}


def unshown(engine: Any) -> Any:
    return SimpleNamespace(info=replace(engine.info, stages=frozenset()), load=engine.load)
