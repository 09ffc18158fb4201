"""Engines that store bfloat16 or float16: what they store, and how far from the truth they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.noise_floor import NoiseFloor, stored_in
from kdtr.conformance.tolerance import UNIT_ROUNDOFF, row_bound, row_scale
from kdtr.contract import STAGE, DraftTree, ModelConfig, NumericProfile, Source
from kdtr.engine import make_engine
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.rounded_kernels import RoundedKernels
from kdtr.engine.shuffled_kernels import ShuffledKernels
from kdtr.reference import make_engine as make_reference

LOW = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
FLOAT32_STAGES = {"scores", "router_scores", "expert_weights"}
PROMPT, TREE = [1, 2, 3, 30, 31], DraftTree(tokens=(4, 5, 6, 7), parents=(-1, 0, 0, 2))
Stages = dict[tuple[str, "int | None"], np.ndarray]


@pytest.fixture(params=LOW)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def all_chosen(small: ModelConfig) -> ModelConfig:
    """Every expert is chosen: no choice hangs on rounding, so every stage has a bound."""
    return small.replace(num_experts_per_tok=8, topk_group=4)


def bounds(
    config: ModelConfig, weights: dict[str, np.ndarray], profile: NumericProfile, truth: Stages
) -> Stages:
    """Of every row of every numeric stage (NUM-3)."""
    members = [model for _, model in NoiseFloor(config, weights, profile).members()]
    shown = [traced_verify(model) for model in members]
    found = {}
    for (name, layer), expected in numeric(truth).items():
        finite = np.where(np.isfinite(expected), expected, 0)
        noise = [
            row_scale(np.where(np.isfinite(expected), one[name, layer] - finite, 0), 1)
            for one in shown
        ]
        unit = UNIT_ROUNDOFF[stored_in(profile, STAGE[name])]
        found[name, layer] = row_bound(expected, np.max(noise, axis=0), 1, unit)
    return found


def held(values: np.ndarray, dtype: str) -> bool:
    """Whether every value is a number of the dtype."""
    return np.array_equal(values, values.astype(LOW[dtype]).astype(np.float32))


def read_prompt(model: Any) -> Any:
    session = model.open(max_len=40)
    session.prefill(PROMPT)
    session.set_root(TREE.tokens[0])
    return session


def traced_verify(model: Any) -> Stages:
    stages: Stages = {}
    read_prompt(model).verify(TREE, trace=lambda s, i, a: stages.__setitem__((s, i), np.array(a)))
    return stages


def numeric(stages: Stages) -> Stages:
    return {at: values for at, values in stages.items() if not STAGE[at[0]].exact}


def test_what_is_stored_is_representable(load: Callable[..., Any], trace: Any, dtype: str) -> None:
    """Every traced number of a round and the whole cache; the float32 islands use float32."""
    session = read_prompt(load(dtype=dtype))

    session.round(TREE, trace=trace)

    stages, cache = numeric(trace), session.snapshot()
    of_forward = {s.name for s in STAGE.values() if s.source in (Source.FORWARD, Source.LAYER)}
    shown = {name for name, _ in stages}
    assert shown == {name for name in of_forward if not STAGE[name].exact}
    for (name, layer), values in stages.items():
        finite = values[np.isfinite(values)]
        assert held(finite, dtype) == (name not in FLOAT32_STAGES), (name, layer)
    assert held(cache.c_kv, dtype)
    assert held(cache.k_pe, dtype)


def test_weights_are_held_in_the_dtype_and_the_correction_bias_is_not(
    load: Callable[..., Any], dtype: str
) -> None:
    weights = load(dtype=dtype)._forward.weights
    layer = weights.layers[1]
    attention, moe = layer.attention, layer.mlp

    for stored in (
        weights.embedding,
        weights.final_norm,
        weights.lm_head,
        layer.input_norm,
        layer.post_attention_norm,
        attention.qkv_a,
        attention.q_norm,
        attention.q_b,
        attention.kv_norm,
        attention.w_kc,
        attention.w_vc,
        attention.o,
        moe.gate,
        moe.gate_up,
        moe.down,
        moe.shared.gate_up,
        moe.shared.down,
    ):
        assert held(stored, dtype)
    assert not held(moe.correction_bias, dtype)
    assert np.float64 == weights.inverse_frequencies.dtype


def test_results_between_the_stages_are_stored_too(dtype: str) -> None:
    """Of SwiGLU, of an expert, and the query in latent space: no trace shows them."""
    kernels = RoundedKernels(HostKernels(), dtype)
    rng = np.random.default_rng(4)

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(LOW[dtype]).astype(np.float32)

    x, gate_up, down = numbers(3, 8), numbers(2, 12, 8), numbers(2, 8, 6)
    weights = rng.random((3, 2)).astype(np.float32)
    both = np.array([[0, 1]] * 3)

    assert held(kernels.silu_mul(numbers(3, 12)), dtype)
    assert held(kernels.absorb_query(numbers(3, 2, 5), numbers(2, 4, 5)), dtype)
    assert held(kernels.unabsorb_value(numbers(3, 2, 4), numbers(2, 5, 4)), dtype)
    each = [kernels.swiglu(x, gate_up[e], down[e]) for e in (0, 1)]
    assert held(each[0], dtype)
    total = (weights[:, :1] * each[0] + weights[:, 1:] * each[1]).astype(LOW[dtype])
    assert np.array_equal(
        total.astype(np.float32), kernels.experts(x, both, weights, gate_up, down)
    )


def test_distance_to_the_truth_is_that_of_the_dtype(
    small_weights: dict[str, np.ndarray], all_chosen: ModelConfig, dtype: str
) -> None:
    """Within the bound of the declared precision and outside float32's, stage by stage (NUM-3)."""
    truth, found = (
        traced_verify(engine.load((all_chosen, small_weights)))
        for engine in (make_reference(), make_engine(dtype=dtype))
    )

    declared = RoundedKernels(HostKernels(), dtype).profile
    within = bounds(all_chosen, small_weights, declared, truth)
    narrow = bounds(all_chosen, small_weights, NumericProfile(), truth)
    outside = set()
    for (name, layer), expected in numeric(truth).items():
        seen = np.isfinite(expected)  # scores are -inf where invisible
        error = np.where(seen, np.abs(found[name, layer] - np.where(seen, expected, 0)), 0)
        assert (error <= within[name, layer]).all(), (name, layer)
        if (error > narrow[name, layer]).any():
            outside.add(name)
    assert {name for name, _ in numeric(truth)} - outside <= {"embedding", "expert_weights"}


