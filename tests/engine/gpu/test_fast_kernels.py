"""The kernels that bfloat16 and aligned sizes take: that they run at all, and the split merge.

Elsewhere in these tests most sizes are odd, and an odd size takes a general kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda_models import WIDE, needs_hopper
from cuda_pair import FLOAT32, ROUNDOFF, TREES, Pair
from test_replays import Seen, opened, tree

from kdtr.contract import ModelConfig
from kdtr.engine import cuda_attention, cuda_hopper, cuda_modules
from kdtr.engine.cuda_cuts import Cut, choose_cut
from kdtr.engine.cuda_launcher import CudaLauncher
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.model import TreeModel
from kdtr.engine.paging import PagedCache


@contextmanager
def launched(kernels: Any) -> Iterator[set[str]]:
    """Names of the kernels that are launched meanwhile."""
    modules, names = kernels._modules, set()
    honest = modules.kernel

    def kernel(file: str, name: str) -> Any:
        names.add(name)
        return honest(file, name)

    modules.kernel = kernel
    try:
        yield names
    finally:
        del modules.kernel


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("hopper", [False, True])
def test_the_wide_model_runs_them(
    cuda_load: Callable[..., TreeModel],
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    hopper: bool,
) -> None:
    if hopper:
        needs_hopper()
    else:
        monkeypatch.setattr(cuda_modules, "HOPPER_FILES", ())
    model = cuda_load(WIDE, dtype="bfloat16", page_size=page_size)
    with launched(model._forward.kernels) as names:
        session = opened(model)
        for n in (1, 9, 33, 40):
            session.round(tree(n, n, session.root))
            session.round(tree(n, n, session.root), trace=Seen())

    assert {
        *("linear_stream_16_8", "linear_stream_16_24"),
        *(f"linear_wgmma_{rows}_1_16_4" for rows in (40, 72) if hopper),
        *(f"linear_wide_{rows}_16" for rows in (40, 65) if not hopper),
        *("latent_query_8", "latent_query_24", "latent_query_65"),
        *("linear_heads_8", "linear_heads_24", "linear_heads_65"),
        *("router_stream_8", "router_stream_24", "gate_up_stream", "down_stream"),
        *("verify_attn_mma_16", "verify_attn_mma_16_scores"),  # larger blocks are for more slots
    } <= names
    assert any(name.startswith("verify_attn_mma_merge_") for name in names)
    assert hopper == any(name.startswith("linear_wgmma") for name in names)
    general = {"linear_any", "router_any", "gate_up_any", "down_any", "verify_attn_split"}
    assert not general & names


@pytest.mark.parametrize("hopper", [False, True])
def test_the_wide_model_takes_larger_blocks_where_there_are_more_slots(
    cuda_load: Callable[..., TreeModel], monkeypatch: pytest.MonkeyPatch, hopper: bool
) -> None:
    if hopper:
        needs_hopper()
    else:
        monkeypatch.setattr(cuda_modules, "HOPPER_FILES", ())
    config = WIDE.replace(max_position_embeddings=8_192)
    model = cuda_load(config, dtype="bfloat16", page_size=64)
    session = model.open(max_len=5_000)
    for _ in range(9):  # a forward of each
        session.prefill([i * 7 % WIDE.vocab_size for i in range(500)])
    with launched(model._forward.kernels) as names:
        session.round(tree(65, 1, session.root))
        session.round(tree(65, 1, session.root), trace=Seen())

    device = cuda_attention.device_size(0)
    cut = choose_cut(65 * WIDE.num_attention_heads, 8_192, 64, device, hopper=hopper)
    kind = "wgmma" if cut.is_hoppers else f"mma_{cut.rows}"
    assert cut.rows > 16, "no such size for this device: one with more slots is wanted"
    assert {f"verify_attn_{kind}", f"verify_attn_{kind}_scores"} <= names


SPLITS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 73, 100)
LENGTH = 2300  # 73 tiles of 32 slots


@pytest.mark.parametrize("block_rows", [16, 32, cuda_hopper.ROWS])
def test_every_merge_runs_and_agrees_with_the_host(
    cuda_sets: dict[str, Any], small: ModelConfig, block_rows: int
) -> None:
    """Nine nodes of four heads: a light block too beside one of 32 rows, with splits of its own."""
    if block_rows == cuda_hopper.ROWS:
        needs_hopper()
    pair = Pair(cuda_sets["bfloat16"], "bfloat16")
    n, h, c, r = 9, 4, 512, 64
    config = small.replace(kv_lora_rank=c, qk_rope_head_dim=r, num_attention_heads=h)
    cache = PagedCache(pair.cuda, config, capacity=LENGTH + n, page_size=64)
    cache.map_slots(LENGTH + n)
    slots = np.arange(LENGTH + n)
    _, latents = pair.numbers(len(slots), c + r)
    flat = [np.ones((len(slots), r // 2), np.float32), np.zeros((len(slots), r // 2), np.float32)]
    pair.cuda.append_normed(
        cache, 1, pair.cuda.upload(slots), latents, None, pair.numbers(c)[1], 1e-5,
        *map(pair.cuda.upload, flat),
    )  # fmt: skip
    stored = pair.cuda.read_rows(cache, LENGTH + n)[1]
    query, on_device = pair.numbers(n, h, c + r, scale=0.3)
    parents = np.array(TREES["mixed"](n))
    host_cache = PagedCache(pair.host, config, capacity=LENGTH + n, page_size=64)
    host_cache.map_slots(LENGTH + n)
    pair.host.append_latents(host_cache, 1, slots, stored[:, :c], stored[:, c:])
    _, visible = pair.host.tree_layout(parents, LENGTH)
    expected = pair.host.verify_attn(
        host_cache, 1, query[..., :c], query[..., c:], Visibility(LENGTH, visible), 0.2, 32
    )
    kernels = pair.cuda
    rows = CudaLauncher(kernels, cache, None).stage(LENGTH, [0] * n, parents)
    assert n == rows.n
    over = kernels.over(rows)
    _, bits = over.tree_layout(rows.parents, rows.committed_len)

    merged = set()
    kind = "wgmma" if block_rows == cuda_hopper.ROWS else f"mma_{block_rows}"
    for splits in SPLITS:
        with launched(kernels) as names, kernels.turn:
            out = cuda_attention.verify_attn(
                lambda name: kernels._modules.kernel("verify_attn", name),
                lambda name: kernels._modules.kernel("verify_attn_mma", name),
                cuda_attention.LayerCache(cache.rows[1], cache.page_table, cache.page_size, True),
                on_device,
                cuda_attention.DeviceVisibility(rows.count, rows.committed_len, rows.n_slots, bits),
                c,
                0.2,
                32,
                rows.max_slots,
                wgmma=lambda name: kernels._modules.kernel("verify_attn_wgmma", name),
                cut=Cut(block_rows, splits),
            )
        assert f"verify_attn_{kind}" in names
        merged |= {name for name in names if "merge" in name}
        np.testing.assert_allclose(
            kernels.to_host(out),
            expected,
            rtol=0,
            atol=(4 * ROUNDOFF["bfloat16"] + 600 * FLOAT32) * abs(expected).max(),
            err_msg=str(splits),
        )
    assert {f"verify_attn_mma_merge_{parts}" for parts in (1, 2, 4, 8, 16, 32)} == merged
