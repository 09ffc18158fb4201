"""The bound of a row: from precision, depth, length of the sums and the scale of the row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.tolerance import SAFETY, UNIT_ROUNDOFF, relative_bound, row_bound
from kdtr.contract import STAGE, ModelConfig, NumericProfile, Stage, stage_order

CONFIG = ModelConfig.tiny()
FLOAT32 = NumericProfile()
NUMERIC = [(s, i) for s, i in stage_order(CONFIG.num_hidden_layers) if not s.exact]


@pytest.mark.parametrize("name", UNIT_ROUNDOFF)
def test_the_unit_roundoff_is_half_the_distance_from_1_to_the_next_number(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))

    assert UNIT_ROUNDOFF[name] == float(ml_dtypes.finfo(dtype).eps) / 2


def test_the_formula_is_the_documented_one() -> None:
    """Layer 2's scores lie 2 * 15 + 6 sums deep; the longest sum is the dense MLP's, 320."""
    u = 2.0**-24

    relative = relative_bound(STAGE["scores"], 2, CONFIG, FLOAT32)

    assert relative == pytest.approx(SAFETY * (u * 36**0.5 + u * 320**0.5 * 36), rel=1e-12)


def test_storage_and_summation_count_apart() -> None:
    coarse = NumericProfile(latents="bfloat16")

    relative = relative_bound(STAGE["embedding"], None, CONFIG, coarse)

    assert relative == pytest.approx(SAFETY * (2.0**-8 + 2.0**-24 * 320**0.5), rel=1e-12)


@pytest.mark.parametrize(("stage", "layer"), NUMERIC, ids=lambda x: getattr(x, "name", x))
def test_every_numeric_stage_of_every_layer_has_a_bound(stage: Stage, layer: int | None) -> None:
    """Float32 far below the size of a wrong index, which is the row's own."""
    relative = relative_bound(stage, layer, CONFIG, FLOAT32)

    assert 0 < relative < 2.0**-10


def test_bounds_grow_along_the_computation() -> None:
    layered = [relative_bound(s, i, CONFIG, FLOAT32) for s, i in NUMERIC if s.name == "hidden"]
    last = relative_bound(STAGE["logits"], None, CONFIG, FLOAT32)

    assert layered == sorted(layered)
    assert layered[-1] < last


@pytest.mark.parametrize("field", ["weights", "activations", "latents", "scores", "logits"])
def test_the_coarsest_storage_decides(field: str) -> None:
    coarse = NumericProfile(**{field: "bfloat16"})

    wide = relative_bound(STAGE["c_kv"], 0, CONFIG, coarse)

    assert wide > 100 * relative_bound(STAGE["c_kv"], 0, CONFIG, FLOAT32)


def test_float64_is_held_to_float64() -> None:
    names = ("weights", "activations", "latents", "scores", "logits", "accumulation")
    profile = NumericProfile(**dict.fromkeys(names, "float64"))

    assert relative_bound(STAGE["logits"], None, CONFIG, profile) < 2.0**-38


def test_a_row_is_judged_by_its_own_largest_magnitude() -> None:
    expected = np.array([[1.0, -100.0], [1.0, 2.0], [50.0, 80.0]])
    rms = float(np.sqrt(np.mean(expected**2)))

    bound = row_bound(STAGE["embedding"], None, expected, CONFIG, FLOAT32)

    relative = relative_bound(STAGE["embedding"], None, CONFIG, FLOAT32)
    assert (3, 1) == bound.shape
    np.testing.assert_allclose(bound[:, 0], relative * np.array([100, rms, 80]), rtol=1e-12)


def test_cache_rows_have_a_layer_and_a_slot() -> None:
    expected = np.ones((4, 3, 2))
    expected[1, 2] = 100

    bound = row_bound(STAGE["cache_c_kv"], None, expected, CONFIG, FLOAT32)

    assert (4, 3, 1) == bound.shape
    assert (1, 2) == np.unravel_index(int(bound[..., 0].argmax()), (4, 3))


def test_scores_share_a_bound_over_heads_and_slots_and_inf_has_no_size() -> None:
    expected = np.array([[[1.0, -np.inf], [3.0, -np.inf]], [[2.0, 1.0], [1.0, 1.0]]])

    bound = row_bound(STAGE["scores"], 0, expected, CONFIG, FLOAT32)

    assert (2, 1, 1) == bound.shape
    assert np.isfinite(bound).all()
    assert bound[0, 0, 0] == pytest.approx(3 * relative_bound(STAGE["scores"], 0, CONFIG, FLOAT32))


def test_rows_of_zeros_have_the_bound_0() -> None:
    bound = row_bound(STAGE["embedding"], None, np.zeros((2, 3)), CONFIG, FLOAT32)

    assert [0, 0] == bound[:, 0].tolist()
