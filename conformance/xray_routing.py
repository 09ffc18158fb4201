"""X-ray models of the router: logits that print the chosen experts and their weights.

Attention adds nothing. A token's router logits are a table on a grid of 1/8, chosen so that no
choice is thin. Every expert computes the same number, from a constant, and writes it into an entry
of its own; the shared expert into another. Relative to START's logit, a constant, logit FIRST + e
is the weight of expert e: zero if it was not chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.seed_model import hash_below
from kdtr.conformance.xray_models import BASE
from kdtr.conformance.xray_sessions import Script, Step
from kdtr.contract import SIGMOID, SOFTMAX, DraftTree, ModelConfig, tensor_shapes

N_FED = 40  # tokens that are fed
START = 39  # the target of every row
RESERVED = 127  # never fed: its logit is exactly 0
FIRST = 40  # logit FIRST + e shows expert e, logit FIRST + n_routed_experts the shared experts
FLAT = 38  # a token whose router logits are all equal: ties go to the lowest id

_UNIT = 8.0
_GATE, _UP, _DOWN = 4.0, 4.0, 2.0**-4  # alike: only their weights are asked for
_DISPLAY, _ANCHOR = 2.0**3, 2.0**4
_THIN = 0.03  # scores closer than this are not asked for: a router may work in bfloat16


@dataclass(frozen=True, slots=True)
class Route:
    """How a router works, for one row of logits; the defaults of `rule_route` are MOE-1 to MOE-4.

    mask        what experts of dropped groups compete with
    group_best  how many of its best scores make a group's
    extra       experts chosen beyond num_experts_per_tok
    power       of routed_scaling_factor in the weights
    shared      factor of the shared experts
    """

    scoring_func: str
    norm: bool
    groups: bool = True
    mask: float = -inf
    group_best: int = 2
    biased_choice: bool = True
    biased_groups: bool = True
    biased_weights: bool = False
    lowest_tie: bool = True
    extra: int = 0
    power: int = 1
    first_for_all: bool = False
    shared: float = 1.0


def rule_route(config: ModelConfig) -> Route:
    """As the rules say."""
    return Route(config.scoring_func, config.norm_topk_prob)


def routed(
    route: Route, config: ModelConfig, logits: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, float]:
    """logits, bias [e] -> the weight of every expert, 0 for those not chosen, [e]; and the gap by
    which the choice was made."""
    if route.scoring_func == SIGMOID:
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max())
        scores = scores / scores.sum()
    biased = scores + bias * route.biased_choice
    by_group = (scores + bias * route.biased_groups).reshape(config.n_group, -1)
    best = -np.sort(-by_group, axis=1)[:, : route.group_best]
    group_scores, gap = best.sum(axis=1), inf
    eligible = biased.copy()
    if route.groups:
        kept, gap = _top(group_scores, config.topk_group, route.lowest_tie)
        dropped = ~np.isin(np.arange(config.n_group), kept)
        eligible[np.repeat(dropped, len(logits) // config.n_group)] = route.mask
    ids, choice_gap = _top(eligible, config.num_experts_per_tok + route.extra, route.lowest_tie)
    ids = np.sort(ids)
    weights = (biased if route.biased_weights else scores)[ids]
    if route.norm:
        weights = weights / (weights.sum() + 1e-20)
    if route.first_for_all:
        weights = np.full_like(weights, weights[0])
    out = np.zeros(len(logits))
    out[ids] = weights * config.routed_scaling_factor**route.power
    return out, min(gap, choice_gap)


def _top(values: np.ndarray, k: int, lowest: bool) -> tuple[np.ndarray, float]:
    """Ids of the k largest, and how far the next is behind."""
    if lowest:
        order = np.argsort(-values, kind="stable")
    else:
        order = len(values) - 1 - np.argsort(-values[::-1], kind="stable")
    gap = float(values[order[k - 1]] - values[order[k]]) if k < len(values) else inf
    return order[:k], gap


@dataclass(frozen=True, slots=True)
class RoutingXray:
    """A generated model with one layer of experts."""

    name: str
    why: str
    config: ModelConfig
    seed: int
    bias: float

    def biases(self) -> np.ndarray:
        """[e], on a grid of 1/16 around `bias`."""
        n = self.config.n_routed_experts
        return self.bias + (hash_below(self.seed, "bias", n, 9).astype(float) - 4) / 16

    def logits(self) -> np.ndarray:
        """[N_FED, e] of every token: the first draw that is not thin."""
        bias, n = self.biases(), self.config.n_routed_experts
        rows = []
        for token in range(N_FED):
            for draw in range(1000):
                row = hash_below(self.seed, f"{token}.{draw}", n, 49).astype(float) / 8 - 3
                if token == FLAT:
                    row[:] = 0
                _, gap = routed(rule_route(self.config), self.config, row, bias)
                if gap > _THIN or token == FLAT:
                    break
            rows.append(row)
        return np.array(rows)

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint in bfloat16, which holds it exactly."""
        config, tokens = self.config, np.arange(N_FED)
        tensors = {
            name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()
        }
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name][:] = 1
        n_constants = config.hidden_size // 64 - 1
        embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        shown = config.n_routed_experts + 1
        constant = N_FED + shown
        embedding[:, constant : constant + n_constants] = _UNIT
        embedding[tokens, tokens] = _UNIT
        head[FIRST + np.arange(shown), N_FED + np.arange(shown)] = _DISPLAY
        head[START, constant] = _ANCHOR
        mlp = "model.layers.0.mlp."
        tensors[mlp + "gate.weight"][:, tokens] = self.logits().T / _UNIT
        tensors[mlp + "gate.e_score_correction_bias"][:] = self.biases()
        width = config.moe_intermediate_size
        for expert in range(shown):
            prefix = f"{mlp}experts.{expert}."
            inner, down = [expert % width], _DOWN
            if expert == config.n_routed_experts:
                if not config.n_shared_experts:
                    break
                prefix = mlp + "shared_experts."
                inner = [width * i + 1 for i in range(config.n_shared_experts)]
            tensors[prefix + "gate_proj.weight"][inner, constant] = _GATE / _UNIT
            tensors[prefix + "up_proj.weight"][inner, constant] = _UP / _UNIT
            tensors[prefix + "down_proj.weight"][N_FED + expert, inner] = down
        stored = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
        for name, array in stored.items():
            assert np.array_equal(array.astype(np.float32), tensors[name]), f"{name} is inexact"
        return stored

    def one_expert(self) -> float:
        """What an expert of weight 1 shows against START."""
        x = (1 + self.config.rms_norm_eps) ** -0.5
        gate, up = _GATE * x, _UP * x
        return gate / (1 + exp(-gate)) * up * _DOWN * _DISPLAY / (_UNIT * _ANCHOR)

    def scripts(self) -> list[Script]:
        """Every fed token is a row of a tree."""
        tokens = [token for token in range(N_FED) if token != START]
        first, second = tokens[2:20], tokens[20:]
        steps = (
            Step(0, DraftTree((START, *first), (-1, *([0] * 9), *([3] * 9))), (0, 3, 12), 1),
            Step(1, DraftTree((1, *second), (-1, *([0] * 9), *([4] * 10))), (0,), 0),
            Step(2, DraftTree((0,), (-1,)), (0,), 2),
        )
        return [Script("tokens", ((5, 6), (7,)), steps)]


def routing_models() -> tuple[RoutingXray, ...]:
    """Every x-ray model of the router."""
    grouped = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    return (
        _routing(
            "routing",
            "sigmoid, groups, a bias that makes every score negative",
            71,
            -1.5,
            **grouped,
            routed_scaling_factor=2.5,
        ),
        _routing(
            "routing-raw",
            "no groups, weights not normalised, two shared experts",
            72,
            0.25,
            n_routed_experts=12,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            n_shared_experts=2,
        ),
        _routing(
            "routing-softmax",
            "softmax, groups",
            73,
            0.0,
            **grouped,
            scoring_func=SOFTMAX,
            routed_scaling_factor=1.25,
        ),
    )


def _routing(name: str, why: str, seed: int, bias: float, **changes: Any) -> RoutingXray:
    fields = {
        **BASE,
        "vocab_size": 128,
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 32,
        "v_head_dim": 16,
        **changes,
    }
    return RoutingXray(name, why, ModelConfig(**fields), seed, bias)
