"""The softmax scale, the rotation and the merge of splits, wrong by layer, head and occasion."""

from __future__ import annotations

from collections.abc import Callable
from math import e, log2
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.mutants.families.family import (
    Family,
    Maker,
    by_turns,
    call_of,
    result_of,
)
from kdtr.conformance.mutants.families.occasion import (
    ALWAYS,
    EVERYWHERE,
    IN_PREFILL,
    IN_TREES,
    LATER_ROUNDS,
    OF_A_ROOT,
    VERBS,
    Watch,
    When,
    long_from,
)
from kdtr.conformance.mutants.planting import wrap
from kdtr.conformance.mutants.split_merges import with_splits

_SCALES: dict[str, Callable[[int, int, int], float]] = {
    # widths d + r, c, r; what the right scale is multiplied by
    "from d alone": lambda d, c, r: ((d + r) / d) ** 0.5,
    "from r alone": lambda d, c, r: ((d + r) / r) ** 0.5,
    "from the latent's width c": lambda d, c, r: ((d + r) / c) ** 0.5,
    "from the cached row's width c + r": lambda d, c, r: ((d + r) / (c + r)) ** 0.5,
    "1 / (d + r)": lambda d, c, r: (d + r) ** -0.5,
    "1": lambda d, c, r: (d + r) ** 0.5,
    "doubled": lambda d, c, r: 2.0,
    "halved": lambda d, c, r: 0.5,
    "times log2(e)": lambda d, c, r: log2(e),
    "times ln(2)": lambda d, c, r: 1 / log2(e),
    "too large by 10 %": lambda d, c, r: 1.1,
    "too large by 1 %": lambda d, c, r: 1.01,
    "too large by 0.1 %": lambda d, c, r: 1.001,
    "with the wrong sign": lambda d, c, r: -1.0,
    "0": lambda d, c, r: 0.0,
}
_PLACES: dict[str, tuple[int | None, int | None]] = {
    "": (None, None),
    " in layer 0": (0, None),
    " in the last layer": (-1, None),
    " in head 0": (None, 0),
    " in the last head": (None, -1),
    " in head 1 of layer 1": (1, 1),
}


def softmax_scale() -> Family:
    make = Maker(
        "softmax scale", "MLAS", "scores times another factor, in some layers, heads and verbs"
    )
    everywhere, *some = _PLACES
    for number, (label, factor) in enumerate(_SCALES.items()):
        for where in (everywhere, by_turns(some, number), by_turns(some, number + 2)):
            whens = (*EVERYWHERE, *VERBS[1:], OF_A_ROOT) if not where else (ALWAYS,)
            plant = _scaled(factor, *_PLACES[where])
            make.add_each(f"{label}{where}", ("MLA-4", "MLA-3"), plant, whens)
    return make.family()


def _scaled(
    factor: Callable[[int, int, int], float], layer: int | None, head: int | None
) -> Callable[[Any, Watch, When], None]:
    """Both parts of the query are multiplied: scores are linear in them."""
    width = [1]

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def latent_query(original: Any, q: Any, w_kc: Any, *rest: Any) -> Any:
            width[0] = w_kc.shape[-1]
            return original(q, w_kc, *rest)

        def verify_attn(original: Any, cache: Any, at: int, q: Any, q_pe: Any, *rest: Any) -> Any:
            if when.holds(watch.now) and layer in (None, at, at - len(cache.rows)):
                r = q_pe.shape[-1]
                by = np.ones((1, q.shape[1], 1), np.float32)
                by[:, slice(None) if head is None else head] = factor(width[0], q.shape[-1], r)
                q, q_pe = q * by, q_pe * by
            return original(cache, at, q, q_pe, *rest)

        wrap(engine, latent_query=latent_query, verify_attn=verify_attn)

    return plant


