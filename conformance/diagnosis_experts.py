"""Wrong routers, weights and sums of experts: ways to do a forward's MLP otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kdtr.conformance.diagnosis_forward import (
    Array,
    Workings,
    choose,
    expert_weights,
    sigmoid,
    softmax,
)
from kdtr.conformance.diagnosis_past import Past
from kdtr.conformance.diagnosis_twist import Twist
from kdtr.conformance.expert_choice import best_experts
from kdtr.contract import ModelConfig


def expert_twists(past: Past) -> Iterator[Twist]:
    """All of this file, for the scene's forward."""
    if past.scene.config.first_k_dense_replace >= past.scene.config.num_hidden_layers:
        return
    yield from _routers(past)
    yield from _choices(past)
    yield from _weights(past)
    yield from _sums(past)


def _how(past: Past, says: str, rule: str, seen_in: str, how: Workings, specific: int = 3) -> Twist:
    setting, first = replace(past.setting, workings=how), past.scene.config.first_k_dense_replace
    return Twist(says, (rule,), seen_in, setting, specific, first)


def _routers(past: Past) -> Iterator[Twist]:
    config = past.scene.config
    right = config.scoring_func
    scorings = {
        "softmax": lambda config, x: softmax(x),
        "sigmoid": lambda config, x: sigmoid(x),
        "no function at all": lambda config, x: x,
        "softplus": lambda config, x: np.log1p(np.exp(x)),
    }
    for name, scores in scorings.items():
        if name != right:
            says = f"router scores are by {name}, should be by {right}"
            yield _how(past, says, "MOE-1", "router_scores", replace(past.right, router=scores))


def _choices(past: Past) -> Iterator[Twist]:
    config = past.scene.config
    k, groups = config.num_experts_per_tok, config.n_group

    def without_groups(config: ModelConfig, scores: Array, bias: Array) -> Array:
        return best_experts(config, scores + bias)

    def zero_masked(config: ModelConfig, scores: Array, bias: Array) -> Array:
        return best_experts(config, np.where(_kept(config, scores + bias), scores + bias, 0.0))

    def unbiased(config: ModelConfig, scores: Array, bias: Array) -> Array:
        return choose(config, scores, 0 * bias)

    def groups_unbiased(config: ModelConfig, scores: Array, bias: Array) -> Array:
        return best_experts(config, np.where(_kept(config, scores), scores + bias, -np.inf))

    def by_best(config: ModelConfig, scores: Array, bias: Array) -> Array:
        return best_experts(
            config, np.where(_kept(config, scores + bias, 1), scores + bias, -np.inf)
        )

    def highest_of_ties(config: ModelConfig, scores: Array, bias: Array) -> Array:
        e = scores.shape[1]
        return np.sort(e - 1 - choose(config, scores[:, ::-1], bias[::-1]), axis=1)

    def worst(config: ModelConfig, scores: Array, bias: Array) -> Array:
        return choose(config, -scores, -bias)

    options = [
        (
            "the correction bias is ignored: experts are chosen by unbiased scores",
            unbiased,
            "MOE-1",
        ),
        ("of equal scores the higher expert id is chosen", highest_of_ties, "MOE-2"),
        ("the lowest scores are chosen", worst, "MOE-2"),
    ]
    if groups > 1:
        options += [
            (
                f"groups are ignored: the {k} best of all {config.n_routed_experts} experts are "
                "chosen",
                without_groups,
                "MOE-2",
            ),
            (
                "the groups that were not chosen compete with 0, should be excluded with -inf",
                zero_masked,
                "MOE-2",
            ),
            ("groups are chosen by unbiased scores", groups_unbiased, "MOE-2"),
            (
                "a group's score is its best expert's, should be the sum of its two best",
                by_best,
                "MOE-2",
            ),
        ]
    for says, chosen, rule in options:
        yield _how(past, says, rule, "expert_ids", replace(past.right, choose=chosen))


def _kept(config: ModelConfig, biased: Array, best_of: int = 2) -> Array:
    """Which experts [n, e] are in the topk_group best groups, by the sum of their best."""
    groups = biased.reshape(len(biased), config.n_group, -1)
    strength = np.sort(groups, axis=-1)[..., -best_of:].sum(axis=-1)
    kept = np.zeros(groups.shape, dtype=bool)
    best = np.argsort(-strength, axis=-1, kind="stable")[:, : config.topk_group]
    np.put_along_axis(kept, best[..., None], True, axis=1)
    return kept.reshape(biased.shape)


