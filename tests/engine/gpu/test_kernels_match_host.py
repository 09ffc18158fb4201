"""Norms, projections, experts and argmax of the CUDA set against their host twins."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_pair import FLOAT32, ROUNDOFF, Pair

from kdtr.contract import ModelConfig
from kdtr.engine.kernel_set import Routed
from kdtr.engine.weights import MoeWeights, SwiGluWeights


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


def test_argmax_takes_the_lowest_id_and_the_first_nan(pair: Pair) -> None:
    logits = np.zeros((4, 5000), np.float32)
    logits[0, [7, 4000]] = 3
    logits[1] = -np.inf
    logits[2, [40, 9]] = np.nan
    logits[3, 4999] = 1

    found = pair.cuda.to_host(pair.cuda.argmax(pair.cuda.upload_weight(logits)))

    assert [7, 0, 9, 4999] == found.tolist()
