"""A forward in plain float64 that can be told to go wrong: what a guess would show.

It is written for guessing alone: short, with BLAS, and exact to some 1e-13. The truth is
`kdtr.reference`, and the two share no code. `Workings` are the places at which engines differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log, pi

import numpy as np

from kdtr.conformance.diagnosis_scene import Key
from kdtr.conformance.expert_choice import choose_experts
from kdtr.contract import SIGMOID, ModelConfig

Array = np.ndarray
Weight = Callable[[str], Array]
# Multiplications. OpenBLAS takes a second thread for a matrix product of more, for a row of more.
_UNTHREADED, _UNTHREADED_ROW = 2**18, 9_000
_SMALL = 10**7


def mscale(factor: float, m: float) -> float:
    """YaRN's (MLA-4)."""
    return 0.1 * m * log(factor) + 1 if factor > 1 else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """MLA-4."""
    yarn = config.yarn
    twice = mscale(yarn.factor, yarn.mscale_all_dim) if yarn and yarn.mscale_all_dim else 1.0
    return config.qk_head_dim**-0.5 * twice**2


def amplitude(config: ModelConfig) -> float:
    """MLA-5."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    return mscale(yarn.factor, 1.0)


def frequencies(config: ModelConfig) -> Array:
    """Radians per position of each pair [r/2] (MLA-6)."""
    half, yarn = config.qk_rope_head_dim // 2, config.yarn
    plain: Array = config.rope_theta ** (-np.arange(half) / half)
    if yarn is None:
        return plain

    def dim(turns: float) -> float:
        full = yarn.original_max_position_embeddings / (turns * 2 * pi)
        return 2 * half * log(full) / (2 * log(config.rope_theta))

    low, high = max(floor(dim(yarn.beta_fast)), 0), min(ceil(dim(yarn.beta_slow)), 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / (high - low or 0.001), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rms_norm(kind: str, x: Array, weight: Array, eps: float) -> Array:
    """NORM-1. kind: input, q_a, kv_a, post or final, for those that go wrong in one of them."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def times(x: Array, weight: Array) -> Array:
    """x [n, m] through weight [o, m], to [n, o].

    A small product goes without the threads of BLAS, which cost more than they bring where they
    wait: in parts that are too small for them.
    """
    n_products = len(x) * weight.size
    if n_products <= _UNTHREADED_ROW or n_products > _SMALL:
        return x @ weight.T
    if len(x) == 1:
        return np.einsum("nm,om->no", x, weight)
    n_parts = ceil(n_products / _UNTHREADED)
    if n_parts == 1:
        return x @ weight.T
    return np.concatenate([x @ part.T for part in np.array_split(weight, n_parts)], axis=1)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def as_computed(x: Array) -> Array:
    return x


def turned(
    x: Array, angle: Array, amplitude: float, table: Callable[[Array], Array] = as_computed
) -> Array:
    """Half-split x [..., r], each pair turned by angle [..., r/2]; table: cos and sin as stored."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = table(amplitude * np.cos(angle)), table(amplitude * np.sin(angle))
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotate(workings: Workings, kind: str, x: Array, positions: Array) -> Array:
    """MLA-7: x [n, ..., r] as projected to half-split and rotated. kind: q or k."""
    if workings.interleave:
        x = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    angle = workings.angle(positions[:, None], workings.frequencies)  # [n, r/2]
    angle = angle.reshape(len(x), *(1 for _ in x.shape[1:-1]), -1)
    return turned(x, angle, workings.amplitude, workings.table)


def split_latent(config: ModelConfig, kv: Array) -> tuple[Array, Array]:
    """MLA-2: kv [n, c + r] to the latent and the key."""
    return kv[:, : config.kv_lora_rank], kv[:, config.kv_lora_rank :]


def split_query(config: ModelConfig, q: Array) -> tuple[Array, Array]:
    """MLA-1: q [n, h, d + r], the nope part first."""
    return q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]


def append(old: Array, new: Array, committed_len: int) -> Array:
    """SLOT-1: rows old [S, c + r] with those of the forward [n, c + r] behind the committed."""
    rows = old.copy()
    rows[committed_len : committed_len + len(new)] = new
    return rows


def choose(config: ModelConfig, scores: Array, bias: Array) -> Array:
    """MOE-2: ids [n, k], ascending."""
    return choose_experts(config, scores + bias)


def expert_weights(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
    """MOE-3: [n, k]."""
    weights = np.take_along_axis(scores, ids, axis=1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling_factor


def router(config: ModelConfig, logits: Array) -> Array:
    """MOE-1: unbiased scores [n, e]."""
    return sigmoid(logits) if config.scoring_func == SIGMOID else softmax(logits)


@dataclass(frozen=True, slots=True, eq=False)
class Workings:
    """How a forward is done; each field is a place at which it may be done otherwise.

    angle        positions [n, 1] and frequencies [r/2] to angles [n, r/2]
    table        what is kept of cos and sin
    key_heads    and value_heads: which head's w_kc and w_vc each head computes with
    attention    scores [n, h, S], -inf where invisible, to the weights of the values
    also_reads   slots that the sum over the values reads besides the visible ones
    held         what attention reads of the rows [S, c + r] of a layer
    used         the weights with which experts are summed
    shared       factor of the shared expert
    """

    config: ModelConfig
    scale: float
    amplitude: float
    frequencies: Array
    interleave: bool
    angle: Callable[[Array, Array], Array] = np.multiply
    table: Callable[[Array], Array] = as_computed
    embed: Callable[[Array, Array], Array] = lambda x, positions: x
    norm: Callable[[str, Array, Array, float], Array] = rms_norm
    split_query: Callable[[ModelConfig, Array], tuple[Array, Array]] = split_query
    split_latent: Callable[[ModelConfig, Array], tuple[Array, Array]] = split_latent
    rotate: Callable[[Workings, str, Array, Array], Array] = rotate
    key_heads: Callable[[Array], Array] = lambda heads: heads
    value_heads: Callable[[Array], Array] = lambda heads: heads
    append: Callable[[Array, Array, int], Array] = append
    attention: Callable[[Array], Array] = softmax
    also_reads: tuple[int, ...] = ()
    router: Callable[[ModelConfig, Array], Array] = router
    choose: Callable[[ModelConfig, Array, Array], Array] = choose
    weigh: Callable[[ModelConfig, Array, Array, Array], Array] = expert_weights
    used: Callable[[Array, Array, Array], Array] = lambda weights, scores, ids: weights
    shared: float = 1.0

    @classmethod
    def right(cls, config: ModelConfig) -> Workings:
        """As the rules say."""
        return cls(
            config,
            softmax_scale(config),
            amplitude(config),
            frequencies(config),
            config.rope_interleave,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One forward to be done: what goes in, over which rows, and how.

    rows  [l, S, c + r] of all slots that were ever written, S >= L + n
    """

    workings: Workings
    tokens: Array
    positions: Array
    mask: Array
    rows: Array
    committed_len: int