def _weights(past: Past) -> Iterator[Twist]:
    config = past.scene.config
    factor = config.routed_scaling_factor

    def biased(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        return expert_weights(config, scores + bias, bias, ids)

    def normed(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        other = config.replace(norm_topk_prob=not config.norm_topk_prob)
        return expert_weights(other, scores, bias, ids)

    def over_all(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        plain = np.take_along_axis(scores, ids, axis=1) / scores.sum(axis=1, keepdims=True)
        return plain * config.routed_scaling_factor

    def by_softmax(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        return softmax(np.take_along_axis(scores, ids, axis=1)) * config.routed_scaling_factor

    def equal(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        return np.full(ids.shape, config.routed_scaling_factor / ids.shape[1])

    def scaled_first(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        return expert_weights(config, scores, bias, ids) / config.routed_scaling_factor

    def scaled_twice(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        return expert_weights(config, scores, bias, ids) * config.routed_scaling_factor

    def scaled_back(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        return expert_weights(config, scores, bias, ids) / config.routed_scaling_factor**2

    def reversed_(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        return expert_weights(config, scores, bias, ids)[:, ::-1]

    def by_rank(config: ModelConfig, scores: Array, bias: Array, ids: Array) -> Array:
        return -np.sort(-expert_weights(config, scores, bias, ids), axis=1)

    norm = (
        "divided by their sum, though"
        if not config.norm_topk_prob
        else "not divided by their sum, as"
    )
    options = [
        ("expert weights come from the biased scores, should come from the unbiased", biased),
        (
            f"expert weights are {norm} norm_topk_prob is {str(config.norm_topk_prob).lower()}",
            normed,
        ),
        (
            "expert weights are divided by the sum over all experts, should be over the chosen",
            over_all,
        ),
        ("expert weights are a softmax of the chosen scores", by_softmax),
        ("expert weights are all equal", equal),
        (f"expert weights lack routed_scaling_factor = {factor:g}", scaled_first),
        (
            f"expert weights are multiplied by routed_scaling_factor = {factor:g} twice",
            scaled_twice,
        ),
        (f"expert weights are divided by routed_scaling_factor = {factor:g}", scaled_back),
        ("expert weights are in reverse order", reversed_),
        ("expert weights are in the order of the scores, ids in the order of the experts", by_rank),
    ]
    for says, weigh in options:
        yield _how(past, says, "MOE-3", "expert_weights", replace(past.right, weigh=weigh))


def _sums(past: Past) -> Iterator[Twist]:
    config, right = past.scene.config, past.right

    def first(weights: Array, scores: Array, ids: Array) -> Array:
        return np.broadcast_to(weights[:, :1], weights.shape)

    def best(weights: Array, scores: Array, ids: Array) -> Array:
        return np.broadcast_to(weights.max(axis=1, keepdims=True), weights.shape)

    def mean(weights: Array, scores: Array, ids: Array) -> Array:
        return np.broadcast_to(weights.mean(axis=1, keepdims=True), weights.shape)

    def ones(weights: Array, scores: Array, ids: Array) -> Array:
        return np.ones_like(weights)

    def none(weights: Array, scores: Array, ids: Array) -> Array:
        return np.zeros_like(weights)

    def back(weights: Array, scores: Array, ids: Array) -> Array:
        return weights[:, ::-1]

    def by_rank(weights: Array, scores: Array, ids: Array) -> Array:
        return -np.sort(-weights, axis=1)

    def unscaled(weights: Array, scores: Array, ids: Array) -> Array:
        return weights / config.routed_scaling_factor

    def rescaled(weights: Array, scores: Array, ids: Array) -> Array:
        return weights * config.routed_scaling_factor

    def without_last(weights: Array, scores: Array, ids: Array) -> Array:
        lowest = np.argmin(weights, axis=1)
        weights = weights.copy()
        np.put_along_axis(weights, lowest[:, None], 0.0, axis=1)
        return weights

    for says, used in (
        ("every chosen expert gets the weight of the first, that of the lowest id", first),
        ("every chosen expert gets the largest weight", best),
        ("every chosen expert gets the mean weight", mean),
        ("experts are summed without their weights", ones),
        ("the routed experts are missing: the shared one alone is there", none),
        ("the weights go to the experts in reverse order", back),
        ("the weights go to the experts in the order of the scores", by_rank),
        (
            f"the sum over experts lacks routed_scaling_factor = {config.routed_scaling_factor:g}",
            unscaled,
        ),
        (
            f"routed_scaling_factor = {config.routed_scaling_factor:g} is applied once more in the "
            "sum over experts",
            rescaled,
        ),
        ("the chosen expert of the least weight is left out", without_last),
    ):
        yield _how(past, says, "MOE-3", "mlp_out", replace(right, used=used))
    if not config.n_shared_experts:
        return
    e, k = config.n_routed_experts, config.num_experts_per_tok
    yield _how(past, "the shared expert is missing", "MOE-4", "mlp_out", replace(right, shared=0.0))
    for factor, name in (
        (2.0, "added twice"),
        (config.routed_scaling_factor, "multiplied by routed_scaling_factor"),
        (float(k), "added once per chosen expert"),
        (float(config.n_group), "multiplied by the number of groups"),
        (4.0, "multiplied by 4"),
        (0.25, "multiplied by 1/4"),
        (1 / config.n_shared_experts, "divided by n_shared_experts"),
        (1 / (k + 1), "averaged with the chosen experts"),
        (1 / e, "divided by the number of experts"),
    ):
        if factor != 1:
            says = f"the shared expert is {name}: times {factor:.4g}"
            yield _how(past, says, "MOE-4", "mlp_out", replace(right, shared=factor))