# positions [n], inverse frequencies [r/2], factor -> those that are used
_ANGLES: dict[str, Callable[[Any, Any, float], tuple[Any, Any, float]]] = {
    "frequencies shifted by one": lambda p, f, a: (p, np.roll(f, 1), a),
    "frequencies in reverse": lambda p, f, a: (p, f[::-1], a),
    "frequencies halved": lambda p, f, a: (p, f / 2, a),
    "frequencies doubled": lambda p, f, a: (p, f * 2, a),
    "frequencies too large by 1 %": lambda p, f, a: (p, f * 1.01, a),
    "frequencies too large by 0.1 %": lambda p, f, a: (p, f * 1.001, a),
    "a base of 10000": lambda p, f, a: (p, 10000.0 ** -(np.arange(len(f)) / len(f)), a),
    "frequencies by 2i / (r + 2)": lambda p, f, a: (p, f ** (len(f) / (len(f) + 1)), a),
    "the first frequency is 0": lambda p, f, a: (p, f * (np.arange(len(f)) > 0), a),
    "the last frequency is 0": lambda p, f, a: (p, f * (np.arange(len(f)) < len(f) - 1), a),
    "the last frequency is that of the pair before": lambda p, f, a: (
        p,
        np.append(f[:-1], f[-2]),
        a,
    ),
    "frequencies in bfloat16": lambda p, f, a: (p, _as(f, ml_dtypes.bfloat16), a),
    "frequencies in float16": lambda p, f, a: (p, _as(f, np.float16), a),
    "positions in bfloat16": lambda p, f, a: (_as(p, ml_dtypes.bfloat16), f, a),
    "positions in float8": lambda p, f, a: (_as(p, ml_dtypes.float8_e4m3fn), f, a),
    "positions modulo 16": lambda p, f, a: (p % 16, f, a),
    "positions modulo 128": lambda p, f, a: (p % 128, f, a),
    "positions halved": lambda p, f, a: (p / 2, f, a),
    "positions from 1 on": lambda p, f, a: (p + 1, f, a),
    "angles with the wrong sign": lambda p, f, a: (-p, f, a),
    "an amplitude too large by 10 %": lambda p, f, a: (p, f, a * 1.1),
    "an amplitude too large by 1 %": lambda p, f, a: (p, f, a * 1.01),
    "an amplitude squared and more": lambda p, f, a: (p, f, a * a * 1.02),
}
# x [n, h, r], cos, sin -> turned otherwise
_TURNS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "not at all": lambda rotate, x, cos, sin: x,
    "twice": lambda rotate, x, cos, sin: rotate(rotate(x, cos, sin), cos, sin),
    "the other way": lambda rotate, x, cos, sin: rotate(x, cos, -sin),
    "with cos for sin": lambda rotate, x, cos, sin: rotate(x, sin, cos),
    "in pairs (2i, 2i + 1)": lambda rotate, x, cos, sin: _interleaved(rotate, x, cos, sin),
    "without the second half": lambda rotate, x, cos, sin: np.concatenate(
        [rotate(x, cos, sin)[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]], axis=-1
    ),
    "without the first pair": lambda rotate, x, cos, sin: rotate(
        x, _first(cos, 1.0), _first(sin, 0.0)
    ),
    "by the row before": lambda rotate, x, cos, sin: rotate(
        x, np.roll(cos, 1, axis=0), np.roll(sin, 1, axis=0)
    ),
    "by the first row for all": lambda rotate, x, cos, sin: rotate(
        x, np.repeat(cos[:1], len(x), 0), np.repeat(sin[:1], len(x), 0)
    ),
}


def rotary() -> Family:
    make = Maker(
        "rotation", "MLAR", "frequencies, positions and pairs of the rotation, of queries or keys"
    )
    for label, change in _ANGLES.items():
        plant = call_of("rotary_angles", _angles(change))
        whens = (ALWAYS, IN_PREFILL, IN_TREES, LATER_ROUNDS, OF_A_ROOT)
        make.add_each(label, ("MLA-7", "MLA-6", "MLA-5"), plant, whens)
    for number, (label, turn) in enumerate(_TURNS.items()):
        for what, operation in (("queries", "latent_query"), ("keys", "append_normed")):
            one_layer = by_turns(((" in layer 0", 0), (" in the last layer", -1)), number)
            for where, layer in (("", None), one_layer):
                make.add_each(
                    f"{what} turned {label}{where}",
                    ("MLA-7", "MLA-2"),
                    _turned(turn, operation, layer),
                    (ALWAYS, IN_TREES) if not where else (ALWAYS,),
                )
    return make.family()


def _angles(change: Any) -> Any:
    return lambda original, now, *args: original(*change(*args))


def _turned(turn: Any, within: str, layer: int | None) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        inside, layers = [False], [0, 1]

        def append_normed(original: Any, cache: Any, at: int, *rest: Any) -> Any:
            layers[:] = [at, len(cache.rows)]
            inside[0] = within == "append_normed"
            try:
                return original(cache, at, *rest)
            finally:
                inside[0] = False

        def latent_query(original: Any, *rest: Any) -> Any:
            inside[0] = within == "latent_query"
            try:
                return original(*rest)
            finally:
                inside[0] = False

        def rotate(original: Any, x: Any, cos: Any, sin: Any) -> Any:
            at, n = layers
            if not inside[0] or not when.holds(watch.now) or layer not in (None, at, at - n):
                return original(x, cos, sin)
            return turn(original, x, cos, sin)

        wrap(engine, append_normed=append_normed, latent_query=latent_query, rotate=rotate)

    return plant


