"""The same attention in expanded form: keys and values per head, as the model is trained.

It shares no step with `attention.attend` but the arithmetic: per-head keys and values are made
from the latents first, and invisible scores are masked instead of cut. MLA-3 says that both
agree to rounding; a test holds them together.
"""

from __future__ import annotations

import numpy as np

from kdtr.reference.arithmetic import Arithmetic


def attend_expanded(
    arithmetic: Arithmetic,
    q_nope: np.ndarray,
    q_pe: np.ndarray,
    c_kv: np.ndarray,
    k_pe: np.ndarray,
    visible: np.ndarray,
    w_kc: np.ndarray,
    w_vc: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Equations 41 to 47 of arXiv 2405.04434 for q_nope [n, h, d] over c_kv [s, c].

    Shapes as in `attention.attend`, w_vc [h, c, v]. Returns the heads' outputs [n, h, v].
    """
    h, r = q_pe.shape[1:]
    k_nope = arithmetic.contract("sc,hdc->shd", c_kv, w_kc)
    v = arithmetic.contract("sc,hcv->shv", c_kv, w_vc)
    k_shared = np.broadcast_to(k_pe[:, None], (len(k_pe), h, r))
    q = np.concatenate([q_nope, q_pe], axis=-1)  # [n, h, d + r]
    k = np.concatenate([k_nope, k_shared], axis=-1)  # [s, h, d + r]
    scores = scale * arithmetic.contract("nhd,shd->nhs", q, k)
    scores = np.where(visible[:, None], scores, -np.inf)
    e = arithmetic.exp(scores - scores.max(axis=-1, keepdims=True))
    p = e / arithmetic.sum(e)[..., None]
    return arithmetic.contract("nhs,shv->nhv", p, v)
