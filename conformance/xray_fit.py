"""Whether what an engine shows is what the rules, or a pattern, would show, within rounding.

Each logit is compared with the largest of its lens, as a logarithm of the ratio. With unit
roundoff u of what the engine stores, and scores up to S, the bound is the sum of what follows.
All are worst cases but the third, which is four standard deviations of random roundings: the worst
case of a sum in one run would be 3 sqrt(n) / 8 times that, 13 times at the widths of Kimi K2.

    2 * 7 u   a weight is stored seven times on its way (softmax, out_latent, w_vc, o_proj, residual
              stream, final norm, head), and so is the one it is compared with; the copies
              between are by powers of two
    3 u S     the rotated members of query and key are rounded once each, and |sin a cos b| +
              |cos a sin b| <= 1, so the score moves by 2 u S; stored, by u S more
    S (e(q) + e(m)) / 2
              the mean square of a norm is a sum of as many terms as the norm is wide, n = q for the
              query (q_lora_rank, or hidden_size without one) and m = hidden_size for the key. Sums
              are of the declared accumulation, in an order that no profile tells: in one run, the
              longest, each of n roundings is uniform within w = its unit roundoff of a sum that
              grows evenly, so the whole has a standard deviation of w sqrt(n) / 3, and e(n) is four
              of them. All else that a norm multiplies is common to a lens, or normed once more
    4 S f p 2**-24   angles f p of float32 tables, for the fastest turn f and positions up to p,
              of query and key, each rounded twice
    S b / 512 after layer 0: the outputs of b lenses, at most 1/4 each, are in the stream; they
              raise its mean square, 1, by b / (16 hidden_size), and hidden_size is above 128

Zeros are exact: what is not visible adds nothing to its own logit, in any precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.tolerance import UNIT_ROUNDOFF
from kdtr.conformance.xray_models import AttentionXray
from kdtr.conformance.xray_optics import Lenses
from kdtr.conformance.xray_reading import Reading
from kdtr.conformance.xray_replay import SeenRow
from kdtr.contract import NumericProfile

# A weight below this may be lost on the way: subnormal float16 has few bits and then none.
SMALLEST = {"float64": 1e-30, "float32": 1e-25, "bfloat16": 1e-25, "float16": 2.0**-12}


@dataclass(frozen=True, slots=True)
class Precision:
    """The widest rounding of what an engine stores, and that of its sums."""

    dtype: str
    sums: str = "float32"

    @classmethod
    def of(cls, profile: NumericProfile) -> Precision:
        stored = (
            profile.weights,
            profile.activations,
            profile.latents,
            profile.scores,
            profile.logits,
        )
        # Not below float32: what the optics predict is itself rounded, and so are angles.
        return cls(
            max("float32", *stored, key=lambda dtype: UNIT_ROUNDOFF.get(dtype, 0.0)),
            profile.accumulation,
        )

    @property
    def u(self) -> float:
        return UNIT_ROUNDOFF[self.dtype]

    @property
    def smallest(self) -> float:
        return SMALLEST[self.dtype]


def log_bound(
    model: AttentionXray, lenses: Lenses, precision: Precision, highest: int
) -> np.ndarray:
    """The bound above for each lens, [lenses]; `highest`: the largest position."""
    largest, config = lenses.largest, model.config
    widths = (config.q_lora_rank or config.hidden_size, config.hidden_size)
    norms = sum(4 / 3 * width**0.5 for width in widths) / 2 * UNIT_ROUNDOFF[precision.sums]
    angles = 4 * largest * lenses.fastest * highest * 2.0**-24
    later = np.where(lenses.layers > 0, largest * len(model.lenses) / 512, 0)
    return precision.u * (14 + 3 * largest) + largest * norms + angles + later


def misfit(
    reading: Reading, row: SeenRow, lenses: Lenses, bound: np.ndarray, smallest: float
) -> np.ndarray:
    """How far each lens is from showing this row: error / bound; inf where a zero is none, or
    the other way round. [lenses]"""
    tokens = np.array([cell.token for cell in row.visible])
    distances = np.array([row.own.position - cell.position for cell in row.visible])
    if not len(tokens):
        return np.where((reading.weights > 0).any(axis=1), np.inf, 0.0)
    wanted = lenses.weights(tokens, distances)
    return weights_misfit(reading.weights, wanted, bound, smallest, reading.noise)


def weights_misfit(
    seen: np.ndarray, wanted: np.ndarray, bound: np.ndarray, smallest: float, noise: float = 0.0
) -> np.ndarray:
    """seen, wanted [lenses, tokens], bound [lenses] -> error / bound of each lens.

    noise  how far a weight may be off by the way it was read, which adds to the bound
    """
    out = np.zeros(len(wanted))
    certain = wanted >= max(smallest, 4 * noise)
    uncertain = 2 * max(smallest, 4 * noise)
    wrong_zero = ((seen <= 0) & certain) | ((seen > uncertain) & ~certain)
    wrong_zero |= (seen != 0) & (wanted == 0)
    both = certain & (seen > 0)
    for b in range(len(wanted)):
        if wrong_zero[b].any():
            out[b] = np.inf
        elif both[b].any():
            values, reference = seen[b, both[b]], int(np.argmax(wanted[b, both[b]]))
            ratio = np.log(values) - np.log(wanted[b, both[b]])
            allowed = bound[b] + noise / values + noise / values[reference]
            out[b] = (abs(ratio - ratio[reference]) / allowed).max()
            # The weights of a lens sum to 1: what is missing was given to rows without a token.
            missing = abs(np.log(seen[b].sum() / wanted[b].sum()))
            out[b] = max(out[b], missing / (bound[b] + noise * both[b].sum()))
    return out


def worst(
    readings: Sequence[Reading],
    rows: Iterable[SeenRow],
    lenses: Lenses,
    bound: np.ndarray,
    smallest: float,
    of: np.ndarray,
) -> float:
    """The largest misfit of the lenses `of`; stops at the first that is above 1."""
    most = 0.0
    for reading, row in zip(readings, rows, strict=True):
        most = max(most, float(misfit(reading, row, lenses, bound, smallest)[of].max()))
        if most > 1:
            break
    return most
