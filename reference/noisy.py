"""Honest engines of a declared precision, each with its own choice of what such engines differ in.

A profile says in which dtype an engine stores weights, activations, latents, scores and logits,
and in which it sums. It does not say the order of a sum, or whether a kernel stores what lies
between two products or keeps it in registers. A `NoisyArithmetic` draws these by its seed. Its
distance from the truth is one sample of the rounding error of that profile; bounds stand on an
ensemble of them (NUM-3, conformance/noise_floor.py).

The choice of experts and the positions are given (`follow`): rounding is to be measured, and not
what another choice would make of it.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and the float8 types with NumPy
import numpy as np

from kdtr.contract import ModelConfig, NumericProfile
from kdtr.reference.rotary import inverse_frequencies
from kdtr.reference.weights import ModelWeights

# The products by the letters they are written with in attention.py, moe.py and forward.py.
_SCORES = ("hc,tc->ht", "hr,tr->ht")
_PROBABILITIES = "ht,tc->hc"
_ABSORBED = "nhd,hdc->nhc"
_ROUTER = "nm,me->ne"
_LOGITS = "nm,mw->nw"

_LATENTS = ("c_kv", "k_pe")
# MOE-1: kept in the precision of the sums.
_WIDE = ("router_scores", "expert_weights")


# fused_absorb, narrow_softmax, wide_residual, single_angles by seed.
_PLACES = (
    (False, False, False, False),
    (True, True, False, False),
    (False, False, True, True),
    (True, False, True, False),
    (False, True, False, True),
    (True, True, True, True),
)


class NoisyArithmetic:
    """One honest engine: `profile` is what it declares, `seed` what it does besides.

    fused_absorb    q_latent is not stored between its two products
    narrow_softmax  the probabilities are stored like activations before they meet c_kv
    wide_residual   the residual stream is kept in the precision of the sums
    single_angles   rotary angles are computed in float32, and turn q_pe and k_pe stored like
                    activations
    Of six seeds in a row no two do the same, and each of these is done by three of them.
    """

    def __init__(self, profile: NumericProfile, seed: int) -> None:
        self.name = f"noisy {seed}"
        self._seed = seed
        self._sums = np.dtype(profile.accumulation)
        places = _PLACES[seed % len(_PLACES)]
        self.fused_absorb, self.narrow_softmax, self.wide_residual = places[:3]
        self.single_angles = places[3] and self._sums != np.float64
        # Operands of half precision are multiplied in float32, as tensor cores do.
        self._work = np.dtype(np.float64 if self._sums == np.float64 else np.float32)
        self._weights = np.dtype(profile.weights)
        self._activations = np.dtype(profile.activations)
        self._latents = np.dtype(profile.latents)
        self._scores = np.dtype(profile.scores)
        self._logits = np.dtype(profile.logits)
        self._orders: dict[int, np.ndarray] = {}
        self._reordered_weights: dict[int, np.ndarray] = {}  # by id: the model holds the arrays
        self._angle_error: np.ndarray | None = None  # [n, r/2]
        self._expert_ids: dict[int, np.ndarray] = {}

    def follow(
        self, config: ModelConfig, positions: np.ndarray, expert_ids: dict[int, np.ndarray]
    ) -> None:
        """What the next forward is given: positions [n], and expert_ids [n, k] by layer."""
        self._expert_ids = expert_ids
        self._angle_error = self._angles(config, positions) if self.single_angles else None

    def rounded_weights(self, weights: ModelWeights) -> ModelWeights:
        """Stored in the profile's dtype, in the arrays in which they are multiplied.

        The correction bias chooses and is never multiplied: checkpoints keep it in float32.
        """
        rounded: ModelWeights = self._rounded_tree(weights)
        return rounded

    # The arithmetic

    def contract(self, spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if spec == _PROBABILITIES:
            x = self._as(x, self._activations if self.narrow_softmax else self._sums)
        elif spec == _SCORES[0] and self.fused_absorb:
            x = self._as(x, self._sums)
        elif spec == _ROUTER:
            x = self._as(x, self._sums if self.wide_residual else self._activations)
        else:
            x = self._as(x, self._activations)
        product = self._product(spec, x, y)
        if self._sums.itemsize < self._work.itemsize:
            product = self._as(product, self._sums)
        if spec in _SCORES:
            return self._as(product, self._scores)
        if spec in (_ROUTER, _PROBABILITIES) or (spec == _ABSORBED and self.fused_absorb):
            return product
        return self._as(product, self._logits if spec == _LOGITS else self._activations)

    def sum(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(self._work)[..., self._order(x.shape[-1])]
        return np.asarray(x.sum(axis=-1))

    def exp(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(x.astype(self._work)))

    def log(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(x.astype(self._work)))

    def stored(self, stage: str, layer: int | None, x: np.ndarray) -> np.ndarray:
        if stage == "expert_ids":
            assert layer is not None
            return self._expert_ids.get(layer, x)
        if self._angle_error is not None and stage in ("q_pe", "k_pe"):
            x = _turned(self._as(x, self._activations), self._angle_error)
        if stage in _WIDE or (stage in ("residual", "hidden") and self.wide_residual):
            return self._as(x, self._sums)
        if stage == "scores":
            return self._as(x, self._scores)
        if stage == "logits":
            return self._as(x, self._logits)
        return self._as(x, self._latents if stage in _LATENTS else self._activations)

    # What honest engines differ in

    def _product(self, spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Through BLAS, its terms in another order; a batch letter leads both operands.

        "nm,mo->no": x @ y; "hc,tc->ht": x @ y.T; "nhd,hdc->nhc": one product per head.
        """
        of_x, of_y, y_is_transposed = _summed_axes(spec)
        x = x.take(self._order(x.shape[of_x]), axis=of_x)
        if spec in _SCORES or spec == _PROBABILITIES:
            y = self._reordered(y, of_y)
        else:  # weights: the same array in every forward
            if id(y) not in self._reordered_weights:
                self._reordered_weights[id(y)] = self._reordered(y, of_y)
            y = self._reordered_weights[id(y)]
        if y_is_transposed:  # [.., c] times [t, c]
            y = y.swapaxes(-1, -2)
        if x.ndim == 3:  # the middle letter is the batch
            return np.asarray((x.swapaxes(0, 1) @ y).swapaxes(0, 1))
        return np.asarray(x @ y)

    def _reordered(self, y: np.ndarray, axis: int) -> np.ndarray:
        return y.take(self._order(y.shape[axis]), axis=axis).astype(self._work, copy=False)

    def _order(self, n: int) -> np.ndarray:
        """The order of the terms of a sum of n: the same whenever n terms are summed."""
        if n not in self._orders:
            self._orders[n] = self._random(1, n).permutation(n)
        return self._orders[n]

    def _random(self, *purpose: int) -> np.random.Generator:
        """The same numbers for the same purpose, whatever was asked before."""
        return np.random.default_rng([2003, self._seed, *purpose])

    def _angles(self, config: ModelConfig, positions: np.ndarray) -> np.ndarray:
        """Errors of float32 angles [n, r/2]: the frequency and the product are each rounded."""
        frequencies = np.array([float(f) for f in inverse_frequencies(config)])
        unit = 2.0**-24
        of_pair = self._random(2).uniform(-2, 2, len(frequencies))  # a power and a division
        of_angle = self._random(3).uniform(-1, 1, (len(positions), len(frequencies)))
        return unit * (of_pair + of_angle) * frequencies * np.asarray(positions)[:, None]

    def _as(self, x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        """Rounded to the dtype, in the arrays in which it is multiplied."""
        x = np.asarray(x)
        if x.dtype == dtype == self._work:
            return x
        with np.errstate(over="ignore"):  # float16 ends at 65504, honestly
            return x.astype(dtype, copy=False).astype(self._work, copy=False)

    def _rounded_tree(self, node: Any, name: str = "") -> Any:
        if isinstance(node, np.ndarray):
            return node if name == "bias" else self._as(node, self._weights)
        if isinstance(node, tuple):
            return tuple(self._rounded_tree(one) for one in node)
        if is_dataclass(node) and not isinstance(node, type):
            return replace(
                node,
                **{f.name: self._rounded_tree(getattr(node, f.name), f.name) for f in fields(node)},
            )
        return node


@cache
def _summed_axes(spec: str) -> tuple[int, int, bool]:
    """The axis of each operand that is summed over, and whether the second's is its last."""
    operands, out = spec.split("->")
    left, right = operands.split(",")
    summed = next(letter for letter in left if letter in right and letter not in out)
    return left.index(summed), right.index(summed), right.endswith(summed)


def _turned(x: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Half-split x [n, r] or [n, h, r] turned by small angles [n, r/2]."""
    if x.ndim == 3:
        error = error[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first - second * error, second + first * error], axis=-1)
