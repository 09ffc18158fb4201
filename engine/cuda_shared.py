"""Dynamic shared memory of every kernel that takes some, and the sizes that bound it."""

from __future__ import annotations

from kdtr.engine import cuda_cuts, cuda_experts, cuda_hopper, cuda_linear, cuda_router

MOST_NODES = 9_985  # the largest bucket of rows whose parents fit the shared memory asked for
MOST_NOPE, MOST_ROPE, MOST_LATENT = 256, 256, 1024  # what a model may have, by dimension

_BYTES = {
    **cuda_linear.SHARED_BYTES,
    **cuda_router.SHARED_BYTES,
    **cuda_experts.SHARED_BYTES,
    **{
        f"verify_attn_mma_{rows}{scores}": cuda_cuts.mma_shared_bytes(rows)
        for rows in cuda_cuts.MMA_ROWS
        for scores in ("", "_scores")
    },
    "verify_attn_wgmma": cuda_hopper.SHARED_BYTES,
    "verify_attn_wgmma_scores": cuda_hopper.SHARED_BYTES,
    "verify_attn_split": 16 * (2 * MOST_LATENT + MOST_ROPE) + 832,
    "tree_layout": 4 * MOST_NODES,
    "latent_query": 4 * 8 * MOST_NOPE,
}


def dynamic_shared_bytes(kernel: str) -> int:
    """Bytes, at the most that its launcher asks for on sm_120; 0 for a kernel that takes none."""
    return _BYTES.get(kernel, 0)
