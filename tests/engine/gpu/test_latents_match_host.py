"""Rotation, queries, the cache and attention of the CUDA set against their host twins."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_pair import FLOAT32, ROUNDOFF, TREES, Pair

from kdtr.contract import ModelConfig
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.paging import PagedCache


def test_rotary_angles_at_every_distance(pair: Pair) -> None:
    positions = np.array([0, 1, 17, 131_071, 2**31 + 5])
    frequencies = 10000.0 ** -(np.arange(32) / 32)

    found = pair.cuda.rotary_angles(
        pair.cuda.upload(positions), pair.cuda.upload(frequencies), 1.25
    )

    for expected, array in zip(
        pair.host.rotary_angles(positions, frequencies, 1.25), found, strict=True
    ):
        np.testing.assert_allclose(pair.cuda.to_host(array), expected, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize(("c", "r", "q", "page_size"), [(10, 6, 11, 3), (512, 64, 64, 64)])
def test_latents_go_to_their_slots(
    pair: Pair, small: ModelConfig, c: int, r: int, q: int, page_size: int
) -> None:
    config = small.replace(kv_lora_rank=c, qk_rope_head_dim=r)
    n, length = 5, 130 if page_size == 64 else 8
    projected, projected_cuda = pair.numbers(n, q + c + r)
    q_norm, q_norm_cuda = pair.numbers(q)
    kv_norm, kv_norm_cuda = pair.numbers(c)
    positions = np.arange(length, length + n)
    frequencies = 500.0 ** -(np.arange(r // 2) / (r // 2))
    results = []
    for kernels, operands in (
        (pair.host, (projected, q_norm, kv_norm)),
        (pair.cuda, (projected_cuda, q_norm_cuda, kv_norm_cuda)),
    ):
        cache = PagedCache(kernels, config, capacity=200, page_size=page_size)
        cache.map_slots(length + n)
        angles = kernels.rotary_angles(kernels.upload(positions), kernels.upload(frequencies), 1.0)
        latents = kernels.append_normed(
            cache, 1, kernels.upload(positions), *operands, 1e-5, *angles
        )
        results.append((latents, kernels.read_rows(cache, length + n)))
    (expected, _), (found, rows) = results

    for mine, theirs in zip(expected, found, strict=True):
        pair.close(mine, theirs, 4.0, c)
    np.testing.assert_array_equal(pair.cuda.to_host(found.c_kv), rows[1, length:, :c])
    np.testing.assert_array_equal(pair.cuda.to_host(found.k_pe), rows[1, length:, c:])
    assert np.isnan(rows[:, :length]).all(), "a slot was written that nobody gave"
    assert np.isnan(rows[[0, 2]]).all(), "a layer was written that nobody gave"


@pytest.mark.parametrize(("h", "c", "d", "r"), [(3, 10, 7, 6), (8, 512, 128, 64), (5, 96, 32, 16)])
@pytest.mark.parametrize("n", [1, 17, 70])
def test_queries_and_values(pair: Pair, n: int, h: int, c: int, d: int, r: int) -> None:
    q, q_cuda = pair.numbers(n, h, d + r)
    w_kc, w_kc_cuda = pair.numbers(h, c, d)
    w_vc, w_vc_cuda = pair.numbers(h, d, c)
    positions, frequencies = np.arange(n) + 40, 500.0 ** -(np.arange(r // 2) / r)
    angles = [pair.host.rotary_angles(positions, frequencies, 1.0)]
    angles.append([pair.cuda.upload(angle) for angle in angles[0]])

    expected = pair.host.latent_query(q, w_kc, *angles[0])
    found = pair.cuda.latent_query(q_cuda, w_kc_cuda, *angles[1])

    pair.close(expected[0], found[0], float(abs(q[..., :d]).max() * abs(w_kc).max() * d), 1)
    pair.close(expected[1], found[1], 8.0, 2)
    out, out_cuda = pair.numbers(n, h, c)
    pair.close(
        pair.host.unabsorb_value(out, w_vc),
        pair.cuda.unabsorb_value(out_cuda, w_vc_cuda),
        float((abs(out).sum(-1).max()) * abs(w_vc).max()),
        1,
    )


@pytest.mark.parametrize(("c", "r", "page_size"), [(10, 6, 3), (512, 64, 64)])
def test_rows_move_whole(pair: Pair, small: ModelConfig, c: int, r: int, page_size: int) -> None:
    config = small.replace(kv_lora_rank=c, qk_rope_head_dim=r)
    length, n = 60, 20
    path = np.full(n, -1)
    path[:9] = [0, 2, 3, 5, 6, 9, 14, 15, 19]
    caches = []
    for kernels in (pair.host, pair.cuda):
        cache = PagedCache(kernels, config, capacity=130, page_size=page_size)
        cache.map_slots(length + n)
        pair.rng = np.random.default_rng(3)
        slots = np.arange(length + n)
        operands = [pair.numbers(len(slots), c + r), pair.numbers(c)]
        projected, norm = (operand[kernels is pair.cuda] for operand in operands)
        angles = [
            kernels.upload(a)
            for a in pair.host.rotary_angles(slots, 500.0 ** -np.arange(r // 2), 1.0)
        ]
        for layer in range(3):
            kernels.append_normed(
                cache, layer, kernels.upload(slots), projected, None, norm, 1e-5, *angles
            )
        caches.append(cache)
    before = pair.cuda.read_rows(caches[1], length + n)

    moves = [
        kernels.to_host(
            kernels.commit_rows(
                cache,
                kernels.upload(path),
                kernels.upload(np.array([9])),
                kernels.device_int(length),
            )
        )
        for kernels, cache in zip((pair.host, pair.cuda), caches, strict=True)
    ]

    np.testing.assert_array_equal(*moves)
    expected = before.copy()
    expected[:, length : length + 9] = before[:, length + path[:9]]
    np.testing.assert_array_equal(expected, pair.cuda.read_rows(caches[1], length + n))


@pytest.mark.parametrize(
    ("h", "c", "r", "page_size", "length"),
    [(3, 10, 6, 3, 40), (8, 512, 64, 64, 1000), (4, 512, 64, 64, 7), (16, 512, 64, 32, 333)],
)
@pytest.mark.parametrize("n", [1, 9, 40])
def test_attention(
    pair: Pair, small: ModelConfig, h: int, c: int, r: int, page_size: int, length: int, n: int
) -> None:
    """A tree of n rows in a bucket of n + 3; beyond L + n the cache is NaN."""
    config = small.replace(kv_lora_rank=c, qk_rope_head_dim=r, num_attention_heads=h)
    slots = np.arange(length + n)
    parents = np.array(TREES["mixed"](n))
    _, latents_cuda = pair.numbers(len(slots), c + r)
    _, ones = pair.numbers(c)
    query, _ = pair.numbers(n, h, c + r, scale=0.3)
    outs, scores, caches = [], [], []
    for kernels in (pair.cuda, pair.host):
        cache = PagedCache(kernels, config, capacity=length + n + 70, page_size=page_size)
        cache.map_slots(length + n)
        caches.append(cache)
    flat = [np.ones((len(slots), r // 2), np.float32), np.zeros((len(slots), r // 2), np.float32)]
    pair.cuda.append_normed(
        caches[0], 1, pair.cuda.upload(slots), latents_cuda, None, ones, 1e-5,
        *map(pair.cuda.upload, flat),
    )  # fmt: skip
    same = pair.cuda.read_rows(caches[0], length + n)[1]  # norms round in their last bit
    pair.host.append_latents(caches[1], 1, slots, same[:, :c], same[:, c:])
    for kernels, cache in zip((pair.cuda, pair.host), caches, strict=True):
        rows = kernels.launcher(cache, config).stage(length, [0] * n, parents)
        over = kernels.over(rows)
        _, block = over.tree_layout(rows.parents, rows.committed_len)
        visibility = Visibility(rows.committed_len, block)
        padded = np.full((rows.n, h, c + r), np.nan, np.float32)
        padded[:n] = query
        on_device = kernels.upload_weight(padded)
        for seen in (None, over.new_scores(rows.n, h, visibility)):
            out = over.verify_attn(
                cache, 1, on_device[..., :c], on_device[..., c:], visibility, 0.2, 32, seen
            )
            outs.append(kernels.to_host(out)[:n])
        scores.append(kernels.to_host(seen)[:n, :, : length + n])
    mine, theirs = scores
    unit = ROUNDOFF[pair.dtype]
    np.testing.assert_array_equal(outs[0], outs[1])
    largest = abs(theirs[np.isfinite(theirs)]).max()
    np.testing.assert_array_equal(np.isfinite(theirs), np.isfinite(mine))
    np.testing.assert_allclose(
        mine, theirs, rtol=0, atol=64 * FLOAT32 * (c + r) ** 0.5 * (1 + largest)
    )
    np.testing.assert_allclose(
        outs[0], outs[2], rtol=0, atol=(4 * unit + 600 * FLOAT32) * abs(outs[2]).max()
    )
