"""Every operation of the CUDA set against its host twin, on random numbers, sizes off the tiles.

Two right answers differ by rounding alone: a sum of k products errs by at most k u of the sum of
their magnitudes, and what is stored errs by u of the storage dtype besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdtr.contract import ModelConfig
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.kernel_set import Routed, Visibility
from kdtr.engine.paging import PagedCache
from kdtr.engine.rounded_kernels import RoundedKernels
from kdtr.engine.rounding import rounded
from kdtr.engine.weights import MoeWeights, SwiGluWeights

FLOAT32 = 2.0**-24
ROUNDOFF = {"float32": FLOAT32, "bfloat16": 2.0**-8}
DTYPES = ("float32", "bfloat16")


class Pair:
    """The same operands on both sides: numbers of the dtype, as float32 on the host."""

    def __init__(self, cuda: Any, dtype: str, seed: int = 7) -> None:
        self.dtype = dtype
        self.cuda = cuda
        self.host = HostKernels() if dtype == "float32" else RoundedKernels(HostKernels(), dtype)
        self.rng = np.random.default_rng(seed)

    def numbers(self, *shape: int, scale: float = 1.0) -> tuple[np.ndarray, Any]:
        host = rounded((self.rng.standard_normal(shape) * scale).astype(np.float32), self.dtype)
        return host, self.cuda.upload_weight(host)

    def close(self, expected: np.ndarray, found: Any, magnitude: float, terms: int) -> None:
        """Within rounding of `terms` products that sum, in magnitude, to `magnitude`."""
        found = self.cuda.to_host(found)
        assert expected.shape == found.shape
        bound = 4 * (terms * FLOAT32 * magnitude + 2 * ROUNDOFF[self.dtype] * abs(expected)) + 1e-30
        worst = np.unravel_index(np.argmax(abs(found - expected) - bound), expected.shape)
        assert (abs(found - expected) <= bound).all(), (worst, found[worst], expected[worst])


@pytest.fixture(params=DTYPES)
def pair(cuda_sets: dict[str, Any], request: pytest.FixtureRequest) -> Pair:
    return Pair(cuda_sets[request.param], request.param)


@pytest.mark.parametrize("n", [1, 5, 17, 33, 65, 130])
@pytest.mark.parametrize(("o", "i"), [(37, 20), (64, 64), (512, 256), (300, 100), (4100, 2048)])
def test_linear(pair: Pair, n: int, o: int, i: int) -> None:
    x, x_cuda = pair.numbers(n, i)
    w, w_cuda = pair.numbers(o, i)

    found = pair.cuda.linear(x_cuda, w_cuda)

    magnitude = float((abs(x) @ abs(w).T).max())
    pair.close(pair.host.linear(x, w), found, magnitude, i)


@pytest.mark.parametrize("width", [1, 20, 257, 512, 7168])
def test_norms(pair: Pair, width: int) -> None:
    x, x_cuda = pair.numbers(9, width)
    delta, delta_cuda = pair.numbers(9, width)
    weight, weight_cuda = pair.numbers(width)

    pair.close(
        pair.host.rms_norm(x, weight, 1e-5),
        pair.cuda.rms_norm(x_cuda, weight_cuda, 1e-5),
        4.0,
        width,
    )
    total, normed = pair.cuda.add_norm(x_cuda, delta_cuda, weight_cuda, 1e-5)
    host_total, host_normed = pair.host.add_norm(x, delta, weight, 1e-5)
    np.testing.assert_array_equal(host_total, pair.cuda.to_host(total))
    pair.close(host_normed, normed, 4.0, width)


def test_embedding_is_a_copy(pair: Pair) -> None:
    table, table_cuda = pair.numbers(50, 33)
    tokens = np.array([49, 0, 7, 7])

    found = pair.cuda.to_host(pair.cuda.embed(table_cuda, pair.cuda.upload(tokens)))

    np.testing.assert_array_equal(table[tokens], found)


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


@pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("m", "e", "k", "n_group", "topk_group", "i", "s"),
    [(20, 8, 3, 4, 2, 9, 18), (256, 64, 8, 8, 4, 64, 0), (512, 384, 8, 1, 1, 128, 128)],
)
def test_experts(
    pair: Pair,
    small: ModelConfig,
    scoring_func: str,
    m: int,
    e: int,
    k: int,
    n_group: int,
    topk_group: int,
    i: int,
    s: int,
) -> None:
    config = small.replace(
        hidden_size=m, n_routed_experts=e, num_experts_per_tok=k, n_group=n_group,
        topk_group=topk_group, scoring_func=scoring_func, moe_intermediate_size=i,
    )  # fmt: skip
    n = 17
    x, x_cuda = pair.numbers(n, m)
    gate, gate_cuda = pair.numbers(e, m, scale=m**-0.5)
    bias = pair.rng.standard_normal(e).astype(np.float32) * np.float32(0.1)
    gate_up, gate_up_cuda = pair.numbers(e, 2 * i, m, scale=m**-0.5)
    down, down_cuda = pair.numbers(e, m, i, scale=i**-0.5)
    shared = shared_cuda = None
    if s:
        (a, a_cuda), (b, b_cuda) = pair.numbers(2 * s, m, scale=0.05), pair.numbers(m, s, scale=0.1)
        shared, shared_cuda = SwiGluWeights(a, b), SwiGluWeights(a_cuda, b_cuda)

    found = pair.cuda.route(x_cuda, gate_cuda, pair.cuda.upload(bias), config)
    scores = pair.cuda.to_host(found.scores)
    expected = pair.host.router_scores(x, gate, scoring_func)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=m * FLOAT32)
    ids, weights = pair.host.choose_experts(scores, bias, config)
    np.testing.assert_array_equal(ids, pair.cuda.to_host(found.ids))
    np.testing.assert_allclose(pair.cuda.to_host(found.weights), weights, rtol=1e-6)

    weights_of = MoeWeights(gate, bias, gate_up, down, shared)
    weights_cuda = MoeWeights(gate_cuda, None, gate_up_cuda, down_cuda, shared_cuda)
    out = pair.host.moe(x, Routed(scores, ids, weights), weights_of)
    unit = ROUNDOFF[pair.dtype]
    difference = abs(pair.cuda.to_host(pair.cuda.moe(x_cuda, found, weights_cuda)) - out)
    assert difference.max() <= (20 * unit + 4 * max(m, i) * FLOAT32) * abs(out).max()


TREES: dict[str, Callable[[int], list[int]]] = {
    "chain": lambda n: list(range(-1, n - 1)),
    "star": lambda n: [-1] + [0] * (n - 1),
    "mixed": lambda n: [-1, *(int(i * 0.6) for i in range(n - 1))],
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 129, 1000])
def test_layouts_and_walk(pair: Pair, n: int, shape: str) -> None:
    parents = np.array(TREES[shape](n))
    length = pair.cuda.device_int(70)
    positions, bits = pair.cuda.tree_layout(pair.cuda.upload(parents), length)
    expected_positions, expected = pair.host.tree_layout(parents, 70)

    np.testing.assert_array_equal(expected_positions, pair.cuda.to_host(positions))
    np.testing.assert_array_equal(expected, unpacked(pair.cuda.to_host(bits), n))
    positions, bits = pair.cuda.causal_layout(n, length)
    np.testing.assert_array_equal(70 + np.arange(n), pair.cuda.to_host(positions))
    np.testing.assert_array_equal(np.tri(n, dtype=bool), unpacked(pair.cuda.to_host(bits), n))

    tokens = np.arange(n) % 7 if shape == "chain" else np.arange(n)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        targets = rng.integers(0, 9, n)
        for i in range(1, n):
            if rng.random() < 0.5:
                targets[parents[i]] = tokens[i]
        stops = rng.integers(0, 9, seed % 3)
        most = int(rng.integers(1, n + 1))
        walk = pair.cuda.accept_walk(
            *(pair.cuda.upload(a) for a in (tokens, parents, targets, stops)),
            pair.cuda.device_int(most),
        )
        for mine, theirs in zip(
            pair.host.accept_walk(tokens, parents, targets, stops, most), walk, strict=True
        ):
            np.testing.assert_array_equal(mine, pair.cuda.to_host(theirs))


def unpacked(bits: np.ndarray, n: int) -> np.ndarray:
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :n].astype(bool)


@pytest.mark.parametrize("seed", range(6))
def test_best_first(pair: Pair, seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth, w = [(4, 9), (1, 300), (7, 1000), (3, 5), (5, 64), (2, 33)][seed]
    logits = (
        np.round(rng.standard_normal((depth, w)) * 2)
        if seed % 2
        else rng.standard_normal((depth, w))
    )
    logits[rng.random((depth, w)) < 0.1] = -np.inf
    if seed == 4:
        logits[3] = -np.inf
    for budget in (0, 1, 4, 16, 65, 200):
        expected = pair.host.build_best_first(logits, budget)
        found = pair.cuda.build_best_first(logits, budget)
        for mine, theirs in zip(expected, found, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_argmax_takes_the_lowest_id_and_the_first_nan(pair: Pair) -> None:
    logits = np.zeros((4, 5000), np.float32)
    logits[0, [7, 4000]] = 3
    logits[1] = -np.inf
    logits[2, [40, 9]] = np.nan
    logits[3, 4999] = 1

    found = pair.cuda.to_host(pair.cuda.argmax(pair.cuda.upload_weight(logits)))

    assert [7, 0, 9, 4999] == found.tolist()


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