ROWS: Key = ("rows", None)


def forward(weight: Weight, setting: Setting, until: Key | None = None) -> dict[Key, Array]:
    """All stages by (name, layer), up to `until`; beside them ROWS, new rows [l, n, c + r].

    These are known before the last layer attends: who wants no more need not wait for the logits.
    """
    how, config = setting.workings, setting.workings.config
    shown: dict[Key, Array] = {}
    hidden = how.embed(weight("model.embed_tokens.weight")[setting.tokens], setting.positions)
    shown["embedding", None] = hidden
    fresh = []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        fresh.append(_projected(weight, prefix, layer, setting, hidden, shown))
        if layer == config.num_hidden_layers - 1:
            shown[ROWS] = np.stack(fresh)
        if until is not None and until in shown:
            return shown
        attn_out = _attention(weight, prefix, layer, setting, fresh[-1], shown)
        if until is not None and until in shown:
            return shown
        hidden = hidden + attn_out
        x = how.norm(
            "post", hidden, weight(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps
        )
        hidden = hidden + _mlp(weight, prefix + "mlp.", layer, how, x, shown)
        shown["hidden", layer] = hidden
        if until is not None and until in shown:
            return shown
    hidden = how.norm("final", hidden, weight("model.norm.weight"), config.rms_norm_eps)
    shown["final_hidden", None] = hidden
    if until == ("final_hidden", None):
        return shown
    shown["logits", None] = times(hidden, weight("lm_head.weight"))
    return shown


def _projected(
    weight: Weight,
    prefix: str,
    layer: int,
    setting: Setting,
    hidden: Array,
    shown: dict[Key, Array],
) -> Array:
    """Queries, which are shown, and the new rows [n, c + r], which are too, half by half."""
    how, config, n = setting.workings, setting.workings.config, len(hidden)
    own = prefix + "self_attn."
    x = how.norm("input", hidden, weight(prefix + "input_layernorm.weight"), config.rms_norm_eps)
    if config.q_lora_rank is None:
        q = times(x, weight(own + "q_proj.weight"))
    else:
        low = times(x, weight(own + "q_a_proj.weight"))
        low = how.norm("q_a", low, weight(own + "q_a_layernorm.weight"), config.latent_norm_eps)
        q = times(low, weight(own + "q_b_proj.weight"))
    q_nope, q_pe = how.split_query(config, q.reshape(n, config.num_attention_heads, -1))
    q_pe = how.rotate(how, "q", q_pe, setting.positions)
    kv = times(x, weight(own + "kv_a_proj_with_mqa.weight"))
    c_kv, k_pe = how.split_latent(config, kv)
    c_kv = how.norm("kv_a", c_kv, weight(own + "kv_a_layernorm.weight"), config.latent_norm_eps)
    k_pe = how.rotate(how, "k", k_pe, setting.positions)
    shown["q_nope", layer], shown["q_pe", layer] = q_nope, q_pe
    shown["c_kv", layer], shown["k_pe", layer] = c_kv, k_pe
    return np.concatenate([c_kv, k_pe], axis=-1)


def _attention(
    weight: Weight,
    prefix: str,
    layer: int,
    setting: Setting,
    new: Array,
    shown: dict[Key, Array],
) -> Array:
    """Over the rows that were there and the `new` ones, with the queries that were shown."""
    how, config, n = setting.workings, setting.workings.config, len(new)
    own = prefix + "self_attn."
    rows = how.append(setting.rows[layer], new, setting.committed_len)  # [S, c + r]
    shown["held", layer] = rows
    q_nope, q_pe = shown["q_nope", layer], shown["q_pe", layer]
    scores, out_latent = attend(weight, own, setting, q_nope, q_pe, rows)
    shown["scores", layer], shown["out_latent", layer] = scores, out_latent
    kv_b = weight(own + "kv_b_proj.weight").reshape(
        config.num_attention_heads, -1, config.kv_lora_rank
    )
    w_vc = how.value_heads(kv_b[:, config.qk_nope_head_dim :])  # [h, v, c]
    out = np.einsum("nhc,hvc->nhv", out_latent, w_vc).reshape(n, -1)
    attn_out: Array = times(out, weight(own + "o_proj.weight"))
    shown["attn_out", layer] = attn_out
    return attn_out


def raw_scores(
    weight: Weight, own: str, how: Workings, q_nope: Array, q_pe: Array, rows: Array
) -> Array:
    """MLA-3: scaled scores [n, h, S] of every slot, visible or not."""
    config = how.config
    kv_b = weight(own + "kv_b_proj.weight").reshape(
        config.num_attention_heads, -1, config.kv_lora_rank
    )
    w_kc = how.key_heads(kv_b[:, : config.qk_nope_head_dim])  # [h, d, c]
    query = np.concatenate([np.einsum("nhd,hdc->nhc", q_nope, w_kc), q_pe], axis=-1)
    return how.scale * np.einsum("nhx,sx->nhs", query, rows)


def attend(
    weight: Weight, own: str, setting: Setting, q_nope: Array, q_pe: Array, rows: Array
) -> tuple[Array, Array]:
    how, n_slots = setting.workings, setting.mask.shape[1]
    every = raw_scores(weight, own, how, q_nope, q_pe, rows)
    visible = np.zeros((len(q_nope), len(rows)), dtype=bool)
    visible[:, :n_slots] = setting.mask
    scores = np.where(visible[:, None, :n_slots], every[..., :n_slots], -np.inf)
    visible[:, list(how.also_reads)] = True
    # A row that was never written is NaN: it matters where it is read, and only there.
    unwritten = np.isnan(rows).any(axis=1)
    spoilt: Array = np.asarray((visible & unwritten).any(axis=1))
    values = np.where(unwritten[:, None], 0.0, rows)[:, : how.config.kv_lora_rank]
    empty = ~visible.any(axis=1, keepdims=True)  # softmax of nothing: of all, and then none
    shifted = np.where((visible | empty)[:, None], every, -np.inf)
    p = np.where(visible[:, None], how.attention(shifted), 0.0)
    out_latent = np.einsum("nhs,sc->nhc", p, values)
    return scores, np.where(spoilt[:, None, None], np.nan, out_latent)


def _mlp(
    weight: Weight, prefix: str, layer: int, how: Workings, x: Array, shown: dict[Key, Array]
) -> Array:
    config = how.config
    if config.is_dense(layer):
        out = swiglu(weight, prefix, x)
    else:
        scores = how.router(config, times(x, weight(prefix + "gate.weight")))
        bias = weight(prefix + "gate.e_score_correction_bias")
        ids = how.choose(config, scores, bias)
        weights = how.weigh(config, scores, bias, ids)
        shown["router_scores", layer] = scores
        shown["expert_ids", layer], shown["expert_weights", layer] = ids, weights
        used = how.used(weights, scores, ids)
        out = np.zeros_like(x)
        for expert in np.unique(ids):
            rows, place = np.nonzero(ids == expert)
            out[rows] += used[rows, place][:, None] * routed(weight, prefix, int(expert), x[rows])
        if config.n_shared_experts and how.shared:
            out = out + how.shared * swiglu(weight, prefix + "shared_experts.", x)
    shown["mlp_out", layer] = out
    return out


def swiglu(weight: Weight, prefix: str, x: Array) -> Array:
    """MOE-4."""
    gate, up, down = (weight(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))
    return times(_silu_product(times(x, gate), times(x, up)), down)


def routed(weight: Weight, prefix: str, expert: int, x: Array) -> Array:
    try:
        return swiglu(weight, f"{prefix}experts.{expert}.", x)
    except KeyError:  # as transformers 5 writes them
        gate, up = np.split(weight(prefix + "experts.gate_up_proj")[expert], 2)
        down = weight(prefix + "experts.down_proj")[expert]
        return times(_silu_product(times(x, gate), times(x, up)), down)


def _silu_product(gate: Array, up: Array) -> Array:
    return gate * sigmoid(gate) * up
