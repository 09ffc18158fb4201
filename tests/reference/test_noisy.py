"""Honest engines of a declared precision: what each stores, and that they are honest."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from kdtr.contract import Array, ModelConfig, NumericProfile
from kdtr.reference import make_engine
from kdtr.reference.cache import AppendCache
from kdtr.reference.engine import ReferenceModel
from kdtr.reference.noisy import NoisyArithmetic

CONFIG = ModelConfig.tiny().replace(
    vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16
)
BFLOAT16 = NumericProfile(
    weights="bfloat16", activations="bfloat16", latents="bfloat16", logits="bfloat16"
)
TOKENS = (3, 1, 4, 1, 5)
SEEDS = range(6)
Key = tuple[str, int | None]


class Shown(dict[Key, np.ndarray]):
    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None:
        self[stage, layer] = np.array(array)


def weights() -> dict[str, np.ndarray]:
    from kdtr.contract import tensor_shapes

    random = np.random.default_rng(5)
    return {
        name: (1 if "norm" in name else 0)
        + (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in tensor_shapes(CONFIG).items()
    }


WEIGHTS = weights()


def truth() -> Shown:
    shown = Shown()
    make_engine().load((CONFIG, WEIGHTS)).open(max_len=8).prefill(TOKENS, trace=shown)
    return shown


TRUTH = truth()


def run(profile: NumericProfile, seed: int) -> Shown:
    """The member's forward over TOKENS, with the truth's experts."""
    arithmetic = NoisyArithmetic(profile, seed)
    read = make_engine(arithmetic="fast").load((CONFIG, WEIGHTS)).weights
    rounded = arithmetic.rounded_weights(read)
    model = ReferenceModel(arithmetic, AppendCache, CONFIG, rounded)
    ids = {at: a for (stage, at), a in TRUTH.items() if stage == "expert_ids" and at is not None}
    arithmetic.follow(CONFIG, np.arange(len(TOKENS)), ids)
    shown = Shown()
    model.open(max_len=8).prefill(TOKENS, trace=shown)
    return shown


def error(shown: Shown, stage: str = "logits") -> float:
    expected = TRUTH[stage, None]
    return float(np.abs(shown[stage, None] - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("profile", "least", "most"),
    [
        (NumericProfile(), 2.0**-26, 2.0**-18),
        (BFLOAT16, 2.0**-10, 2.0**-3),
        (NumericProfile(*(["float64"] * 6)), 0.0, 1e-12),
    ],
    ids=["float32", "bfloat16", "float64"],
)
def test_every_member_is_off_by_rounding_of_its_profile(
    profile: NumericProfile, least: float, most: float
) -> None:
    for seed in SEEDS:
        assert least <= error(run(profile, seed)) <= most


def test_members_differ_and_each_repeats_itself() -> None:
    logits = [run(BFLOAT16, seed)["logits", None] for seed in SEEDS]

    for one, other in itertools.combinations(logits, 2):
        assert not np.array_equal(one, other)
    assert np.array_equal(logits[5], run(BFLOAT16, 5)["logits", None])


def test_each_place_is_taken_by_half_of_six_and_no_two_are_alike() -> None:
    members = [NoisyArithmetic(NumericProfile(), seed) for seed in SEEDS]
    names = ("fused_absorb", "narrow_softmax", "wide_residual", "single_angles")
    places = [tuple(getattr(member, name) for name in names) for member in members]

    assert [3, 3, 3, 3] == np.sum(places, axis=0).tolist()
    assert len(set(places)) == 6


@pytest.mark.parametrize("stage", ["c_kv", "k_pe", "q_nope", "q_pe", "attn_out", "mlp_out"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_stored_is_of_the_stored_dtype(stage: str, seed: int) -> None:
    shown = run(BFLOAT16, seed)[stage, 0].astype(np.float32)

    assert np.array_equal(shown, shown.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_the_router_and_a_wide_residual_keep_the_precision_of_the_sums() -> None:
    wide = next(s for s in SEEDS if NoisyArithmetic(BFLOAT16, s).wide_residual)
    shown = run(BFLOAT16, wide)

    for stage in ("router_scores", "hidden"):
        array = shown[stage, CONFIG.num_hidden_layers - 1].astype(np.float32)
        assert not np.array_equal(array, array.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_experts_are_those_that_are_given() -> None:
    for seed in SEEDS:
        shown = run(BFLOAT16, seed)
        for (stage, layer), expected in TRUTH.items():
            if stage == "expert_ids":
                assert np.array_equal(expected, shown[stage, layer])


def test_the_correction_bias_is_not_rounded() -> None:
    arithmetic = NoisyArithmetic(BFLOAT16, 0)
    read = make_engine(arithmetic="fast").load((CONFIG, WEIGHTS)).weights
    rounded = arithmetic.rounded_weights(read)

    layer = CONFIG.first_k_dense_replace
    assert np.array_equal(read.layers[layer].mlp.bias, rounded.layers[layer].mlp.bias)  # type: ignore[union-attr]
    assert not np.array_equal(read.embedding, rounded.embedding)


def test_float32_angles_are_off_by_more_at_larger_positions() -> None:
    seed = next(s for s in SEEDS if NoisyArithmetic(NumericProfile(), s).single_angles)
    arithmetic = NoisyArithmetic(NumericProfile(), seed)

    errors = np.abs(arithmetic._angles(CONFIG, np.array([1, 1000])))

    assert errors.max() < 3.1 * 2.0**-24 * 1000
    assert errors[1].max() > 100 * errors[0].max()
    assert not NoisyArithmetic(NumericProfile(accumulation="float64"), seed).single_angles
