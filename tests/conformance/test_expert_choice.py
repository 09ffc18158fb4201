"""The judge's own choice of experts is the reference's, which shares no code with it (MOE-2)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kdtr.conformance.expert_choice import best_experts, choice_gap, choose_experts
from kdtr.reference import moe


def test_a_choice_by_hand(small_model: SimpleNamespace) -> None:
    """Of four groups of two the best two are open, then the best three experts: 7 is not among
    them, for its group is the weakest."""
    biased = np.array([[0.5, 0.25, 0.5, 0.5, 0.125, 0.5, 0.0, 0.6]])

    assert [[0, 2, 3]] == choose_experts(small_model.config, biased).tolist()
    assert [[0, 2, 7]] == best_experts(small_model.config, biased).tolist()
    # the second group, 0.75, is ahead of the third, 0.625, which four scores may change
    assert [0.125 / 4] == choice_gap(small_model.config, biased).tolist()


@pytest.mark.parametrize("groups", [(4, 2), (1, 1), (2, 2)])
def test_it_is_what_the_reference_chooses(
    small_model: SimpleNamespace, groups: tuple[int, int]
) -> None:
    config = small_model.config.replace(n_group=groups[0], topk_group=groups[1])
    draw = np.random.default_rng(7)
    scores, bias = draw.random((200, 8)), draw.normal(size=8)
    scores[::2] = np.round(4 * scores[::2]) / 4  # ties
    bias = np.round(4 * bias) / 4

    assert np.array_equal(
        moe.choose_experts(config, scores, bias), choose_experts(config, scores + bias)
    )
    assert np.array_equal(moe.choice_gap(config, scores, bias), choice_gap(config, scores + bias))


def test_nothing_to_choose_is_an_infinite_gap(small_model: SimpleNamespace) -> None:
    config = small_model.config.replace(n_group=1, topk_group=1, num_experts_per_tok=8)

    assert [np.inf] == choice_gap(config, np.zeros((1, 8))).tolist()
