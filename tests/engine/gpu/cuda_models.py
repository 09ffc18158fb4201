"""Models of a GPU's tests beside the engine's small one: those that the fast kernels take.

The fast kernels want rows of whole 16 bytes in every projection, kv_lora_rank 512 and
qk_rope_head_dim 64; the small model's odd sizes take the general ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.golden import record_bundle
from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import ModelConfig
from kdtr.engine.cuda_attention import device_size
from kdtr.engine.cuda_cuts import RESERVED_BYTES, mma_shared_bytes

# benchmarks/kernels/small_rounds.py has the same.
WIDE = ModelConfig.tiny().replace(
    num_hidden_layers=2,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    num_attention_heads=8,
)

# For a bundle, as the truth is slow. Nine nodes of four heads: a block of 32 rows and a light one.
NARROW = WIDE.replace(
    vocab_size=64,
    hidden_size=64,
    num_attention_heads=4,
    q_lora_rank=32,
    qk_nope_head_dim=16,
    v_head_dim=16,
    intermediate_size=64,
    moe_intermediate_size=16,
    n_routed_experts=4,  # every one is chosen: no choice is a near tie in bfloat16
    num_experts_per_tok=4,
    n_group=1,
    topk_group=1,
)
_SEED = 7
_NINE = (-1, 0, 0, 1, 1, 2, 2, 3, 5)
_FORTY = (-1, *((i - 1) // 2 for i in range(1, 40)))
_PROMPT = tuple(i * 7 % NARROW.vocab_size for i in range(130))  # five tiles of the attention
_ROOT = Planted((-1,))
_NINES = (Planted(_NINE, (0, 2, 5, 8)), _ROOT, Planted(_NINE, (0, 1, 3)))
_FORTIES = (Planted(_FORTY, (0, 2, 6, 14, 30)), _NINES[0], Planted(_FORTY, (0, 1, 4, 9)))


def needs_hopper() -> None:
    """Skips the test on a device that is none, with the reason."""
    found = pytest.importorskip("cupy").cuda.Device().compute_capability
    if found != "90":
        pytest.skip(f"kernels of wgmma are Hopper's (90); this device has {found}")


def needs_three_stages() -> None:
    """Skips the test where an SM has not the memory for three stages of the attention."""
    needed = mma_shared_bytes(16, 3) + RESERVED_BYTES
    found = device_size(pytest.importorskip("cupy").cuda.Device().id).shared_bytes
    if found < needed:
        pytest.skip(f"three stages take {needed} bytes of an SM; this device's have {found}")


def record_narrow(path: Path) -> Path:
    """A bundle whose cases run the fast kernels: 10 s, 40 MB.

    Several, because a case in which bfloat16 turns a near tie asserts nothing.
    """
    rules = ("MASK-2", "MLA-3", "COMMIT-1", "LOSSLESS")
    plans = (
        CasePlan("roots", "plain decoding", rules, (_ROOT,) * 5, (_PROMPT[:40],)),
        CasePlan("nines", "smaller trees behind several tiles", rules, _NINES, (_PROMPT,)),
        CasePlan("forties", "larger trees, a smaller between", rules, _FORTIES, (_PROMPT,)),
    )
    record_bundle(path, {"name": "narrow"}, NARROW, seed_tensors(NARROW, _SEED), plans)
    return path
