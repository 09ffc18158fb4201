"""The near-tie policy: a decision thinner than the bounds is not called wrong (NUM-2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kdtr.conformance.bundle import Expectation
from kdtr.conformance.noise_floor import PointNoise
from kdtr.conformance.tolerance import UNIT_ROUNDOFF
from kdtr.contract import STAGE, ModelConfig, NumericProfile, Stage


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """What is needed to tell a near tie from a wrong decision at one point of a case.

    noise   what rounding alone may do there
    logits [n, w], bonus and router_scores [n, e] by layer: the engine's own, where it shows them
    """

    expectation: Expectation
    config: ModelConfig
    profile: NumericProfile
    noise: PointNoise
    logits: np.ndarray | None = None
    bonus: int | None = None
    router_scores: Mapping[int, np.ndarray] = field(default_factory=dict)

    def near_tie(
        self, stage: Stage, layer: int | None, expected: np.ndarray, actual: np.ndarray
    ) -> str | None:
        """NUM-2: why a decision that differs is no failure, or None when it is one.

        Every row that differs must be thinner than the bounds allow to tell apart, and what was
        chosen must lie that close to the top. A token that is not the engine's own top one is no
        tie but a wrong argmax (ACC-1).
        """
        if stage.name == "targets" and actual.shape == expected.shape:
            return self._tokens(expected, actual)
        if stage.name in ("root", "bonus") and expected.ndim == 0:
            path = self.expectation.get("path")
            row = len(self._true_logits()) - 1 if path is None else int(path[-1])
            return self._token(row, int(expected), int(actual))
        if stage.name == "path" and self.bonus is not None:
            return self._path(expected, actual, self.bonus)
        if stage.name == "expert_ids" and actual.shape == expected.shape:
            assert layer is not None
            return self._experts(layer, expected, actual)
        return None

    def _true_logits(self) -> np.ndarray:
        logits = self.expectation.get("logits")
        assert logits is not None
        return logits

    def _tokens(self, expected: np.ndarray, actual: np.ndarray) -> str | None:
        logits = self._true_logits()
        allowed = 2 * self.noise.bound(STAGE["logits"], None, logits)[:, 0]
        rows = np.flatnonzero(expected != actual)
        in_range = (actual[rows] >= 0) & (actual[rows] < self.config.vocab_size)
        if not in_range.all():
            return None
        gap = logits[rows, expected[rows]] - logits[rows, actual[rows]]
        if (gap > allowed[rows]).any():
            return None
        own = self.logits
        if (
            own is not None
            and not _is_top(own[rows].astype(np.float64), actual[rows], self.profile).all()
        ):
            return None
        row = rows[0]
        return f"the logits of row {row} differ by {gap[0]:.2g}, less than {allowed[row]:.2g}"

    def _token(self, row: int, expected: int, actual: int) -> str | None:
        """The tie of one row, as the targets of a forward in which no other row differs."""
        if expected == actual:
            return None
        right = np.zeros(len(self._true_logits()), dtype=np.int64)
        took = right.copy()
        right[row], took[row] = expected, actual
        return self._tokens(right, took)

    def _path(self, expected: np.ndarray, actual: np.ndarray, bonus: int) -> str | None:
        """The walks part after a node whose target hangs on little: known from what each took."""
        tokens, last = self.expectation.get("tokens"), self.expectation.get("bonus")
        assert tokens is not None
        assert last is not None
        shared = 0
        while shared < min(len(expected), len(actual)) and expected[shared] == actual[shared]:
            shared += 1
        parents = self.expectation.get("parents")
        assert parents is not None
        if shared == 0 or actual.max() >= len(tokens) or actual.min() < 0:
            return None
        if shared < len(actual) and parents[actual[shared]] != actual[shared - 1]:
            return None
        took = tokens[actual[shared]] if shared < len(actual) else bonus
        right = tokens[expected[shared]] if shared < len(expected) else last
        return self._token(int(expected[shared - 1]), int(right), int(took))

    def _experts(self, layer: int, expected: np.ndarray, actual: np.ndarray) -> str | None:
        """Legal if the router would choose so with every score moved its bound in favour of it."""
        scores = self.expectation.get("router_scores", layer)
        assert scores is not None
        bound = self.noise.bound(STAGE["router_scores"], layer, scores)
        rows = np.flatnonzero((expected != actual).any(axis=1))
        if actual.min() < 0 or actual.max() >= self.config.n_routed_experts:
            return None
        chosen = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(chosen, actual, True, axis=1)
        biased = scores + self.expectation.router_bias(layer)
        favoured = _favoured(self.config, biased, chosen, bound)
        own = self._own_choice(layer, scores.shape)
        for row in rows:
            took = np.flatnonzero(chosen[row])
            if not np.array_equal(_choice(self.config, favoured[row]), took):
                return None
            if own is not None and not np.array_equal(_choice(self.config, own[row]), took):
                return None  # not what its own scores say: a wrong choice, or a wrong tie-break
        row = rows[0]
        gap = self.expectation.expert_gap(layer)[row]
        return f"the choice of row {row} hangs on {gap:.2g}, less than {bound[row, 0]:.2g}"

    def _own_choice(self, layer: int, shape: tuple[int, ...]) -> np.ndarray | None:
        """The engine's own biased scores [n, e], in their own precision."""
        own = self.router_scores.get(layer)
        if own is None or own.shape != shape:
            return None
        return own + self.expectation.router_bias(layer).astype(own.dtype)


