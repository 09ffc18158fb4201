"""Dynamic shared memory of every kernel that takes some, at the most that its launcher asks for."""

from __future__ import annotations

from kdtr.engine import cuda_attention, cuda_experts, cuda_hopper, cuda_linear

_MOST_NODES = 9_985  # of a tree whose parents lie in shared memory (cuda_kernels.py)
_MOST_NOPE, _MOST_ROPE, _MOST_LATENT = 256, 256, 1024  # what a model may have, by dimension

_BYTES = {
    **cuda_linear.SHARED_BYTES,
    **cuda_experts.SHARED_BYTES,
    **{
        f"verify_attn_mma_{rows}{scores}": n_bytes
        for rows, n_bytes in cuda_attention.MMA_SHARED_BYTES.items()
        for scores in ("", "_scores")
    },
    "verify_attn_wgmma": cuda_hopper.SHARED_BYTES,
    "verify_attn_wgmma_scores": cuda_hopper.SHARED_BYTES,
    "verify_attn_split": 16 * (2 * _MOST_LATENT + _MOST_ROPE) + 832,
    "tree_layout": 4 * _MOST_NODES,
    "latent_query": 4 * 8 * _MOST_NOPE,
}


def dynamic_shared_bytes(kernel: str) -> int:
    """Bytes, 0 for a kernel that takes none."""
    return _BYTES.get(kernel, 0)
