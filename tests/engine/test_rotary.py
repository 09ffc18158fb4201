from __future__ import annotations

from math import log

import numpy as np
import pytest

from kdtr.contract import ModelConfig, Yarn
from kdtr.engine.rotary import (
    attention_factor,
    half_split_order,
    inverse_frequencies,
    softmax_scale,
)


def yarn(**changes: float | None) -> Yarn:
    values: dict[str, float | None] = {"factor": 40.0, "original_max_position_embeddings": 4096}
    return Yarn(**{**values, **changes})  # type: ignore[arg-type]


def mscale(m: float) -> float:
    return 0.1 * m * log(40.0) + 1


def test_plain_frequencies_fall_from_1_by_the_same_ratio(small: ModelConfig) -> None:
    expected = [1.0, 500.0 ** (-2 / 6), 500.0 ** (-4 / 6)]

    assert expected == inverse_frequencies(small).tolist()


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    """DeepSeek-V3: r 64, theta 1e4, beta 32 and 1 over 4096 give the ramp 10..23 (MLA-6)."""
    config = ModelConfig.kimi_k2(rope_theta=1e4, yarn=yarn())
    plain = inverse_frequencies(config.replace(yarn=None))

    blended = inverse_frequencies(config)

    assert plain[:11].tolist() == blended[:11].tolist()
    assert (plain[23:] / 40).tolist() == blended[23:].tolist()
    ramp = (16 - 10) / (23 - 10)
    assert blended[16] == pytest.approx(plain[16] * (1 - ramp) + plain[16] / 40 * ramp, rel=1e-15)


def test_equal_ends_of_the_ramp_make_a_step() -> None:
    """A context of 2 pi turns of pair 0 puts both ends at 0; the ramp is 0.001 wide (MLA-6)."""
    config = ModelConfig.kimi_k2(
        yarn=yarn(original_max_position_embeddings=6, beta_fast=1.0, beta_slow=1.0)
    )
    plain = inverse_frequencies(config.replace(yarn=None))

    blended = inverse_frequencies(config)

    assert plain[0] == blended[0]
    assert (plain[1:] / 40).tolist() == blended[1:].tolist()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, mscale(1.0)),
        ({"mscale": 0.7}, mscale(1.0)),
        ({"mscale_all_dim": 0.7}, mscale(1.0)),
        ({"mscale": 0.0, "mscale_all_dim": 0.7}, mscale(1.0)),
        ({"mscale": 0.7, "mscale_all_dim": 0.0}, mscale(1.0)),
        ({"mscale": 0.7, "mscale_all_dim": 1.3}, mscale(0.7) / mscale(1.3)),
        ({"mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 1.9}, 1.9),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_attention_factor(small: ModelConfig, keys: dict[str, float], expected: float) -> None:
    """Every case of MLA-5."""
    assert expected == attention_factor(small.replace(yarn=yarn(**keys)))


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 1.0),
        ({"mscale": 0.7}, 1.0),
        ({"mscale_all_dim": 0.0}, 1.0),
        ({"mscale_all_dim": 1.3}, mscale(1.3) ** 2),
        ({"mscale": 0.7, "mscale_all_dim": 1.3}, mscale(1.3) ** 2),
        ({"factor": 1.0, "mscale_all_dim": 1.3}, 1.0),
    ],
)
def test_softmax_scale(small: ModelConfig, keys: dict[str, float], factor: float) -> None:
    """Every case of MLA-4; 13 is d + r, the latent's width plays no part."""
    scale = softmax_scale(small.replace(yarn=yarn(**keys)))

    assert factor * 13**-0.5 == pytest.approx(scale, rel=1e-15)


def test_without_yarn_nothing_is_scaled(small: ModelConfig) -> None:
    assert 1.0 == attention_factor(small)
    assert 13**-0.5 == pytest.approx(softmax_scale(small), rel=1e-15)


def test_half_split_order_of_both_pairings(small: ModelConfig) -> None:
    interleaved = half_split_order(small.replace(rope_interleave=True))
    split = half_split_order(small.replace(rope_interleave=False))

    assert [0, 2, 4, 1, 3, 5] == interleaved.tolist()
    assert np.arange(6).tolist() == split.tolist()
