from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import ModelConfig
from kdtr.engine.host_attention import (
    append_latents,
    attend_split,
    merge_splits,
    rotary_angles,
    rotate,
    verify_attn,
)
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.paging import PagedCache

U = 2.0**-24


def filled_cache(config: ModelConfig, n_slots: int, page_size: int, seed: int) -> PagedCache:
    """A cache with random rows in slots 0..n_slots-1 of layer 1, NaN everywhere else."""
    cache = PagedCache(HostKernels(), config, capacity=n_slots + 9, page_size=page_size)
    cache.map_slots(n_slots)
    rng = np.random.default_rng(seed)
    c_kv = rng.standard_normal((n_slots, config.kv_lora_rank)).astype(np.float32)
    k_pe = rng.standard_normal((n_slots, config.qk_rope_head_dim)).astype(np.float32)
    append_latents(cache, 1, np.arange(n_slots), c_kv, k_pe)
    return cache


def plain_softmax(
    keys: np.ndarray, query: np.ndarray, visible: np.ndarray, scale: float, c: int
) -> np.ndarray:
    """keys [s, c + r], query [n, h, c + r], visible [n, s] -> [n, h, c], float64 and unsplit."""
    keys64 = np.where(np.isnan(keys), 0.0, keys.astype(np.float64))  # invisible ones may be NaN
    scores = np.einsum("nhx,sx->nhs", query.astype(np.float64), keys64) * scale
    scores = np.where(visible[:, None, :], scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("nhs,sc->nhc", p / p.sum(axis=-1, keepdims=True), keys64[:, :c])


@given(
    block=st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=5),
    open_len=st.integers(0, 12),
    split_size=st.integers(1, 20),
    page_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 9),
)
def test_split_kv_equals_plain_softmax(
    block: list[list[bool]], open_len: int, split_size: int, page_size: int, seed: int
) -> None:
    """Any mask, split and page size; slots that nobody sees are NaN (MLA-3, MASK-3)."""
    config = ModelConfig.tiny().replace(kv_lora_rank=6, qk_rope_head_dim=4)
    columns = np.array(block)
    columns[:, 0] = True  # every row sees something
    visible = np.concatenate([np.ones((len(block), open_len), bool), columns], axis=1)
    cache = filled_cache(config, open_len + 7, page_size, seed)
    unseen = np.flatnonzero(~visible.any(axis=0))
    nan_c, nan_r = np.full((len(unseen), 6), np.nan), np.full((len(unseen), 4), np.nan)
    append_latents(cache, 1, unseen, nan_c, nan_r)
    query = np.random.default_rng(seed).standard_normal((len(block), 2, 10)).astype(np.float32)
    scores = np.full((len(block), 2, open_len + 7), -np.inf, np.float32)
    scale = 0.3

    out = verify_attn(
        cache,
        1,
        query[..., :6],
        query[..., 6:],
        Visibility(open_len, columns),
        scale,
        split_size,
        scores,
    )

    keys = HostKernels.read_rows(cache, open_len + 7)[1]
    expected = plain_softmax(keys, query, visible, scale, c=6)
    # A score's error, 10 u times the sum of its terms' magnitudes, enters as exp's relative error;
    # the sums over at most 19 slots add 19 u each to numerator and denominator.
    terms = scale * np.nan_to_num(np.abs(keys)).max() * np.abs(query).sum(axis=-1).max()
    bound = U * (2 * 11 * terms + 2 * 19 + 8) * np.nan_to_num(np.abs(keys)).max()
    assert np.abs(out - expected).max() <= bound
    assert np.array_equal(np.isfinite(scores), np.broadcast_to(visible[:, None], scores.shape))


def test_a_row_is_not_touched_by_nan_that_only_another_row_sees() -> None:
    """0 * NaN is NaN: what a row does not see is not read for it (MASK-3)."""
    config = ModelConfig.tiny().replace(kv_lora_rank=6, qk_rope_head_dim=4)
    cache = filled_cache(config, 5, 3, seed=1)
    append_latents(cache, 1, np.array([4]), np.full((1, 6), np.nan), np.full((1, 4), np.nan))
    query = np.ones((2, 2, 10), np.float32)
    block = np.array([[True, False], [True, True]])

    out = verify_attn(cache, 1, query[..., :6], query[..., 6:], Visibility(3, block), 1.0, 4)

    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_an_empty_split_contributes_nothing() -> None:
    config = ModelConfig.tiny().replace(kv_lora_rank=6, qk_rope_head_dim=4)
    cache = filled_cache(config, 4, 2, seed=2)
    query = np.ones((1, 2, 10), np.float32)
    visibility = Visibility(2, np.array([[False, False]]))

    seen = attend_split(cache, 1, query, visibility, 0, 2, 1.0, None)
    empty = attend_split(cache, 1, query, visibility, 2, 4, 1.0, None)

    assert np.isneginf(empty.top).all()
    assert not empty.norm.any()
    assert np.array_equal(merge_splits([seen]), merge_splits([seen, empty]))
    assert np.array_equal(merge_splits([seen]), merge_splits([empty, seen]))


def test_the_same_call_gives_the_same_bits() -> None:
    config = ModelConfig.tiny().replace(kv_lora_rank=6, qk_rope_head_dim=4)
    cache = filled_cache(config, 30, 4, seed=3)
    query = np.random.default_rng(3).standard_normal((4, 2, 10)).astype(np.float32)
    visibility = Visibility(26, np.tri(4, dtype=bool))

    runs = [
        verify_attn(cache, 1, query[..., :6], query[..., 6:], visibility, 0.2, 5).tobytes()
        for _ in range(5)
    ]

    assert 1 == len(set(runs))


@pytest.mark.parametrize("position", [0, 1, 20_000, 131_071])
def test_rotation_turns_each_pair_by_its_angle(position: int) -> None:
    """Pairs (i, i + r/2) as complex numbers, in float64; one rounding of cos and sin (MLA-7)."""
    frequencies = np.array([1.0, 0.31, 0.007])
    x = np.arange(1, 13, dtype=np.float32).reshape(1, 2, 6)

    cos, sin = rotary_angles(np.array([position]), frequencies, 1.25)
    turned = rotate(x, cos, sin)

    pairs = (x[..., :3] + 1j * x[..., 3:]) * 1.25 * np.exp(1j * position * frequencies)
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    assert np.abs(turned - expected).max() <= 4 * U * 1.25 * np.abs(pairs).max()


def test_large_positions_keep_their_precision() -> None:
    """An angle rounded to float32 at position 131071 would be off by 0.004."""
    cos, _ = rotary_angles(np.array([131_071]), np.array([0.9]), 1.0)

    assert np.cos(131_071 * 0.9) == pytest.approx(cos[0, 0], abs=U)
