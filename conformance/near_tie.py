"""The near-tie policy: a decision thinner than the bounds is not called wrong (NUM-2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice

import numpy as np

from kdtr.conformance.bundle import Expectation
from kdtr.conformance.expert_choice import choose_experts
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
        parted = self.parted(stage, expected, actual)
        if parted is not None:
            return self._token(*parted)
        if stage.name == "expert_ids" and actual.shape == expected.shape:
            assert layer is not None
            return self._experts(layer, expected, actual)
        return None

    def parted(
        self, stage: Stage, expected: np.ndarray, actual: np.ndarray
    ) -> tuple[int, int, int] | None:
        """The row whose token makes a root, a bonus or a path differ; the right token, and its own.

        None where no one token does.
        """
        if stage.name in ("root", "bonus") and expected.ndim == 0:
            path = self.expectation.get("path")
            row = len(self._true_logits()) - 1 if path is None else int(path[-1])
            return row, int(expected), int(actual)
        if stage.name == "path" and self.bonus is not None:
            return self._path(expected, actual, self.bonus)
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
        if not ((gap >= 0) & (gap <= allowed[rows])).all():  # below 0: the truth is no argmax
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

    def _path(
        self, expected: np.ndarray, actual: np.ndarray, bonus: int
    ) -> tuple[int, int, int] | None:
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
        return int(expected[shared - 1]), int(right), int(took)

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
        took = np.sort(actual[rows], axis=1)
        if not np.array_equal(choose_experts(self.config, favoured[rows]), took):
            return None
        if own is not None and not np.array_equal(choose_experts(self.config, own[rows]), took):
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


@dataclass(frozen=True, slots=True, eq=False)
class ThinRows:
    """Of one layer at one point: which rows [n] bool may choose other experts, and how thinly.

    gap [n], bound [n]   a row is thin where its gap is within its bound
    """

    thin: np.ndarray
    gap: np.ndarray
    bound: np.ndarray


def thin_rows(expectation: Expectation, layer: int, noise: PointNoise) -> ThinRows | None:
    """None where the layer has no router."""
    scores = expectation.get("router_scores", layer)
    if scores is None:
        return None
    bound = noise.bound(STAGE["router_scores"], layer, scores)[:, 0]
    gap = expectation.expert_gap(layer)
    return ThinRows(gap <= bound, gap, bound)


MOST_CHOICES = 256  # of one row, to look at


def admissible_choices(
    config: ModelConfig, biased: np.ndarray, bound: float
) -> list[tuple[int, ...]] | None:
    """All that a router may choose from biased scores [e] of one row, each moved by its bound.

    Ids, ascending, the best by score first; the choice of the scores as they are is among them.
    None: there are more than MOST_CHOICES to look at.
    """
    near = set(islice(_near_choices(config, biased, bound), MOST_CHOICES + 1))
    if len(near) > MOST_CHOICES:
        return None
    moved = np.array([[bound]])
    found = []
    for ids in sorted(near, key=lambda ids: (-biased[list(ids)].sum(), ids)):
        chosen = np.zeros((1, len(biased)), dtype=bool)
        chosen[0, list(ids)] = True
        favoured = _favoured(config, biased[None], chosen, moved)
        if tuple(choose_experts(config, favoured)[0].tolist()) == ids:
            found.append(ids)
    return found


def _near_choices(
    config: ModelConfig, biased: np.ndarray, bound: float
) -> Iterator[tuple[int, ...]]:
    """A superset: of groups within four bounds of another choice, experts within two.

    Two scores make a group strong (MOE-2), so four move between two groups; between experts, two.
    """
    groups = biased.reshape(config.n_group, -1)  # [group, e / group]
    strength = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
    for open_groups in _near_best(strength, config.topk_group, 4 * bound):
        allowed = np.full(groups.shape, -np.inf)
        allowed[list(open_groups)] = groups[list(open_groups)]
        yield from _near_best(allowed.ravel(), config.num_experts_per_tok, 2 * bound)


def _near_best(scores: np.ndarray, k: int, apart: float) -> Iterator[tuple[int, ...]]:
    """Ids, ascending, of k scores: those that may be the k highest when two move `apart`."""
    ranked = np.argsort(-scores, kind="stable")
    next_ = scores[ranked[k]] if k < len(scores) else -np.inf
    sure = [int(i) for i in ranked[:k] if scores[i] > next_ + apart]
    rest = [int(i) for i in ranked if scores[i] >= scores[ranked[k - 1]] - apart]
    rest = rest[len(sure) :]  # the sure ones rank first
    for others in combinations(rest, k - len(sure)):
        yield tuple(sorted([*sure, *others]))


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


def _is_top(own: np.ndarray, tokens: np.ndarray, profile: NumericProfile) -> np.ndarray:
    """own [n, w], tokens [n] -> whether each is the argmax of its row, the lowest id (ACC-1).

    Logits stored more coarsely than they were summed tie where the engine saw no tie: then any
    top id will do.
    """
    if UNIT_ROUNDOFF[profile.logits] > UNIT_ROUNDOFF[profile.accumulation]:
        return own[np.arange(len(own)), tokens] == own.max(axis=-1)
    return own.argmax(axis=-1) == tokens
