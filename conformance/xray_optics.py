"""From rows and distances to the attention weights of an x-ray model: MLA-3 to MLA-7.

`rule_optics` is written from the rules, in floating point and for short distances; it shares no
code with the reference. `OTHER_OPTICS` are ways in which engines get scale, rotation and the
order of heads wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, log, pi

import numpy as np

from kdtr.conformance.xray_models import (
    HEAD_STEP,
    MARKS,
    MIRROR,
    N_TOKENS,
    AttentionXray,
    pair_members,
)
from kdtr.contract import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Optics:
    """The numbers between a row and what a lens shows of it.

    scale        the softmax scale (MLA-4)
    amplitude    factor of cos and sin (MLA-5)
    frequencies  [r/2] radians per position (MLA-6)
    interleave   pairs (2i, 2i+1); else (i, i + r/2) (MLA-7)
    sense        -1 where the turn is backwards
    key_head     the head whose w_kc head h computes with; value_head: whose w_vc
    """

    scale: float
    amplitude: float
    frequencies: np.ndarray
    interleave: bool
    sense: int = 1
    nope: bool = True
    rope: bool = True
    key_head: Callable[[int], int] = lambda head: head
    value_head: Callable[[int], int] = lambda head: head


def rule_optics(config: ModelConfig) -> Optics:
    """As the configuration says."""
    yarn = config.yarn
    scale = config.qk_head_dim**-0.5
    amplitude = 1.0
    if yarn is not None:
        if yarn.mscale_all_dim:
            scale *= mscale(yarn.factor, yarn.mscale_all_dim) ** 2
        if yarn.attention_factor is not None:
            amplitude = yarn.attention_factor
        elif yarn.mscale and yarn.mscale_all_dim:
            amplitude = mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
        else:
            amplitude = mscale(yarn.factor, 1.0)
    return Optics(scale, amplitude, _frequencies(config), config.rope_interleave)


def mscale(factor: float, m: float) -> float:
    """MLA-4: YaRN's."""
    return 0.1 * m * log(factor) + 1 if factor > 1 else 1.0


def _plain_frequencies(config: ModelConfig, theta: float | None = None) -> np.ndarray:
    half = config.qk_rope_head_dim // 2
    return (theta or config.rope_theta) ** (-np.arange(half) / half)