# the engine's splits, in order -> those that are merged
_SPLITS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "the first split is lost": lambda parts: parts[1:] or parts,
    "the last split is lost": lambda parts: parts[:-1] or parts,
    "the second split is lost": lambda parts: [*parts[:1], *parts[2:]],
    "splits from the third on are lost": lambda parts: parts[:2],
    "splits from the fifth on are lost": lambda parts: parts[:4],
    "splits from the ninth on are lost": lambda parts: parts[:8],
    "the last split counts twice": lambda parts: [*parts, parts[-1]],
    "the first split counts twice": lambda parts: [*parts, parts[0]] if len(parts) > 1 else parts,
    "two splits exchange their sums": lambda parts: (
        [parts[1]._replace(top=parts[0].top), parts[0]._replace(top=parts[1].top), *parts[2:]]
        if len(parts) > 1
        else parts
    ),
    "maxima are taken for 0": lambda parts: [p._replace(top=_zero(p)) for p in parts],
    "sums are taken for 1": lambda parts: [p._replace(norm=np.ones_like(p.norm)) for p in parts],
    "sums of empty splits are 1": lambda parts: [
        p._replace(norm=np.where(p.norm > 0, p.norm, 1), top=np.where(p.norm > 0, p.top, 0))
        for p in parts
    ],
    "maxima of head 0 hold for all heads": lambda parts: [
        p._replace(top=np.broadcast_to(p.top[:, :1], p.top.shape)) for p in parts
    ],
    "maxima of row 0 hold for all rows": lambda parts: [
        p._replace(top=np.broadcast_to(p.top[:1], p.top.shape)) for p in parts
    ],
    "sums of head 0 hold for all heads": lambda parts: [
        p._replace(norm=np.broadcast_to(p.norm[:, :1], p.norm.shape)) for p in parts
    ],
    "maxima in base 2": lambda parts: [p._replace(top=p.top * np.float32(log2(e))) for p in parts],
    "maxima in bfloat16": lambda parts: [
        p._replace(top=p.top.astype(ml_dtypes.bfloat16).astype(np.float32)) for p in parts
    ],
    "accumulators in bfloat16": lambda parts: [
        p._replace(acc=p.acc.astype(ml_dtypes.bfloat16).astype(np.float32)) for p in parts
    ],
    "accumulators in float16": lambda parts: [
        p._replace(acc=p.acc.astype(np.float16).astype(np.float32)) for p in parts
    ],
    "the means of splits are averaged": lambda parts: [
        p._replace(
            top=np.zeros_like(p.top),
            acc=p.acc / np.where(p.norm > 0, p.norm, 1)[..., None],
            norm=(p.norm > 0).astype(np.float32),
        )
        for p in parts
    ],
    "the last row's sum is that of the row before": lambda parts: [
        p._replace(norm=np.append(p.norm[:-1], p.norm[-2:-1] if len(p.norm) > 1 else p.norm, 0))
        for p in parts
    ],
}


def split_merges() -> Family:
    make = Maker("split merges", "LSE", "splits lost, counted twice or weighed wrongly")
    for label, change in _SPLITS.items():
        whens = (ALWAYS, IN_PREFILL, IN_TREES, long_from(9), OF_A_ROOT)
        make.add_each(label, ("MLA-3", "MASK-1"), _split(change), whens)
    return make.family()


def _split(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any, Watch, When], None]:
    return lambda engine, watch, when: with_splits(
        engine, lambda parts: change(parts) if when.holds(watch.now) else parts
    )


# out_latent and its like
_HEADS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "heads are rolled by one": lambda x: np.roll(x, 1, axis=1),
    "the last head is that of the one before": lambda x: np.concatenate(
        [x[:, :-1], x[:, -2:-1]], axis=1
    ),
    "head 0 is zero": lambda x: x * (np.arange(x.shape[1]) > 0)[:, None],
    "the last head is zero": lambda x: x * (np.arange(x.shape[1]) < x.shape[1] - 1)[:, None],
    "all heads are head 0": lambda x: np.repeat(x[:, :1], x.shape[1], axis=1),
    "rows are rolled by one": lambda x: np.roll(x, 1, axis=0),
    "the last row is that of the one before": lambda x: (
        np.concatenate([x[:-1], x[-2:-1]]) if len(x) > 1 else x
    ),
    "the last channel is zero": lambda x: x * (np.arange(x.shape[-1]) < x.shape[-1] - 1),
    "channels from 16 on are zero": lambda x: x * (np.arange(x.shape[-1]) < 16),
    "channels are rolled by one": lambda x: np.roll(x, 1, axis=-1),
}


def heads() -> Family:
    make = Maker("heads", "MLAW", "heads, rows and channels of absorbed attention out of place")
    for label, change in _HEADS.items():
        for what, operation in (
            ("absorbed queries", "absorb_query"),
            ("attention's sums", "verify_attn"),
        ):
            plant = result_of(operation, _only_result(change))
            whens = (ALWAYS, IN_TREES, LATER_ROUNDS, IN_PREFILL)
            make.add_each(f"{what}: {label}", ("MLA-3", "MLA-1", "FWD-4"), plant, whens)
    return make.family()


def _only_result(change: Callable[[np.ndarray], np.ndarray]) -> Any:
    return lambda result, now, *args: change(result)


def _zero(part: Any) -> Any:
    return np.where(part.norm > 0, np.float32(0), -np.inf)


def _as(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(dtype).astype(np.float64)


def _first(x: np.ndarray, value: float) -> np.ndarray:
    out = x.copy()
    out[:, 0] = value
    return out


def _interleaved(rotate: Any, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    r = x.shape[-1]
    order = np.concatenate([np.arange(0, r, 2), np.arange(1, r, 2)])
    turned: np.ndarray = rotate(x[..., order], cos, sin)
    return turned[..., np.argsort(order)]
