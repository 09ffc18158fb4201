"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

One function per group of equations; the row of the cache is (c_kv, k_pe), and nothing per head
is stored.
"""

from __future__ import annotations

import numpy as np

from kdtr.contract import ModelConfig
from kdtr.reference.arithmetic import Arithmetic
from kdtr.reference.norm import rms_norm
from kdtr.reference.rotary import rotate
from kdtr.reference.weights import AttentionWeights


def queries(
    arithmetic: Arithmetic,
    config: ModelConfig,
    weights: AttentionWeights,
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """MLA-1 and MLA-7, equations 37 to 40: the queries of x [n, m].

    cos, sin [n, r/2] at the rows' positions. Returns q_nope [n, h, d] and q_pe [n, h, r].
    """
    if weights.q_a is None or weights.q_a_norm is None:
        q = arithmetic.contract("nm,mo->no", x, weights.q)  # [n, h (d+r)]
    else:
        low = arithmetic.contract("nm,mo->no", x, weights.q_a)  # [n, q_lora_rank]
        low = rms_norm(arithmetic, low, weights.q_a_norm, config.latent_norm_eps)
        q = arithmetic.contract("nm,mo->no", low, weights.q)
    q = q.reshape(len(x), config.num_attention_heads, config.qk_head_dim)
    q_nope, q_pe = np.split(q, [config.qk_nope_head_dim], axis=-1)
    q_pe = rotate(q_pe, cos[:, None], sin[:, None], interleave=config.rope_interleave)
    return q_nope, q_pe


def latents(
    arithmetic: Arithmetic,
    config: ModelConfig,
    weights: AttentionWeights,
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """MLA-2, equations 41 and 43: the rows that x [n, m] adds to the cache.

    Returns c_kv [n, c], normed, and k_pe [n, r], rotated and shared by all heads.
    """
    kv = arithmetic.contract("nm,mo->no", x, weights.kv_a)  # [n, c + r]
    c_kv, k_pe = np.split(kv, [config.kv_lora_rank], axis=-1)
    c_kv = rms_norm(arithmetic, c_kv, weights.kv_a_norm, config.latent_norm_eps)
    return c_kv, rotate(k_pe, cos, sin, interleave=config.rope_interleave)


def attend(
    arithmetic: Arithmetic,
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    c_kv: np.ndarray,
    k_pe: np.ndarray,
    visible: np.ndarray,
    w_kc: np.ndarray,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """MLA-3: attention of every row over the slots it sees, in latent space.

    q_nope [n, h, d]   q_pe [n, h, r]   c_kv [s, c]   k_pe [s, r]   visible [n, s] bool
    w_kc [h, d, c]     scale  softmax_scale(config)
    Returns scores [n, h, s], -inf where invisible, and out_latent [n, h, c].

    Each row gathers the slots it sees: an invisible one may hold NaN (MASK-3), and the order of
    a row's sums does not depend on what lies between its slots, so a tree row has the bits of
    the plain run over its path (FWD-4). Every row sees at least itself (MASK-1).
    """
    q_latent = arithmetic.contract("nhd,hdc->nhc", q_nope, w_kc)
    scores = np.full((*q_nope.shape[:2], len(c_kv)), -np.inf)  # [n, h, s]
    out_latent = np.empty_like(q_latent)  # [n, h, c]
    for i, row in enumerate(visible):
        seen = np.flatnonzero(row)  # [t] slots, ascending
        raw = arithmetic.contract("hc,tc->ht", q_latent[i], c_kv[seen])
        raw = raw + arithmetic.contract("hr,tr->ht", q_pe[i], k_pe[seen])
        score = scale * raw  # [h, t]
        e = arithmetic.exp(score - score.max(axis=-1, keepdims=True))
        p = e / arithmetic.sum(e)[:, None]
        scores[i][:, seen] = score
        out_latent[i] = arithmetic.contract("ht,tc->hc", p, c_kv[seen])
    return scores, out_latent


def project_out(
    arithmetic: Arithmetic, weights: AttentionWeights, out_latent: np.ndarray
) -> np.ndarray:
    """MLA-3: out_latent [n, h, c] through w_vc and o_proj; returns attn_out [n, m]."""
    out = arithmetic.contract("nhc,hcv->nhv", out_latent, weights.w_vc)
    return arithmetic.contract("no,om->nm", out.reshape(len(out), -1), weights.o)
