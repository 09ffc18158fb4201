"""How firm every decision of a case is: its gap, over the noise of an honest engine.

The noise of a row is its distance from the truth in an emulated engine of a given precision that
lives through the same history. A decision is *clear* at that precision when its gap is more than
SAFETY times what two values can move against each other (NUM-2); below, it is *thin*, and marked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtr.contract import Acceptance, Array
from kdtr.reference.engine import ReferenceModel
from kdtr.reference.moe import choice_gap
from kdtr.reference.session import ReferenceSession
from kdtr.reference.weights import MoeWeights

# One run of one emulation samples the noise; others of the same precision move a row further.
SAFETY = 4.0
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class ForwardShown:
    """What decides in one forward: logits [n, w]; router scores [n, e] and choice gap [n] by layer.

    positions [n] and mask [n, s] are kept to feed the same forward to another model.
    """

    logits: np.ndarray
    scores: dict[int, np.ndarray]
    gaps: dict[int, np.ndarray]
    positions: np.ndarray
    mask: np.ndarray


class ForwardRecorder:
    """A trace that keeps what decides."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self._arrays: dict[str, np.ndarray] = {}
        self._scores: dict[int, np.ndarray] = {}
        self.gaps: dict[int, np.ndarray] = {}

    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None:
        if stage in ("logits", "positions", "mask"):
            self._arrays[stage] = np.array(array)
        if stage == "router_scores":
            assert layer is not None
            moe = self._model.weights.layers[layer].mlp
            assert isinstance(moe, MoeWeights)
            self._scores[layer] = np.array(array)
            self.gaps[layer] = choice_gap(self._model.config, array, moe.bias)

    def shown(self) -> ForwardShown:
        return ForwardShown(scores=self._scores, gaps=self.gaps, **self._arrays)


class Shadow:
    """An emulated engine that follows a session of the truth, forward by forward."""

    def __init__(self, model: ReferenceModel, max_len: int) -> None:
        self._model = model
        self._session: ReferenceSession = model.open(max_len=max_len)

    def margins(
        self, tokens: tuple[int, ...], truth: ForwardShown, first_target: int = 0
    ) -> np.ndarray:
        """The thinnest decision of each row [n], in units of what the precision can move.

        Above 1: clear. Tokens: the gap between the two best logits, two of which move. Experts:
        the gap already counts how many scores move. inf where a row decides nothing.
        first_target  rows before it choose no token: those of a prompt but the last
        """
        recorder = ForwardRecorder(self._model)
        self._session.forward_tokens(tokens, truth.positions, truth.mask, trace=recorder)
        mine = recorder.shown()
        margins = _over(token_gaps(truth.logits), 2 * SAFETY * _noise(truth.logits, mine.logits))
        margins[:first_target] = np.inf
        for layer, scores in truth.scores.items():
            noise = SAFETY * _noise(scores, mine.scores[layer])
            margins = np.minimum(margins, _over(truth.gaps[layer], noise))
        return margins

    def follow(self, acceptance: Acceptance) -> None:
        """Commit what the truth committed."""
        self._session.commit(acceptance)


def token_gaps(logits: np.ndarray) -> np.ndarray:
    """Between the two best logits of each row [n]; 0 on an exact tie."""
    best = np.partition(logits, -2, axis=1)[:, -2:]
    return np.asarray(best[:, 1] - best[:, 0])


def clear_rows(margins: np.ndarray) -> np.ndarray:
    return np.asarray(margins > 1)


def _over(gaps: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Margins [n]: finite where there is a gap, also where the emulation was exact."""
    with np.errstate(over="ignore"):
        margins = gaps / noise
    return np.where(np.isfinite(gaps), np.minimum(margins, np.finfo(np.float64).max), np.inf)


def _noise(truth: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """The largest distance in each row [n]; never 0, so that a gap of 0 is a margin of 0."""
    distance = np.abs(truth - mine).max(axis=1)
    return np.maximum(distance, np.finfo(np.float64).tiny)
