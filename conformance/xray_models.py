"""X-ray models of attention: checkpoints whose logits print what every row saw, and how far away.

An ordinary checkpoint of the architecture, without noise. Each *lens* is one head that copies
every visible row's token into a block of the hidden state of its own; the head of the model reads
the blocks. Logit b * N_TOKENS + t is 16 times the attention weight that lens b gave to token t,
zero if no row with token t was visible.

hidden state    token [N_TOKENS] one-hot | block [N_TOKENS] of each lens | constants | zeros

How the norms are kept out of the way: a token's entry and the hidden_size / 64 - 1 constants are 8
each, so that the mean square of every embedding is 1 and the norms before attention and head change
nothing but by their eps. A latent holds the token's one-hot, 8 in every 256 of its columns, so that
the latent norm (weight 2**-4) makes it 1. Every weight is a power of two or zero: exact in
bfloat16, float16 and float32, and so are the queries and keys before they are rotated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import frexp
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.contract import ModelConfig, Yarn, tensor_shapes

N_TOKENS = 128  # ids that can be fed
START = 127  # the target of every row, with a wide margin, so that a session's root is known
MIRROR = 126  # never fed: in block 0 it shows START, whose own logit is the constant
RESERVED = 125  # never fed: its logit is exactly 0, which log-probabilities need
FILLER = 124  # fed many times, where a prefix has more rows than there are tokens

MARKS = 5  # a mark m raises the scores of the tokens t with t % MARKS == m
LAYER_STEP, HEAD_STEP = 7, 11  # latents differ by layer, and heads' outputs by head: rolled

_UNIT = 8.0  # a token's entry, and each constant
_OUT = 2.0**-2  # through o_proj: small, so that the next norm barely sees it
_DISPLAY = 2.0**6  # through the head: 16 per unit of attention weight
ANCHOR_PER_WEIGHT = 2.0  # START's logit is that of an attention weight of 2
_KEY = 4.0  # k_pe of the second member of every pair in use


@dataclass(frozen=True, slots=True)
class Lens:
    """A head, and the block of logits that it writes.

    pair  the rotary pair whose turn between query and key is printed: score +-raw sin(angle)
    mark  tokens t with t % MARKS == mark get the raw score of the model
    """

    layer: int
    head: int
    pair: int | None = None
    mark: int | None = None

    def __str__(self) -> str:
        kind = "sees alike" if self.pair is None else f"pair {self.pair}"
        return f"layer {self.layer}, head {self.head} ({kind if self.mark is None else 'marks'})"


@dataclass(frozen=True, slots=True)
class AttentionXray:
    """A generated model; `raw` is the largest score of its lenses before the softmax scale."""

    name: str
    why: str
    config: ModelConfig
    lenses: tuple[Lens, ...]
    raw: float

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint in bfloat16, which holds it exactly."""
        tensors = {
            name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(self.config).items()
        }
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name][:] = 2.0**-4 if "kv_a_layernorm" in name else 1
        self._write_ends(tensors)
        for layer in range(self.config.num_hidden_layers):
            self._write_attention(tensors, layer)
        return {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}

    @property
    def constant(self) -> int:
        """The first constant entry of the hidden state."""
        return N_TOKENS * (1 + len(self.lenses))

    def query(self, lens: Lens) -> np.ndarray:
        """q_pe [r] of the lens before rotation, in the checkpoint's order."""
        query = np.zeros(self.config.qk_rope_head_dim)
        if lens.pair is not None:
            query[self._ends(lens)[0]] = self.raw / _KEY
        return query

    def key(self) -> np.ndarray:
        """k_pe [r] of every row before rotation, in the checkpoint's order."""
        key = np.zeros(self.config.qk_rope_head_dim)
        turning = [lens for lens in self.lenses if lens.pair is not None]
        used = {member for lens in turning for member in self._ends(lens)}
        for lens in turning:
            query, end = self._ends(lens)
            key[end] = _KEY
            # Under the other layout this entry pairs with another: it must not meet zeros alone.
            interleave, half = not self.config.rope_interleave, len(key) // 2
            pairs = [pair_members(interleave, half, pair) for pair in range(half)]
            partner = next(sum(pair) - query for pair in pairs if query in pair)
            if partner not in used:
                key[partner] = _KEY
        return key

    def _ends(self, lens: Lens) -> tuple[int, int]:
        """Of the lens' pair, the members that query and key excite."""
        assert lens.pair is not None
        first, second = pair_members(
            self.config.rope_interleave, self.config.qk_rope_head_dim // 2, lens.pair
        )
        turning = [one.pair for one in self.lenses if one.pair is not None]
        place = sorted(set(turning)).index(lens.pair)
        return (second, first) if place % 4 in (1, 2) else (first, second)

    def latent_columns(self, layer: int) -> np.ndarray:
        """Where layer `layer` keeps token t, [N_TOKENS, copies]."""
        tokens = (np.arange(N_TOKENS) + LAYER_STEP * layer) % N_TOKENS
        return tokens[:, None] + N_TOKENS * np.arange(self.config.kv_lora_rank // 256)

    def _write_ends(self, tensors: dict[str, np.ndarray]) -> None:
        embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        n_constants = self.config.hidden_size // 64 - 1
        embedding[:, self.constant : self.constant + n_constants] = _UNIT
        tokens = np.arange(N_TOKENS)
        embedding[tokens, tokens] = _UNIT
        for block in range(len(self.lenses)):
            head[block * N_TOKENS + tokens, (1 + block) * N_TOKENS + tokens] = _DISPLAY
        head[START] = head[MIRROR] = 0
        head[MIRROR, N_TOKENS + START] = _DISPLAY
        head[START, self.constant] = ANCHOR_PER_WEIGHT * _OUT * _DISPLAY / _UNIT

    def _write_attention(self, tensors: dict[str, np.ndarray], layer: int) -> None:
        config, tokens = self.config, np.arange(N_TOKENS)
        d, v, c = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        attention = f"model.layers.{layer}.self_attn."
        kv_a = tensors[attention + "kv_a_proj_with_mqa.weight"]
        latent = self.latent_columns(layer)
        kv_a[latent, tokens[:, None]] = 1
        kv_a[c:, self.constant] = self.key() / _UNIT
        if config.q_lora_rank is None:
            queries, column = tensors[attention + "q_proj.weight"], self.constant
            per_query = 1 / _UNIT
        else:  # all low entries are 1, so the norm leaves them; the first is read
            tensors[attention + "q_a_proj.weight"][:, self.constant] = 1 / _UNIT
            queries, column, per_query = tensors[attention + "q_b_proj.weight"], 0, 1.0
        queries = queries.reshape(config.num_attention_heads, config.qk_head_dim, -1)
        kv_b = tensors[attention + "kv_b_proj.weight"].reshape(-1, d + v, c)
        o = tensors[attention + "o_proj.weight"].reshape(-1, config.num_attention_heads, v)
        for block, lens in enumerate(self.lenses):
            if lens.layer != layer:
                continue
            queries[lens.head, d:, column] = per_query * self.query(lens)
            if lens.mark is not None:
                queries[lens.head, 0, column] = per_query * self.raw
                kv_b[lens.head, 0, latent[tokens % MARKS == lens.mark, 0]] = 1
            value = (tokens + HEAD_STEP * lens.head) % N_TOKENS
            kv_b[lens.head, d + value, latent[:, 0]] = 1
            o[(1 + block) * N_TOKENS + tokens, lens.head, value] = _OUT


def pair_members(interleave: bool, n_pairs: int, pair: int) -> tuple[int, int]:
    """Entries of a checkpoint's rope part that turn together (MLA-7)."""
    return (2 * pair, 2 * pair + 1) if interleave else (pair, pair + n_pairs)


def attention_models() -> tuple[AttentionXray, ...]:
    """Every x-ray model of attention, the smallest first."""
    turns = tuple(Lens(0, 1 + i, pair=i) for i in range(4))
    marks = (Lens(0, 5, mark=1), Lens(0, 6, mark=3))
    one_layer = (Lens(0, 0), *turns, *marks)
    by_layer = tuple(
        lens
        for layer in range(3)
        for lens in (Lens(layer, 0), Lens(layer, 1, pair=0), Lens(layer, 2, pair=2))
    )
    # Of 32 pairs, four that tell distances best together.
    k2 = (Lens(0, 0), *(Lens(0, 1 + i, pair=pair) for i, pair in enumerate((0, 3, 7, 11))), *marks)
    unequal = {"mscale": 0.8, "mscale_all_dim": 1.2}
    return (
        _attention("visible", "which rows a row sees; few logits, for top-k", (Lens(0, 0),)),
        _attention("attention", "rows, distances, softmax scale, order of the heads", one_layer),
        _attention(
            "half-split",
            "the same with pairs (i, i + r/2), YaRN, and queries from q_proj",
            one_layer,
            rope_interleave=False,
            q_lora_rank=None,
            rope_theta=64.0,
            yarn=Yarn(
                factor=2.5,
                original_max_position_embeddings=48,
                beta_fast=6.0,
                beta_slow=0.7,
                **unequal,
            ),
        ),
        _attention("layers", "rows and distances, layer by layer", by_layer),
        _attention(
            "k2",
            "the head sizes, the rotation and the YaRN of Kimi K2",
            k2,
            **_K2_SIZES,
        ),
    )


BASE: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 136,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 256.0,  # four pairs: 1, 1/4, 1/16 and 1/64 radian per position
}
_K2_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_theta",
    "rope_interleave",
    "yarn",
)
_K2_SIZES = {name: getattr(ModelConfig.kimi_k2(), name) for name in _K2_FIELDS}
_LARGEST_SCORE = 4.0


def _attention(name: str, why: str, lenses: Iterable[Lens], **changes: Any) -> AttentionXray:
    lenses = tuple(lenses)
    fields = {**BASE, **changes}
    n_layers = 1 + max(lens.layer for lens in lenses)
    config = ModelConfig(
        vocab_size=N_TOKENS * len(lenses),
        hidden_size=_hidden_size(N_TOKENS * (1 + len(lenses))),
        num_hidden_layers=n_layers,
        num_attention_heads=2 ** (max(lens.head for lens in lenses).bit_length()),
        first_k_dense_replace=n_layers,  # every MLP is dense, and zero
        **fields,
    )
    # A power of two that makes the largest score about 4, which tells distances best.
    exponent = frexp(_LARGEST_SCORE * config.qk_head_dim**0.5)[1]
    return AttentionXray(name, why, config, lenses, 2.0 ** (exponent - 1))


def _hidden_size(n_used: int) -> int:
    """The smallest multiple of 128 that holds n_used entries and its own constants."""
    return next(m for m in range(128, 1 << 20, 128) if n_used + m // 64 - 1 <= m)
