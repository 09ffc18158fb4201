"""A prefill of more rows than a grid has blocks in y: cut by the launcher, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdtr.contract import ModelConfig
from kdtr.engine.cuda_attention import plain_rows_at_once
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.model import TreeModel
from kdtr.engine.paging import PagedCache

N = 70_000
SPLIT = 4096  # slots
EDGES = (0, 1, SPLIT, 65_534, 65_535, 65_536, N - 1)  # of a grid, of a split, of all


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_on_both_sides_of_every_cut(
    cuda_sets: dict[str, Any], small: ModelConfig, dtype: str
) -> None:
    """Against float64 on the host, row by row."""
    kernels, (h, c, r) = cuda_sets[dtype], (2, 16, 8)
    config = small.replace(kv_lora_rank=c, qk_rope_head_dim=r, num_attention_heads=h)
    rng = np.random.default_rng(4)
    cache = PagedCache(kernels, config, capacity=N, page_size=50)
    cache.map_slots(N)
    kernels.append_normed(
        cache,
        0,
        kernels.upload(np.arange(N)),
        kernels.upload_weight(rng.standard_normal((N, c + r)).astype(np.float32)),
        None,
        kernels.upload_weight(np.ones(c, np.float32)),
        1e-5,
        kernels.upload(np.ones((N, r // 2), np.float32)),
        kernels.upload(np.zeros((N, r // 2), np.float32)),
    )
    keys = kernels.read_rows(cache, N)[0].astype(np.float64)
    query_on_device = kernels.upload_weight(rng.standard_normal((N, h, c + r)).astype(np.float32))
    query = kernels.to_host(query_on_device).astype(np.float64)
    rows = kernels.launcher(cache, config).stage(0, [0] * N)
    over = kernels.over(rows)
    _, causal = over.causal_layout(N, rows.committed_len)

    at_once = plain_rows_at_once(N, -(-rows.max_slots // SPLIT), h, c)
    out = over.verify_attn(
        cache, 0, query_on_device[..., :c], query_on_device[..., c:],
        Visibility(rows.committed_len, causal), 0.3, SPLIT,
    )  # fmt: skip
    found = kernels.to_host(out)

    assert at_once < N, "one launch took all: nothing was cut"
    for i in {*EDGES, *(k * at_once + d for k in range(1, N // at_once + 1) for d in (-1, 0))}:
        scores = query[i] @ keys[: i + 1].T * 0.3
        p = np.exp(scores - scores.max(1, keepdims=True))
        expected = p / p.sum(1, keepdims=True) @ keys[: i + 1, :c]
        bound = (2.0**-7 if dtype == "bfloat16" else 1e-5) * abs(expected).max()
        assert abs(found[i] - expected).max() <= bound, i


def test_a_prompt_at_once_and_in_pieces(
    cuda_load: Callable[..., TreeModel], small: ModelConfig
) -> None:
    """The latents of every layer and the root, bit for bit: float32 rows know no neighbours."""
    config = small.replace(max_position_embeddings=N + 8)
    model = cuda_load(config, dtype="float32", split_size=SPLIT)
    tokens = np.random.default_rng(9).integers(0, config.vocab_size, N).tolist()
    whole, pieces = (model.open(max_len=N + 8) for _ in range(2))

    root = whole.prefill(tokens)
    for first in range(0, N, 30_000):
        last = pieces.prefill(tokens[first : first + 30_000])

    assert last == root
    latents = [
        session._forward.kernels.read_rows(session._cache, N)  # type: ignore[union-attr]
        for session in (whole, pieces)
    ]
    assert np.isfinite(latents[0]).all()
    np.testing.assert_array_equal(*latents)
