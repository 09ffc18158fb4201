"""Which experts biased scores choose, and by how much, by the judge's own few lines (MOE-2)."""

from __future__ import annotations

import numpy as np

from kdtr.contract import ModelConfig


def choose_experts(config: ModelConfig, biased: np.ndarray) -> np.ndarray:
    """ids [n, k], ascending, of biased scores [n, e], in their own precision."""
    return best_experts(config, _in_best_groups(config, biased))


def best_experts(config: ModelConfig, scores: np.ndarray) -> np.ndarray:
    """ids [n, k], ascending, of the k highest of each row [e], whatever their groups; ties go to
    the lowest id."""
    best = np.argsort(-scores, axis=-1, kind="stable")[:, : config.num_experts_per_tok]
    return np.sort(best, axis=1)


def choice_gap(config: ModelConfig, biased: np.ndarray) -> np.ndarray:
    """How far every score [n, e] may move before the choice of its row [n] changes.

    Two scores part two experts, four part two groups. inf where there is nothing to choose.
    """
    groups = _gap_after(_strength(config, biased), config.topk_group) / 4
    experts = _gap_after(_in_best_groups(config, biased), config.num_experts_per_tok) / 2
    return np.minimum(groups, experts)


def _strength(config: ModelConfig, biased: np.ndarray) -> np.ndarray:
    """Of each group [n, group]: the sum of its two best."""
    groups = biased.reshape(len(biased), config.n_group, -1)
    return np.asarray(np.sort(groups, axis=-1)[..., -2:].sum(axis=-1))


def _in_best_groups(config: ModelConfig, biased: np.ndarray) -> np.ndarray:
    """The scores [n, e], those of groups that were not chosen at -inf."""
    strength = _strength(config, biased)
    kept = np.zeros(strength.shape, dtype=bool)
    best = np.argsort(-strength, axis=-1, kind="stable")[:, : config.topk_group]
    np.put_along_axis(kept, best, True, axis=1)
    return np.where(np.repeat(kept, biased.shape[1] // config.n_group, axis=1), biased, -np.inf)


def _gap_after(scores: np.ndarray, k: int) -> np.ndarray:
    """Between the k-th and the next highest of each row; inf where there is no next."""
    if k == scores.shape[1]:
        return np.full(len(scores), np.inf)
    ordered = -np.sort(-scores, axis=1)
    return np.asarray(ordered[:, k - 1] - ordered[:, k])
