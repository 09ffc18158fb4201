"""Offsets beyond 2^31 elements and positions beyond 2^17: what only a large cache shows (OVF)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.contract import ModelConfig
from kdtr.engine.cuda_launcher import CudaLauncher
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.paging import PagedCache

C, R = 512, 64
SLOTS = 4_000_000  # times 576 elements: 2.3e9


def large_cache(kernels: Any, small: ModelConfig, page_size: int) -> PagedCache:
    """4.6 GB of one layer, all of it mapped: logical slot 0 lies at the far end."""
    config = small.replace(
        num_hidden_layers=1, first_k_dense_replace=0, kv_lora_rank=C, qk_rope_head_dim=R
    )
    cache = PagedCache(kernels, config, capacity=SLOTS, page_size=page_size)
    cache.map_slots(SLOTS)
    return cache


@pytest.fixture(scope="module", params=[64, 50], ids=["swizzled", "plain"])
def cache(
    cuda_sets: dict[str, Any], small: ModelConfig, request: pytest.FixtureRequest
) -> PagedCache:
    return large_cache(cuda_sets["bfloat16"], small, request.param)


def stored(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)


def append(kernels: Any, cache: PagedCache, slots: np.ndarray, rng: np.random.Generator) -> Any:
    angles = np.ones((len(slots), R // 2)), np.zeros((len(slots), R // 2))
    return kernels.append_normed(
        cache,
        0,
        kernels.upload(slots),
        kernels.upload_weight(stored(rng, len(slots), C + R)),
        None,
        kernels.upload_weight(np.ones(C, np.float32)),
        1e-5,
        *(kernels.upload(angle.astype(np.float32)) for angle in angles),
    )


def rows_at(kernels: Any, cache: PagedCache, slots: np.ndarray) -> np.ndarray:
    """Rows of the plain layout, or the swizzled ones put right on the host."""
    table = kernels.to_host(cache.page_table)
    physical = table[slots // cache.page_size] * cache.page_size + slots % cache.page_size
    rows = np.stack([kernels.to_host(cache.rows[0, row]) for row in physical.tolist()])
    if cache.page_size % 32 == 0:
        chunks = rows.reshape(len(rows), -1, 8, 8)
        for i, row in enumerate(physical.tolist()):
            chunks[i] = chunks[i][:, np.arange(8) ^ (row & 7)]
    return rows


FAR = np.array([0, 1, 63, 64, SLOTS - 2, SLOTS - 1])  # both ends of the memory


def check_rows(kernels: Any, cache: PagedCache) -> None:
    """Rows at both ends of the memory hold what was appended to them, and move whole."""
    latents = append(kernels, cache, FAR, np.random.default_rng(1))
    expected = np.concatenate(
        [kernels.to_host(latents.c_kv), kernels.to_host(latents.k_pe)], axis=1
    )
    np.testing.assert_array_equal(expected, rows_at(kernels, cache, FAR))

    moves = kernels.commit_rows(
        cache,
        kernels.upload(np.array([0, 62, -1])),
        kernels.upload(np.array([2])),
        kernels.device_int(1),
    )
    assert [[1, 1], [63, 2], [-1, -1]] == kernels.to_host(moves).tolist()
    np.testing.assert_array_equal(expected[[2]], rows_at(kernels, cache, np.array([2])))


def test_rows_are_written_and_moved_where_they_belong(
    cuda_sets: dict[str, Any], cache: PagedCache
) -> None:
    check_rows(cuda_sets["bfloat16"], cache)


def test_attention_reads_the_far_end(cuda_sets: dict[str, Any], cache: PagedCache) -> None:
    """Eight slots at the far end of the memory, and nothing else of it is finite."""
    kernels, rng = cuda_sets["bfloat16"], np.random.default_rng(2)
    slots = np.arange(8)
    latents = append(kernels, cache, slots, rng)
    keys = np.concatenate(
        [kernels.to_host(latents.c_kv), kernels.to_host(latents.k_pe)], axis=1
    ).astype(np.float64)
    query = stored(rng, 1, 4, C + R) * np.float32(0.125)
    rows = CudaLauncher(kernels, cache, None).stage(7, [0], (-1,))
    over = kernels.over(rows)
    _, block = over.tree_layout(rows.parents, rows.committed_len)
    on_device = kernels.upload_weight(query)

    out = over.verify_attn(
        cache, 0, on_device[..., :C], on_device[..., C:],
        Visibility(rows.committed_len, block), 0.05, 64,
    )  # fmt: skip

    scores = query[0].astype(np.float64) @ keys.T * 0.05
    p = np.exp(scores - scores.max(1, keepdims=True))
    expected = p / p.sum(1, keepdims=True) @ keys[:, :C]
    found = kernels.to_host(out)[0]
    assert abs(found - expected).max() <= 2.0**-7 * abs(expected).max()


def check_far_rows(kernels: Any, lead: int = 0) -> None:
    """Rows of a view that lie 2^30 elements apart, `lead` elements into the memory."""
    cupy = pytest.importorskip("cupy")
    apart, width, rng = 2**30 + 8, 64, np.random.default_rng(3)
    memory = cupy.zeros(lead + 3 * apart + width, cupy.uint16)
    host = stored(rng, 4, width)
    bits = host.astype(ml_dtypes.bfloat16).view(np.uint16)
    for i in range(4):
        memory[lead + i * apart : lead + i * apart + width].set(bits[i])
    view = cupy.lib.stride_tricks.as_strided(memory[lead:], (4, width), (2 * apart, 2))
    weight, ones = stored(rng, 24, width), np.ones(width, np.float32)
    cupy.cuda.Device().synchronize()  # CuPy wrote on another stream
    np.testing.assert_array_equal(host, kernels.to_host(view))

    normed = kernels.to_host(kernels.rms_norm(view, kernels.upload_weight(ones), 0.0))
    product = kernels.to_host(kernels.linear(view, kernels.upload_weight(weight)))

    root = np.sqrt((host.astype(np.float64) ** 2).mean(1, keepdims=True))
    np.testing.assert_allclose(normed, host / root, rtol=2.0**-8)
    np.testing.assert_allclose(product, host @ weight.T, rtol=0, atol=2.0**-7 * width**0.5 * 8)


def test_row_times_stride_beyond_2_31(cuda_sets: dict[str, Any]) -> None:
    check_far_rows(cuda_sets["bfloat16"])


def test_positions_of_128k_and_beyond(cuda_sets: dict[str, Any]) -> None:
    """A tree at L = 131,071 and at 3,000,000: positions, slots and angles."""
    kernels = cuda_sets["float32"]
    for length in (131_071, 3_000_000):
        rows = CudaLauncher(kernels, None, None).stage(length, [0] * 4, (-1, 0, 0, 2))
        positions, _ = kernels.over(rows).tree_layout(rows.parents, rows.committed_len)
        assert [length, length + 1, length + 1, length + 2] == kernels.to_host(positions)[
            :4
        ].tolist()
        assert [length + i for i in range(4)] + [-1] == kernels.to_host(rows.slots).tolist()
        frequencies = np.array([1.0, 0.1, 1e-4])
        cos, sin = kernels.over(rows).rotary_angles(positions, kernels.upload(frequencies), 1.0)
        angles = kernels.to_host(positions)[:4, None].astype(np.float64) * frequencies
        np.testing.assert_allclose(kernels.to_host(cos)[:4], np.cos(angles), atol=1e-7)
        np.testing.assert_allclose(kernels.to_host(sin)[:4], np.sin(angles), atol=1e-7)


@pytest.mark.parametrize("n", [65, 129, 300])
def test_ancestors_beyond_a_word(cuda_sets: dict[str, Any], n: int) -> None:
    """Node 64 and later have ancestors in the first word and in their own."""
    kernels = cuda_sets["float32"]
    parents = np.array([-1, *(max(0, i - 33) for i in range(n - 1))])
    _, bits = kernels.tree_layout(kernels.upload(parents), kernels.device_int(0))
    seen = np.unpackbits(kernels.to_host(bits).view(np.uint8), axis=1, bitorder="little")[
        :, :n
    ].astype(bool)

    expected = np.zeros((n, n), bool)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            expected[i] = expected[parent]
        expected[i, i] = True
    np.testing.assert_array_equal(expected, seen)