def thin_choices(expectation: Expectation, layer: int, noise: PointNoise) -> tuple[np.ndarray, str]:
    """Rows [n] bool whose choice of experts may fall either way, and the thinnest in words.

    For engines that do not show their choice: whatever follows from it may differ too.
    """
    scores = expectation.get("router_scores", layer)
    assert scores is not None
    bound = noise.bound(STAGE["router_scores"], layer, scores)[:, 0]
    gap = expectation.expert_gap(layer)
    thin = gap <= bound
    if not thin.any():
        return thin, ""
    row = int(np.flatnonzero(thin)[gap[thin].argmin()])
    return thin, (
        f"an expert choice that the engine does not show hangs on {gap[row]:.2g} in layer "
        f"{layer}, row {row}, less than {bound[row]:.2g}"
    )


def _favoured(
    config: ModelConfig, biased: np.ndarray, chosen: np.ndarray, bound: np.ndarray
) -> np.ndarray:
    """The biased scores [n, e], every one moved within its bound [n, 1] to bring about a choice.

    Those of the chosen rise, and so do the others of their groups, which make the group strong,
    but not up to a chosen one; all others fall (MOE-2).
    """
    groups = chosen.reshape(len(chosen), config.n_group, -1)
    in_taken_group = np.repeat(groups.any(axis=2), groups.shape[2], axis=1)
    risen = biased + bound
    lowest_chosen = np.where(chosen, risen, np.inf).min(axis=1, keepdims=True)
    beside = np.minimum(risen, np.nextafter(lowest_chosen, -np.inf))
    fallen = biased - bound
    return np.where(chosen, risen, np.where(in_taken_group, np.maximum(beside, fallen), fallen))


def _choice(config: ModelConfig, biased: np.ndarray) -> np.ndarray:
    """The ids, ascending, that biased scores [e] of one row choose (MOE-2)."""
    groups = biased.reshape(config.n_group, -1)  # [group, e / group]
    strength = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
    open_groups = np.argsort(-strength, kind="stable")[: config.topk_group]
    allowed = np.full(groups.shape, -np.inf)
    allowed[open_groups] = groups[open_groups]
    best = np.argsort(-allowed.ravel(), kind="stable")[: config.num_experts_per_tok]
    return np.sort(best)


def _is_top(own: np.ndarray, tokens: np.ndarray, profile: NumericProfile) -> np.ndarray:
    """own [n, w], tokens [n] -> whether each is the argmax of its row, the lowest id (ACC-1).

    Logits stored more coarsely than they were summed tie where the engine saw no tie: then any
    top id will do.
    """
    if UNIT_ROUNDOFF[profile.logits] > UNIT_ROUNDOFF[profile.accumulation]:
        return own[np.arange(len(own)), tokens] == own.max(axis=-1)
    return own.argmax(axis=-1) == tokens