def test_a_tree_equals_its_paths_read_in_a_row(
    load: Callable[..., Any],
    small_weights: dict[str, np.ndarray],
    all_chosen: ModelConfig,
    trace: Any,
) -> None:
    """Node by node: verify of the tree beside prefill and lone roots along the path (LOSSLESS)."""
    model = load(all_chosen, dtype="bfloat16")
    truth = traced_verify(make_reference().load((all_chosen, small_weights)))
    profile = RoundedKernels(HostKernels(), "bfloat16").profile
    bound = bounds(all_chosen, small_weights, profile, truth)["logits", None]
    verified = read_prompt(model).verify(TREE)

    for path in ((0, 1), (0, 2, 3)):
        session = read_prompt(model)
        for node in path:
            session.set_root(TREE.tokens[node])
            session.decode(trace=trace)
            alone = trace["logits", None]  # [1, w]
            # Each is within its bound of the truth, so both are within two of each other.
            assert (np.abs(verified.logits[node] - alone) <= 2 * bound[node]).all(), path


def test_committed_rows_are_moved_and_not_rounded_again(
    load: Callable[..., Any], trace: Any, dtype: str
) -> None:
    session = read_prompt(load(dtype=dtype))

    path = list(session.round(TREE, trace=trace).acceptance.path)

    cache = session.snapshot()
    for layer in range(3):
        assert np.array_equal(trace["c_kv", layer][path], cache.c_kv[layer, len(PROMPT) :])
        assert np.array_equal(trace["k_pe", layer][path], cache.k_pe[layer, len(PROMPT) :])


def test_the_profile_says_so(dtype: str) -> None:
    profile = RoundedKernels(HostKernels(), dtype).profile

    expected = NumericProfile(
        weights=dtype,
        activations=dtype,
        latents=dtype,
        scores="float32",
        logits=dtype,
        accumulation="float32",
        deterministic=True,
    )
    assert expected == profile


def test_every_operation_that_another_order_of_sums_changes_is_passed_on() -> None:
    """What is not passed on would quietly be HostKernels' own: the shuffled sums would be lost."""
    operations = {name for name in vars(HostKernels) if name[0] != "_"}
    shuffled = operations & set(vars(ShuffledKernels))

    assert {"linear", "router_scores", "verify_attn"} <= shuffled
    assert shuffled <= set(vars(RoundedKernels))


def test_beyond_65504_float16_is_infinite() -> None:
    """Nothing is clipped: NumPy warns, and the next norm makes NaN of it."""
    kernels = RoundedKernels(HostKernels(), "float16")
    large = np.full((1, 2), 40000.0, np.float32)

    with pytest.warns(RuntimeWarning, match="overflow"):
        residual = kernels.add(large, large)
    with pytest.warns(RuntimeWarning, match="invalid"):
        normed = kernels.rms_norm(residual, np.ones(2, np.float32), 1e-5)

    assert np.isposinf(residual).all()
    assert np.isnan(normed).all()
