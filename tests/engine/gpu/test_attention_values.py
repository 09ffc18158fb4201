"""Infinities and NaN in a tree's own rows: who sees them must show them, who does not is clean.

Expected: float64 on the host, straight from the definition. Of an infinity whose score is -inf the
weight is 0, and 0 times infinity is NaN: in that column, and no other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.engine import cuda_attention, cuda_hopper
from kdtr.engine.cuda_cuts import Cut

C, R, SCALE = 512, 64, 0.05
PAGE = 64
COLUMN = 300  # of the latent, where the hostile value lies
CUTS = {"mma 16": Cut(16, 3), "mma 32": Cut(32, 3), "wgmma": Cut(cuda_hopper.ROWS, 3)}
KINDS = ("plain float32", "plain bfloat16", *CUTS)


# Fills the shared memory of every SM with NaN, as whoever ran there before may have left it.
POISON = """
extern "C" __global__ void poison(int n) {
    extern __shared__ unsigned int memory[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) asm volatile(
        "st.volatile.shared.u32 [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(memory + i)),
        "r"(0x7fc07fc0u) : "memory");
}
"""


def poison_shared_memory() -> None:
    """On the current stream."""
    import cupy as cp

    attributes = cp.cuda.Device().attributes
    n_bytes = attributes["MaxSharedMemoryPerBlockOptin"]
    kernel = cp.RawKernel(POISON, "poison")
    kernel.max_dynamic_shared_size_bytes = n_bytes
    kernel.preferred_shared_memory_carveout = 100
    blocks = (attributes["MultiProcessorCount"],)
    kernel(blocks, (256,), (np.int32(n_bytes // 4),), shared_mem=n_bytes)


def attend(
    sets: dict[str, Any], kind: str, query: np.ndarray, rows: np.ndarray, block: np.ndarray
) -> np.ndarray:
    """query [n, h, 576], rows [s, 576], block [n, n] over the last n slots -> out [n, h, 512]."""
    import cupy as cp

    kernels = sets["float32" if kind == "plain float32" else "bfloat16"]
    modules = kernels._modules
    if kind == "wgmma" and not modules.has("verify_attn_wgmma"):
        pytest.skip("not a Hopper")
    n, s = len(query), len(rows)
    pages = -(-s // PAGE)
    physical = np.full((pages * PAGE, C + R), np.nan, np.float32)
    physical[:s] = rows
    bits = np.zeros((n, -(-n // 32) * 32), bool)
    bits[:, :n] = block
    with kernels.turn:
        stored = kernels.upload_weight(physical)
        swizzled = not kind.startswith("plain")
        if swizzled:
            stored = cuda_attention.swizzle(stored)
        poison_shared_memory()
        out = cuda_attention.verify_attn(
            partial(modules.kernel, "verify_attn"),
            partial(modules.kernel, "verify_attn_mma"),
            cuda_attention.LayerCache(stored, cp.arange(pages, dtype=cp.int64), PAGE, swizzled),
            kernels.upload_weight(query),
            cuda_attention.DeviceVisibility(
                *(cp.asarray([x], cp.int64) for x in (n, s - n, s)),
                cp.asarray(np.packbits(bits, axis=1, bitorder="little").view(np.uint32)),
            ),
            *(C, SCALE, 32, pages * PAGE, None),
            wgmma=partial(modules.kernel, "verify_attn_wgmma"),
            cut=CUTS.get(kind),
        )
    return np.asarray(kernels.to_host(out))


def expected_of(query: np.ndarray, rows: np.ndarray, seen: np.ndarray) -> np.ndarray:
    q, k = query.astype(np.float64), rows.astype(np.float64)
    with np.errstate(invalid="ignore"):
        scores = np.where(seen[:, None], np.einsum("nhe,se->nhs", q, k) * SCALE, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        # A slot that is not seen is not read: 0 in its place, since 0 times NaN is NaN.
        values = np.where(seen[:, :, None], k[None, :, :C], 0.0)
        return np.asarray(np.einsum("nhs,nsc->nhc", p, values))


@pytest.mark.parametrize("committed", [30, 40, 95, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_the_last_slot_is_not_used(
    cuda_sets: dict[str, Any], kind: str, committed: int
) -> None:
    """Tiles that end with the first slot, in the middle, and whole."""
    check_behind_the_last_slot(cuda_sets, kind, committed)


def check_behind_the_last_slot(sets: dict[str, Any], kind: str, committed: int) -> None:
    """Two nodes behind so many slots; NaN in the rest of the page, and in shared memory."""
    rng, n, h = np.random.default_rng(committed), 2, 8
    numbers = partial(_stored, rng, kind)
    query, rows = numbers(n, h, C + R), numbers(committed + n, C + R)
    block = np.tril(np.ones((n, n), bool))
    seen = np.concatenate([np.ones((n, committed), bool), block], axis=1)

    found = attend(sets, kind, query, rows, block)

    expected = expected_of(query, rows, seen)
    bound = (2.0**-6 if kind != "plain float32" else 1e-5) * abs(expected).max()
    assert abs(found - expected).max() <= bound


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("n", [2, 9, 40])
@pytest.mark.parametrize("committed", [40, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows_where_it_is_seen(
    cuda_sets: dict[str, Any], kind: str, committed: int, n: int, value: float
) -> None:
    """Node 1 holds it; its children are the odd nodes. Head 0 scores it -inf, 1 +inf, 2 NaN."""
    rng, h = np.random.default_rng(n), 8
    numbers = partial(_stored, rng, kind)
    query, rows = numbers(n, h, C + R), numbers(committed + n, C + R)
    sign = -1.0 if value < 0 else 1.0
    query[:, :3, COLUMN] = -sign, sign, 0.0
    rows[committed + 1, COLUMN] = value
    block = np.eye(n, dtype=bool)
    block[:, 0] = True
    block[3::2, 1] = True
    seen = np.concatenate([np.ones((n, committed), bool), block], axis=1)

    found = attend(cuda_sets, kind, query, rows, block)

    expected = expected_of(query, rows, seen)
    np.testing.assert_array_equal(np.isnan(expected), np.isnan(found))
    finite = ~np.isnan(expected)
    assert finite[1, 0].any() == (not np.isnan(value)), "a weight of 0 harms one column alone"
    assert not finite[1, 0, COLUMN], "the value that node 1 holds is seen by node 1"
    assert finite[0].all(), "and not by the root"
    bound = (2.0**-6 if kind != "plain float32" else 1e-5) * abs(expected[finite]).max()
    assert abs(found - expected)[finite].max() <= bound


def _stored(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    x = rng.standard_normal(shape).astype(np.float32)
    return x if kind == "plain float32" else x.astype(ml_dtypes.bfloat16).astype(np.float32)
