"""The one forward: tokens, positions and mask in, logits out (FWD-1 to FWD-6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kdtr.contract import ModelConfig, Trace
from kdtr.reference.arithmetic import Arithmetic
from kdtr.reference.attention import attend, latents, project_out, queries
from kdtr.reference.cache import LatentCache
from kdtr.reference.moe import choose_experts, expert_weights, mix_experts, router_scores, swiglu
from kdtr.reference.norm import rms_norm
from kdtr.reference.rotary import rotary_tables, softmax_scale
from kdtr.reference.weights import LayerWeights, ModelWeights, MoeWeights

Keep: TypeAlias = Callable[[str, int | None, np.ndarray], np.ndarray]


def forward(
    arithmetic: Arithmetic,
    config: ModelConfig,
    weights: ModelWeights,
    cache: LatentCache,
    tokens: np.ndarray,
    positions: np.ndarray,
    mask: np.ndarray,
    trace: Trace,
) -> np.ndarray:
    """Logits [n, w] of tokens [n] at positions [n] under mask [n, L + n].

    Their rows go behind the cache's L committed ones; L stays. Inputs are checked by the caller,
    except for the capacity: CacheError, before anything is written.
    """

    def keep(stage: str, layer: int | None, x: np.ndarray) -> np.ndarray:
        """Shows a stage; what follows computes with what the arithmetic stores of it."""
        x = arithmetic.stored(stage, layer, x)
        trace(stage, layer, x)
        return x

    cache.begin(tokens, positions)
    trace("tokens", None, tokens)
    trace("positions", None, positions)
    trace("mask", None, mask)
    trace("slots", None, cache.committed_len + np.arange(len(tokens)))
    cos, sin = rotary_tables(config, positions)  # [n, r/2]
    hidden = keep("embedding", None, weights.embedding[tokens])  # [n, m]
    for i, layer in enumerate(weights.layers):
        x = rms_norm(arithmetic, hidden, layer.input_norm, config.rms_norm_eps)
        attn_out = _attention(arithmetic, config, layer, cache, i, x, mask, cos, sin, keep)
        hidden = arithmetic.stored("residual", i, hidden + attn_out)
        x = rms_norm(arithmetic, hidden, layer.post_attention_norm, config.rms_norm_eps)
        hidden = keep("hidden", i, hidden + _mlp(arithmetic, config, layer, i, x, keep))
    hidden = rms_norm(arithmetic, hidden, weights.norm, config.rms_norm_eps)
    hidden = keep("final_hidden", None, hidden)
    return keep("logits", None, arithmetic.contract("nm,mw->nw", hidden, weights.lm_head))


def _attention(
    arithmetic: Arithmetic,
    config: ModelConfig,
    layer: LayerWeights,
    cache: LatentCache,
    i: int,
    x: np.ndarray,
    mask: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    keep: Keep,
) -> np.ndarray:
    q_nope, q_pe = queries(arithmetic, config, layer.attention, x, cos, sin)
    q_nope = keep("q_nope", i, q_nope)
    q_pe = keep("q_pe", i, q_pe)
    c_kv, k_pe = latents(arithmetic, config, layer.attention, x, cos, sin)
    c_kv = keep("c_kv", i, c_kv)
    k_pe = keep("k_pe", i, k_pe)
    cache.append(i, c_kv, k_pe)
    scores, out_latent = attend(
        arithmetic,
        q_nope,
        q_pe,
        *cache.rows(i),
        visible=mask,
        w_kc=layer.attention.w_kc,
        scale=softmax_scale(config),
    )
    keep("scores", i, scores)
    out_latent = keep("out_latent", i, out_latent)
    return keep("attn_out", i, project_out(arithmetic, layer.attention, out_latent))


def _mlp(
    arithmetic: Arithmetic,
    config: ModelConfig,
    layer: LayerWeights,
    i: int,
    x: np.ndarray,
    keep: Keep,
) -> np.ndarray:
    if isinstance(layer.mlp, MoeWeights):
        scores = keep("router_scores", i, router_scores(arithmetic, config, layer.mlp, x))
        ids = keep("expert_ids", i, choose_experts(config, scores, layer.mlp.bias))
        weights = keep("expert_weights", i, expert_weights(arithmetic, config, scores, ids))
        out = mix_experts(arithmetic, layer.mlp, x, ids, weights)
    else:
        out = swiglu(arithmetic, layer.mlp, x)
    return keep("mlp_out", i, out)
