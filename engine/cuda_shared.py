"""Dynamic shared memory of every kernel that takes some, at the most that its launcher asks for."""

from __future__ import annotations

from kdtr.engine import cuda_attention, cuda_experts, cuda_linear

_MOST_NODES = 10_000  # of a tree whose parents lie in shared memory
_MOST_NOPE = 256  # qk_nope_head_dim

_BYTES = {
    **cuda_linear.SHARED_BYTES,
    **cuda_experts.SHARED_BYTES,
    **{
        f"verify_attn_mma_{rows}{scores}": n_bytes
        for rows, n_bytes in cuda_attention.MMA_SHARED_BYTES.items()
        for scores in ("", "_scores")
    },
    "tree_layout": 4 * _MOST_NODES,
    "latent_query": 4 * 8 * _MOST_NOPE,
}


def dynamic_shared_bytes(kernel: str) -> int:
    """Bytes, 0 for a kernel that takes none."""
    return _BYTES.get(kernel, 0)