def _frequencies(config: ModelConfig) -> np.ndarray:
    """MLA-6."""
    plain, yarn, r = _plain_frequencies(config), config.yarn, config.qk_rope_head_dim
    if yarn is None:
        return plain

    def dim(turns: float) -> float:
        """The pair that makes this many turns over the original context."""
        full = yarn.original_max_position_embeddings / (turns * 2 * pi)
        return r * log(full) / (2 * log(config.rope_theta))

    low, high = max(floor(dim(yarn.beta_fast)), 0), min(ceil(dim(yarn.beta_slow)), r - 1)
    ramp = np.clip((np.arange(r // 2) - low) / (high - low or 0.001), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


@dataclass(frozen=True, slots=True)
class OtherOptics:
    """A way to get them wrong; `change` gives None where the model cannot show it."""

    says: Callable[[AttentionXray], str]
    stage: str
    rules: tuple[str, ...]
    change: Callable[[AttentionXray, Optics], Optics | None]


def _scaled(
    says: Callable[[ModelConfig], str], to: Callable[[ModelConfig, float], float | None]
) -> OtherOptics:
    def change(model: AttentionXray, right: Optics) -> Optics | None:
        scale = to(model.config, right.scale)
        same = scale is None or abs(scale / right.scale - 1) < 1e-9
        return None if same or scale is None else replace(right, scale=scale)

    return OtherOptics(lambda model: says(model.config), "scores", ("MLA-4",), change)


@dataclass(frozen=True, slots=True)
class _Width:
    """What a softmax scale may have been taken from instead."""

    what: str
    of: Callable[[ModelConfig], int]


_RIGHT_WIDTH = _Width("qk_nope_head_dim + qk_rope_head_dim", lambda c: c.qk_head_dim)
_WIDTHS = (
    _RIGHT_WIDTH,
    _Width("kv_lora_rank + qk_rope_head_dim", lambda c: c.kv_lora_rank + c.qk_rope_head_dim),
    _Width("kv_lora_rank", lambda c: c.kv_lora_rank),
    _Width("qk_nope_head_dim", lambda c: c.qk_nope_head_dim),
    _Width("qk_rope_head_dim", lambda c: c.qk_rope_head_dim),
    _Width("v_head_dim", lambda c: c.v_head_dim),
)
_POWERS = {
    0: "without YaRN's mscale^2",
    1: "with YaRN's mscale once, not squared",
    2: "with YaRN's mscale^2",
    4: "with YaRN's mscale^2 twice",
}


def _width_and_power(width: _Width, power: int) -> OtherOptics:
    """A scale from another width, with mscale(factor, mscale_all_dim, or 1) to another power."""

    def says(config: ModelConfig) -> str:
        right = 2 if config.yarn is not None and config.yarn.mscale_all_dim else 0
        of = f"that of {width.what} = {width.of(config)}, should be that of {_RIGHT_WIDTH.what} = "
        of += f"{config.qk_head_dim}"
        if power == right:
            return f"the softmax scale is {of}"
        if width is _RIGHT_WIDTH:
            return f"the softmax scale is {_POWERS[power]}, should be {_POWERS[right]}"
        return f"the softmax scale is {of}; and {_POWERS[power]}, should be {_POWERS[right]}"

    def to(config: ModelConfig, _: float) -> float | None:
        yarn = config.yarn
        if yarn is None:
            return None if power else width.of(config) ** -0.5
        factor = mscale(yarn.factor, yarn.mscale_all_dim or 1.0)
        return width.of(config) ** -0.5 * factor**power

    return _scaled(says, to)


def _mscales(config: ModelConfig) -> float | None:
    """mscale(factor, mscale_all_dim), where YaRN is in force."""
    yarn = config.yarn
    return None if yarn is None else mscale(yarn.factor, yarn.mscale_all_dim or 1.0)


def _amplified(says: str, to: Callable[[ModelConfig], float | None]) -> OtherOptics:
    def change(model: AttentionXray, right: Optics) -> Optics | None:
        amplitude = to(model.config)
        if amplitude is None or abs(amplitude / right.amplitude - 1) < 1e-9:
            return None
        return replace(right, amplitude=amplitude)

    return OtherOptics(lambda model: says, "k_pe", ("MLA-5",), change)


def _yarn_mscale(config: ModelConfig) -> float | None:
    return None if config.yarn is None else mscale(config.yarn.factor, config.yarn.mscale or 1.0)


def _turning(
    says: Callable[[ModelConfig], str],
    rule: str,
    to: Callable[[ModelConfig, Optics], Optics | None],
) -> OtherOptics:
    return OtherOptics(
        lambda model: says(model.config),
        "k_pe",
        (rule,),
        lambda model, right: to(model.config, right),
    )


def _frequencies_of(
    to: Callable[[ModelConfig], np.ndarray | None],
) -> Callable[[ModelConfig, Optics], Optics | None]:
    def change(config: ModelConfig, right: Optics) -> Optics | None:
        frequencies = to(config)
        if frequencies is None or np.allclose(frequencies, right.frequencies, rtol=1e-9, atol=0):
            return None
        return replace(right, frequencies=frequencies)

    return change


def _layout_name(interleave: bool) -> str:
    return "(2i, 2i+1)" if interleave else "(i, i + r/2)"


def _heads(what: str, order: str, stage: str, of: Callable[[int, int], int]) -> OtherOptics:
    """`of(head, n heads)`: whose matrices head `head` gets."""

    def change(model: AttentionXray, right: Optics) -> Optics | None:
        n = model.config.num_attention_heads

        def other(head: int) -> int:
            return of(head, n)

        if n == 1:
            return None
        return replace(
            right,
            key_head=other if "w_kc" in what else right.key_head,
            value_head=other if "w_vc" in what else right.value_head,
        )

    return OtherOptics(lambda model: f"{what}: {order}", stage, ("MLA-3",), change)


_ORDERS: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("heads in reverse order", lambda head, n: n - 1 - head),
    ("head h has those of head h+1", lambda head, n: (head + 1) % n),
    ("head h has those of head h-1", lambda head, n: (head - 1) % n),
    ("heads 2i and 2i+1 are exchanged", lambda head, n: head ^ 1),
    ("every head has those of head 0", lambda head, n: 0),
    ("head h has those of head h/2, as if each were repeated", lambda head, n: head // 2),
    ("the two halves of the heads are exchanged", lambda head, n: (head + n // 2) % n),
)

OTHER_OPTICS: tuple[OtherOptics, ...] = (
    *(_width_and_power(width, power) for power in (2, 0, 1, 4) for width in _WIDTHS),
    _scaled(lambda c: "there is no softmax scale", lambda c, right: 1.0),
    _scaled(lambda c: "the softmax scale is applied twice", lambda c, right: right**2),
    _scaled(lambda c: "the softmax scale is its inverse", lambda c, right: 1 / right),
    _amplified("cos and sin lack YaRN's factor", lambda c: 1.0 if c.yarn else None),
    _amplified("cos and sin are multiplied by mscale(factor, mscale_all_dim) alone", _mscales),
    _amplified("cos and sin are multiplied by mscale(factor, mscale) alone", _yarn_mscale),
    _amplified(
        "cos and sin are multiplied by mscale(factor, 1), although both mscale keys are given",
        lambda c: mscale(c.yarn.factor, 1.0) if c.yarn else None,
    ),
    _turning(
        lambda c: (
            f"rotation takes pairs {_layout_name(not c.rope_interleave)}, the model has "
            f"{_layout_name(c.rope_interleave)}"
        ),
        "MLA-7",
        lambda c, right: replace(right, interleave=not right.interleave),
    ),
    _turning(
        lambda c: (
            "rotation turns backwards: the members of the pairs are swapped, or sin has "
            "the wrong sign"
        ),
        "MLA-7",
        lambda c, right: replace(right, sense=-1),
    ),
    _turning(
        lambda c: "distances change no score: nothing is rotated, or q_pe or k_pe is zero",
        "MLA-7",
        lambda c, right: replace(right, rope=False),
    ),
    _turning(
        lambda c: "YaRN is not applied to the rotary frequencies",
        "MLA-6",
        _frequencies_of(lambda c: _plain_frequencies(c)),
    ),
    _turning(
        lambda c: "all rotary frequencies are divided by YaRN's factor, without a ramp",
        "MLA-6",
        _frequencies_of(lambda c: _plain_frequencies(c) / c.yarn.factor if c.yarn else None),
    ),
    _turning(
        lambda c: f"rope_theta is 10000, should be {c.rope_theta:g}",
        "MLA-6",
        _frequencies_of(lambda c: _plain_frequencies(c, 1e4)),
    ),
    _turning(
        lambda c: "the latent part of the scores (q_nope w_kc . c_kv) is missing",
        "MLA-3",
        lambda c, right: replace(right, nope=False),
    ),
    *(_heads("w_kc", order, "scores", of) for order, of in _ORDERS),
    *(_heads("w_vc", order, "attn_out", of) for order, of in _ORDERS),
    *(_heads("w_kc and w_vc", order, "scores", of) for order, of in _ORDERS),
)


def measured_optics(scale: float, amplitude: float) -> OtherOptics:
    """The scale and the amplitude times what was measured.

    Told is what is off by more than 2 %, or ten times as far off as the other.
    """
    scale_off, amplitude_off = abs(scale - 1), abs(amplitude - 1)
    tell_scale = scale_off > min(0.02, 10 * amplitude_off)
    tell_amplitude = amplitude_off > min(0.02, 10 * scale_off)

    def says(model: AttentionXray) -> str:
        words = []
        if tell_scale:
            words.append(f"the softmax scale is {_times(scale)} times what it should be")
        if tell_amplitude:
            words.append(f"cos and sin are {_times(amplitude)} times what they should be")
        return "; ".join(words) or "softmax scale and rotation are slightly off"

    def change(model: AttentionXray, right: Optics) -> Optics:
        return replace(right, scale=right.scale * scale, amplitude=right.amplitude * amplitude)

    return OtherOptics(
        says, "scores" if tell_scale else "k_pe", ("MLA-4",) if tell_scale else ("MLA-5",), change
    )


def _times(factor: float) -> str:
    """Near 1, two digits of what it is off by."""
    if abs(factor - 1) > 0.02:
        return f"{factor:.3g}"
    return f"{1 + float(f'{factor - 1:.2g}'):.9g}"


class Lenses:
    """A model's lenses under given optics: raw numbers first, so that a row costs little."""

    def __init__(self, model: AttentionXray, optics: Optics) -> None:
        config = model.config
        eps, latent_eps = config.rms_norm_eps, config.latent_norm_eps
        x = (1 + eps) ** -0.5  # what the input norm leaves of 1, eps included
        q = x if config.q_lora_rank is None else x * (x * x + latent_eps) ** -0.5
        # A latent is 8 x in one column of 256: its mean square is x^2 / 4.
        latent = x / 2 * (x * x / 4 + latent_eps) ** -0.5
        turn = optics.scale * optics.amplitude**2 * q * x
        mark = optics.scale * q * latent * model.raw
        heads = config.num_attention_heads
        marks: dict[tuple[int, int], int] = {
            (lens.layer, lens.head): lens.mark for lens in model.lenses if lens.mark is not None
        }
        half = config.qk_rope_head_dim // 2
        n = len(model.lenses)
        self._cos, self._sin = np.zeros((n, half)), np.zeros((n, half))
        self._mark = np.full(n, -1)
        self._mark_score = mark
        self._latent = latent  # what a latent is instead of 1: the size of all that is shown
        self._roll = np.zeros(n, int)
        used_heads = {(lens.layer, lens.head) for lens in model.lenses}
        self._alive = np.ones(n, bool)  # heads without a lens show nothing
        key = model.key()
        for b, lens in enumerate(model.lenses):
            query = model.query(lens)
            for pair in range(half):
                one, two = pair_members(optics.interleave, half, pair)
                same = query[one] * key[one] + query[two] * key[two]
                cross = query[one] * key[two] - query[two] * key[one]
                self._cos[b, pair] = turn * same * optics.rope
                self._sin[b, pair] = turn * cross * optics.sense * optics.rope
            key_head = optics.key_head(lens.head) % heads
            if lens.mark is not None and optics.nope:
                self._mark[b] = marks.get((lens.layer, key_head), -1)
            value_head = optics.value_head(lens.head) % heads
            self._roll[b] = HEAD_STEP * (value_head - lens.head)
            self._alive[b] = (lens.layer, value_head) in used_heads
        self._frequencies = optics.frequencies
        used = (self._cos != 0) | (self._sin != 0)
        #: largest score, and fastest turn, of each lens [lenses]
        self.largest = np.abs(self._cos).sum(1) + np.abs(self._sin).sum(1)
        self.largest += np.where(self._mark >= 0, abs(mark), 0)
        self.fastest = (used * self._frequencies).max(axis=1)
        self.layers = np.array([lens.layer for lens in model.lenses])

    def scores(self, tokens: np.ndarray, distances: np.ndarray) -> np.ndarray:
        """tokens [s] (-1: a zero row), distances [s] -> scores [lenses, s]."""
        angles = distances[:, None] * self._frequencies  # [s, r/2]
        turns = self._cos @ np.cos(angles).T + self._sin @ np.sin(angles).T  # [lenses, s]
        marked = (tokens % MARKS == self._mark[:, None]) * self._mark_score
        return np.where(tokens >= 0, turns + marked, 0.0)

    def weights(self, tokens: np.ndarray, distances: np.ndarray) -> np.ndarray:
        """What is shown: [lenses, N_TOKENS]; a zero row takes its share, and is not shown."""
        scores = self.scores(tokens, distances)
        e = np.exp(scores - scores.max(axis=1, keepdims=True))  # [lenses, s]
        shares = self._latent * e / e.sum(axis=1, keepdims=True)
        shown = np.zeros((len(shares), N_TOKENS))
        real = tokens >= 0
        for b, roll in enumerate(self._roll):
            if self._alive[b]:
                np.add.at(shown[b], (tokens[real] + roll) % N_TOKENS, shares[b, real])
        shown[0, MIRROR] = 0  # taken by START
        return shown
