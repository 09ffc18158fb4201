"""Where what was shown does not fit, and how much a row lacks, in bounds."""

from __future__ import annotations

import numpy as np
import pytest

from kdtr.conformance.alternatives_fit import Misfit, ShownPoint
from kdtr.conformance.bundle import Expectation
from kdtr.conformance.drive import MODE
from kdtr.conformance.noise_floor import PointNoise
from kdtr.contract import STAGE, ModelConfig, NumericProfile, stage_order

CONFIG = ModelConfig.tiny()
W = CONFIG.vocab_size
ORDER = [(stage.name, layer) for stage, layer in stage_order(CONFIG.num_hidden_layers)]
NOISE = PointNoise(NumericProfile(), {("logits", None): np.full(3, 2e-6)})


def logits(*tops: int) -> np.ndarray:
    rows = np.zeros((len(tops), W))
    rows[np.arange(len(tops)), list(tops)] = 8
    return rows


TRUTH = {"logits": logits(1, 2, 3), "targets": np.array([1, 2, 3])}
BOUND = float(NOISE.bound(STAGE["logits"], None, TRUTH["logits"])[0, 0])


def shown(mode: str = "stepwise", **arrays: np.ndarray) -> ShownPoint:
    named = {(name, None): array for name, array in arrays.items()}
    return ShownPoint("round0", named, NOISE, MODE[mode], CONFIG, NumericProfile())


def misfit(one: ShownPoint, truth: dict[str, np.ndarray] = TRUTH) -> Misfit | None:
    return one.misfit(Expectation(truth, "", {}))


def off(row: int, by: float) -> np.ndarray:
    moved = TRUTH["logits"].copy()
    moved[row, 5] += by * BOUND
    return moved


def test_within_bounds_it_fits() -> None:
    assert misfit(shown(logits=off(1, 0.9), targets=TRUTH["targets"])) is None


def test_the_first_row_out_of_bounds_is_the_misfit_and_the_worst_is_told() -> None:
    moved = off(1, 2)
    moved[2, 7] += 9 * BOUND

    found = misfit(shown(logits=moved, targets=np.array([1, 2, 9])))

    assert found is not None
    assert ("logits", None, (1,)) == (found.stage.name, found.layer, found.index)
    assert ORDER.index(("logits", None)) == found.order
    assert pytest.approx(9) == found.worst


def test_a_token_that_is_no_near_tie_is_a_misfit_without_a_measure() -> None:
    found = misfit(shown(targets=np.array([1, 9, 3])))

    assert found is not None
    assert ("targets", (1,), np.inf) == (found.stage.name, found.index, found.worst)


def test_a_near_tie_of_tokens_fits() -> None:
    near = {**TRUTH, "logits": TRUTH["logits"].copy()}
    near["logits"][1, 9] = 8 - BOUND

    assert misfit(shown(targets=np.array([1, 9, 3])), near) is None


def test_another_shape_is_a_misfit() -> None:
    found = misfit(shown(logits=TRUTH["logits"][:2]))

    assert found is not None
    assert () == found.index


def test_stages_that_a_mode_hides_are_not_looked_at() -> None:
    assert misfit(shown("shipped", logits=off(0, 9))) is None


def lack(one: ShownPoint, truth: dict[str, np.ndarray] = TRUTH) -> np.ndarray:
    expectation = Expectation(truth, "", {})
    found = one.misfit(expectation)
    assert found is not None
    return one.lack(found, expectation)


def test_a_row_lacks_its_errors_in_bounds() -> None:
    lacking = lack(shown(logits=off(1, -3)))

    assert (W,) == lacking.shape
    assert pytest.approx(3) == lacking[5]
    assert 3 == np.abs(lacking).argmax() + 3 - 5
    assert np.isposinf(lack(shown(logits=off(1, np.inf)))[5])


def test_a_token_lacks_what_tops_it() -> None:
    """In sums of two bounds."""
    lacking = lack(shown(targets=np.array([1, 9, 3])))

    assert pytest.approx(8 / (2 * BOUND)) == lacking[2]
    assert 1 == np.count_nonzero(lacking)
    assert np.isposinf(lack(shown(targets=np.array([1, W, 3]))))
    in_prompt = shown(root=np.array(9))
    assert pytest.approx(8 / (2 * BOUND)) == lack(in_prompt, {**TRUTH, "root": np.array(3)})[3]


WALK = {
    **TRUTH,
    "tokens": np.array([7, 1, 2]),
    "parents": np.array([-1, 0, 1]),
    "path": np.array([0, 1, 2]),
    "bonus": np.array(3),
    "root": np.array(3),
}


def test_a_walk_lacks_what_the_token_lacks_where_it_parts() -> None:
    """After row 0 it took token 9 for node 1, of token 1."""
    lacking = lack(shown("round", path=np.array([0]), bonus=np.array(9)), WALK)

    assert pytest.approx(8 / (2 * BOUND)) == lacking[1]
    assert pytest.approx(8 / (2 * BOUND)) == lack(shown("round", bonus=np.array(9)), WALK)[3]


def test_what_hangs_on_no_token_lacks_everything() -> None:
    """A walk beside the engine's own targets, or one that is none; a length."""
    beside = {"targets": TRUTH["targets"], "path": np.array([0]), "bonus": np.array(9)}

    assert np.isposinf(lack(shown("round", **beside), WALK))
    assert np.isposinf(lack(shown("round", path=np.array([0, 2]), bonus=np.array(3)), WALK))
    assert np.isposinf(lack(shown("round", root=np.array(9)), WALK))
    length = {"committed_len": np.array(4)}
    assert np.isposinf(lack(shown(committed_len=np.array(5)), {**TRUTH, **length}))
