"""The one forward: tokens, positions and mask in, logits out (FWD-1 to FWD-6)."""

from __future__ import annotations

import numpy as np

from kdtr.contract import ModelConfig, Trace
from kdtr.reference.arithmetic import Arithmetic
from kdtr.reference.attention import attend, latents, project_out, queries
from kdtr.reference.cache import LatentCache
from kdtr.reference.moe import choose_experts, expert_weights, mix_experts, router_scores, swiglu
from kdtr.reference.norm import rms_norm
from kdtr.reference.rotary import rotary_tables, softmax_scale
from kdtr.reference.weights import LayerWeights, ModelWeights, MoeWeights


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
    cache.begin(tokens, positions)
    trace("tokens", None, tokens)
    trace("positions", None, positions)
    trace("mask", None, mask)
    trace("slots", None, cache.committed_len + np.arange(len(tokens)))
    cos, sin = rotary_tables(config, positions)  # [n, r/2]
    hidden = weights.embedding[tokens]  # [n, m]
    trace("embedding", None, hidden)
    for i, layer in enumerate(weights.layers):
        x = rms_norm(arithmetic, hidden, layer.input_norm, config.rms_norm_eps)
        hidden = hidden + _attention(arithmetic, config, layer, cache, i, x, mask, cos, sin, trace)
        x = rms_norm(arithmetic, hidden, layer.post_attention_norm, config.rms_norm_eps)
        hidden = hidden + _mlp(arithmetic, config, layer, i, x, trace)
        trace("hidden", i, hidden)
    hidden = rms_norm(arithmetic, hidden, weights.norm, config.rms_norm_eps)
    trace("final_hidden", None, hidden)
    logits = arithmetic.contract("nm,mw->nw", hidden, weights.lm_head)
    trace("logits", None, logits)
    return logits


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
    trace: Trace,
) -> np.ndarray:
    q_nope, q_pe = queries(arithmetic, config, layer.attention, x, cos, sin)
    trace("q_nope", i, q_nope)
    trace("q_pe", i, q_pe)
    c_kv, k_pe = latents(arithmetic, config, layer.attention, x, cos, sin)
    trace("c_kv", i, c_kv)
    trace("k_pe", i, k_pe)
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
    trace("scores", i, scores)
    trace("out_latent", i, out_latent)
    out = project_out(arithmetic, layer.attention, out_latent)
    trace("attn_out", i, out)
    return out


def _mlp(
    arithmetic: Arithmetic,
    config: ModelConfig,
    layer: LayerWeights,
    i: int,
    x: np.ndarray,
    trace: Trace,
) -> np.ndarray:
    if isinstance(layer.mlp, MoeWeights):
        scores = router_scores(arithmetic, config, layer.mlp, x)
        trace("router_scores", i, scores)
        ids = choose_experts(config, scores, layer.mlp.bias)
        trace("expert_ids", i, ids)
        weights = expert_weights(arithmetic, config, scores, ids)
        trace("expert_weights", i, weights)
        out = mix_experts(arithmetic, layer.mlp, x, ids, weights)
    else:
        out = swiglu(arithmetic, layer.mlp, x)
    trace("mlp_out", i, out)
    return out
