"""Norms, weights, residuals, experts and precision: the model's own numbers, wrong by place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    IN_PREFILL,
    IN_ROUND,
    IN_TREES,
    LATER_ROUNDS,
    OF_A_ROOT,
    Watch,
    When,
    large_from,
    long_from,
)
from kdtr.conformance.mutants.planting import every_shared, on_load, wrap

# x [n, i], weight [i], eps, the right norm -> another
_NORMS: dict[str, Callable[[Any, Any, Any, float], Any]] = {
    "is left out": lambda norm, x, weight, eps: x,
    "has no weight": lambda norm, x, weight, eps: norm(x, np.ones_like(weight), eps),
    "has 1 + weight": lambda norm, x, weight, eps: norm(x, 1 + weight, eps),
    "is applied twice": lambda norm, x, weight, eps: norm(norm(x, weight, eps), weight, eps),
    "takes off the mean first": lambda norm, x, weight, eps: norm(
        x - x.mean(axis=-1, keepdims=True), weight, eps
    ),
    "sums squares of the first half": lambda norm, x, weight, eps: (
        x / np.sqrt((x[:, : x.shape[1] // 2] ** 2).mean(axis=-1, keepdims=True) + eps) * weight
    ).astype(x.dtype),
    "sums over all rows": lambda norm, x, weight, eps: (
        x / np.sqrt((x**2).mean() + eps) * weight
    ).astype(x.dtype),
    "divides by the sum, not by the mean": lambda norm, x, weight, eps: (
        x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + eps) * weight
    ).astype(x.dtype),
    "has an eps of 0.1": lambda norm, x, weight, eps: norm(x, weight, 0.1),
    "has an eps of 1e-5": lambda norm, x, weight, eps: norm(x, weight, 1e-5),
    "has ten times the eps": lambda norm, x, weight, eps: norm(x, weight, 10 * eps),
    "is rounded to bfloat16": lambda norm, x, weight, eps: _as(
        norm(x, weight, eps), ml_dtypes.bfloat16
    ),
    "has its weight in reverse": lambda norm, x, weight, eps: norm(x, weight[::-1], eps),
}
_KINDS = ("input", "post-attention", "q_a", "kv_a", "final")


def norms() -> Family:
    make = Maker(
        "norms", "MLAW", "each norm of each kind wrong in its own way, in one layer or all"
    )
    rules = {
        "input": ("NORM-1", "MLA-1"),
        "post-attention": ("NORM-1", "MOE-1", "MOE-4"),
        "q_a": ("NORM-1", "MLA-1"),
        "kv_a": ("NORM-1", "MLA-2"),
        "final": ("NORM-1",),
    }
    for number, (label, change) in enumerate(_NORMS.items()):
        for kind in _KINDS:
            one = by_turns((("layer 0", 0), ("layer 1", 1), ("layer 2", 2)), number)
            for where, layer in (("every layer", None), one):
                if kind == "final" and layer is not None:
                    continue
                whens = (ALWAYS, IN_TREES) if kind == "final" else (ALWAYS,)
                plant = _normed(change, kind, layer)
                at = "" if kind == "final" else f" of {where}"
                make.add_each(f"the {kind} norm{at} {label}", rules[kind], plant, whens)
    return make.family()


def _normed(change: Any, kind: str, layer: int | None) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        chosen: list[Any] = []

        def rms_norm(original: Any, x: Any, weight: Any, eps: float) -> Any:
            if not when.holds(watch.now) or not any(weight is one for one in chosen):
                return original(x, weight, eps)
            return change(original, x, weight, eps)

        def loaded(weights: Any) -> Any:
            of_layers = [
                {
                    "input": one.input_norm,
                    "post-attention": one.post_attention_norm,
                    "q_a": one.attention.q_norm,
                    "kv_a": one.attention.kv_norm,
                }
                for one in weights.layers
            ]
            if kind == "final":
                chosen[:] = [weights.final_norm]
            else:
                chosen[:] = [
                    one[kind]
                    for i, one in enumerate(of_layers)
                    if layer in (None, i) and one[kind] is not None
                ]
            return weights

        wrap(engine, rms_norm=rms_norm)
        on_load(engine, loaded)

    return plant


_MATRICES: dict[str, tuple[str, ...]] = {
    "qkv_a": ("MLA-1", "MLA-2"),
    "q_b": ("MLA-1",),
    "w_kc": ("MLA-3",),
    "w_vc": ("MLA-3",),
    "o": ("MLA-3",),
}
_BENT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "with its last row zero": lambda w: w * _edge(w, -2),
    "with its last column zero": lambda w: w * _edge(w, -1),
    "with its first two rows swapped": lambda w: _swapped(w, -2),
    "with its first two columns swapped": lambda w: _swapped(w, -1),
    "with its rows rolled by one": lambda w: np.roll(w, 1, axis=-2),
    "with its sign changed": lambda w: -w,
    "too large by 1 %": lambda w: w * np.float32(1.01),
    "in codes of three bits": lambda w: _coarse(w),
    "with one element doubled": lambda w: _one_doubled(w),
}


def weights() -> Family:
    make = Maker(
        "weights",
        "MLAW",
        "a matrix of attention bent in one layer, heads included, or a neighbour's",
    )
    for name, rules in _MATRICES.items():
        for number, (label, change) in enumerate(_BENT.items()):
            layer = number % 3
            plant = _bent(name, layer, change)
            make.add(f"{name} of layer {layer} {label}", rules, plant, ALWAYS)
        for layer in (0, 2):
            make.add(
                f"{name} of layer {layer} is that of layer 1",
                rules,
                _neighbour(name, layer),
                ALWAYS,
            )
    for label, change in _BENT.items():
        make.add(f"the head {label}", ("FWD-4", "LOSSLESS"), _top("lm_head", change), ALWAYS)
        make.add(f"the embedding {label}", ("FWD-4",), _top("embedding", change), ALWAYS)
    return make.family()


def _bent(name: str, layer: int, change: Any) -> Callable[[Any, Watch], None]:
    def loaded(model: Any) -> Any:
        layers = [*model.layers]
        attention = layers[layer].attention
        bent = replace(attention, **{name: change(getattr(attention, name))})
        layers[layer] = replace(layers[layer], attention=bent)
        return replace(model, layers=tuple(layers))

    return lambda engine, watch: on_load(engine, loaded)


def _neighbour(name: str, layer: int) -> Callable[[Any, Watch], None]:
    def loaded(model: Any) -> Any:
        layers = [*model.layers]
        other = getattr(layers[1].attention, name)
        bent = replace(layers[layer].attention, **{name: other})
        layers[layer] = replace(layers[layer], attention=bent)
        return replace(model, layers=tuple(layers))

    return lambda engine, watch: on_load(engine, loaded)


def _top(name: str, change: Any) -> Callable[[Any, Watch], None]:
    return lambda engine, watch: on_load(
        engine, lambda model: replace(model, **{name: change(getattr(model, name))})
    )


# residual, delta, the right sum -> another
_ADDS: dict[str, Callable[[Any, Any], Any]] = {
    "the residual is left out": lambda residual, delta: delta,
    "what is added is left out": lambda residual, delta: residual,
    "what is added counts twice": lambda residual, delta: residual + 2 * delta,
    "what is added is halved": lambda residual, delta: residual + delta / 2,
    "it is taken off": lambda residual, delta: residual - delta,
    "the last channel is not added": lambda residual, delta: (
        residual + delta * (np.arange(delta.shape[-1]) < delta.shape[-1] - 1)
    ),
    "the last row is not added": lambda residual, delta: (
        residual + delta * (np.arange(len(delta)) < len(delta) - 1)[:, None]
    ),
    "it is rounded to bfloat16": lambda residual, delta: _as(residual + delta, ml_dtypes.bfloat16),
    "it is rounded to float16": lambda residual, delta: _as(residual + delta, np.float16),
}


def residuals() -> Family:
    make = Maker("residuals", "MLAW", "a sum of the residual stream, after attention or the MLP")
    for label, change in _ADDS.items():
        for where, number in (
            ("after attention of layer 0", 0),
            ("after the MLP of layer 0", 1),
            ("after attention of layer 1", 2),
            ("after the MLP of layer 1", 3),
            ("after the MLP of layer 2", 5),
        ):
            make.add_each(
                f"{where} {label}", ("FWD-4", "NORM-1", "MOE-1"), _added(change, number), (ALWAYS,)
            )
    return make.family()


def _added(change: Any, number: int) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        count = [0]

        def embed(original: Any, *rest: Any) -> Any:
            count[0] = 0
            return original(*rest)

        def add_norm(original: Any, residual: Any, delta: Any, weight: Any, eps: float) -> Any:
            mine, count[0] = count[0] == number, count[0] + 1
            if not mine or not when.holds(watch.now):
                return original(residual, delta, weight, eps)
            total = change(residual, delta).astype(residual.dtype)
            return total, engine.kernels.rms_norm(total, weight, eps)

        wrap(engine, embed=embed, add_norm=add_norm)

    return plant


# scores [n, e], bias [e], config, the right choice -> another
_GATES: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "one expert fewer counts": (
        ("MOE-2", "MOE-3"),
        lambda choose, s, b, c: _fewer(choose(s, b, c)),
    ),
    "the last expert's weight is 0": (
        ("MOE-3",),
        lambda choose, s, b, c: _last_zero(choose(s, b, c)),
    ),
    "experts are one id too high": (
        ("MOE-2",),
        lambda choose, s, b, c: ((choose(s, b, c)[0] + 1) % s.shape[1], choose(s, b, c)[1]),
    ),
    "the last id is the one before": (
        ("MOE-2",),
        lambda choose, s, b, c: (
            np.minimum(choose(s, b, c)[0], s.shape[1] - 2),
            choose(s, b, c)[1],
        ),
    ),
    "weights are in reverse": (
        ("MOE-3",),
        lambda choose, s, b, c: (choose(s, b, c)[0], choose(s, b, c)[1][:, ::-1]),
    ),
    "weights are rolled by one": (
        ("MOE-3",),
        lambda choose, s, b, c: (choose(s, b, c)[0], np.roll(choose(s, b, c)[1], 1, axis=1)),
    ),
    "all weights are alike": (
        ("MOE-3",),
        lambda choose, s, b, c: _weighed(
            choose(s, b, c), lambda w: w * 0 + w.mean(1, keepdims=True)
        ),
    ),
    "weights are squared": (
        ("MOE-3",),
        lambda choose, s, b, c: _weighed(choose(s, b, c), lambda w: w * w),
    ),
    "weights are scaled twice": (
        ("MOE-3",),
        lambda choose, s, b, c: _weighed(choose(s, b, c), lambda w: w * 1.3),
    ),
    "weights are too large by 1 %": (
        ("MOE-3",),
        lambda choose, s, b, c: _weighed(choose(s, b, c), lambda w: w * 1.01),
    ),
    "weights are in bfloat16": (
        ("MOE-3",),
        lambda choose, s, b, c: _weighed(choose(s, b, c), lambda w: _as(w, ml_dtypes.bfloat16)),
    ),
    "weights are rounded to eighths": (
        ("MOE-3",),
        lambda choose, s, b, c: _weighed(choose(s, b, c), lambda w: np.round(w * 8) / 8),
    ),
    "weights are not scaled": (
        ("MOE-3",),
        lambda choose, s, b, c: choose(s, b, c.replace(routed_scaling_factor=1.0)),
    ),
    "weights are normalised the other way": (
        ("MOE-3",),
        lambda choose, s, b, c: choose(s, b, c.replace(norm_topk_prob=not c.norm_topk_prob)),
    ),
    "the bias is left out": (("MOE-2", "MOE-1"), lambda choose, s, b, c: choose(s, b * 0, c)),
    "the bias has the wrong sign": (("MOE-2", "MOE-1"), lambda choose, s, b, c: choose(s, -b, c)),
    "the bias counts twice": (("MOE-2", "MOE-1"), lambda choose, s, b, c: choose(s, 2 * b, c)),
    "the bias is rolled by one": (
        ("MOE-2", "MOE-1"),
        lambda choose, s, b, c: choose(s, np.roll(b, 1), c),
    ),
    "the bias is in the weights": (
        ("MOE-3", "MOE-1"),
        lambda choose, s, b, c: choose(s + b, b * 0, c),
    ),
    "groups are not looked at": (
        ("MOE-2",),
        lambda choose, s, b, c: choose(s, b, c.replace(n_group=1, topk_group=1)),
    ),
    "one group fewer is kept": (
        ("MOE-2",),
        lambda choose, s, b, c: (
            choose(s, b, c.replace(topk_group=max(c.topk_group - 1, 1)))
            if c.n_group > 1 and c.num_experts_per_tok <= s.shape[1] // c.n_group
            else _best_group(choose, s, b, c)
        ),
    ),
    "one group more is kept": (
        ("MOE-2",),
        lambda choose, s, b, c: choose(
            s, b, c.replace(topk_group=min(c.topk_group + 1, c.n_group))
        ),
    ),
    "a group's score is its best expert": (
        ("MOE-2",),
        lambda choose, s, b, c: _by_group(s, b, c, 1),
    ),
    "a group's score is its sum": (("MOE-2",), lambda choose, s, b, c: _by_group(s, b, c, 99)),
    "a group's score is unbiased": (
        ("MOE-2",),
        lambda choose, s, b, c: _by_group(s, b, c, 2, biased=False),
    ),
    "scores are in bfloat16": (
        ("MOE-2", "MOE-1", "MOE-3"),
        lambda choose, s, b, c: choose(_as(s, ml_dtypes.bfloat16), b, c),
    ),
    "rows have the choice of the row before": (
        ("MOE-2", "FWD-4"),
        lambda choose, s, b, c: tuple(np.roll(x, 1, axis=0) for x in choose(s, b, c)),
    ),
}


def moe_gate() -> Family:
    make = Maker(
        "MoE gate", "MOEG", "the choice of experts and their weights, by layer and occasion"
    )
    for label, (rules, change) in _GATES.items():
        plant = call_of("choose_experts", _gated(change))
        make.add_each(label, rules, plant, (ALWAYS, IN_PREFILL, IN_TREES, LATER_ROUNDS, OF_A_ROOT))
    return make.family()


def _gated(change: Any) -> Any:
    return lambda original, now, scores, bias, config: change(original, scores, bias, config)


# expert ids, weights, gate_up, down -> others
_SUMS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "the first chosen expert is left out": lambda i, w, g, d: (i[:, 1:], w[:, 1:], g, d),
    "the last chosen expert is left out": lambda i, w, g, d: (i[:, :-1], w[:, :-1], g, d),
    "gate and up are exchanged": lambda i, w, g, d: (
        i,
        w,
        np.concatenate([g[:, g.shape[1] // 2 :], g[:, : g.shape[1] // 2]], axis=1),
        d,
    ),
    "down is that of the next expert": lambda i, w, g, d: (i, w, g, np.roll(d, 1, axis=0)),
    "gate and up are those of the next expert": lambda i, w, g, d: (i, w, np.roll(g, 1, axis=0), d),
    "expert 0 is expert 1": lambda i, w, g, d: (np.where(i == 0, 1, i), w, g, d),
    "the last expert is zero": lambda i, w, g, d: (i, w * (i < len(d) - 1), g, d),
    "experts from 8 on are zero": lambda i, w, g, d: (i, w * (i < 8), g, d),
    "even experts are zero": lambda i, w, g, d: (i, w * (i % 2), g, d),
    "the last row is zero": lambda i, w, g, d: (
        i,
        w * (np.arange(len(w)) < len(w) - 1)[:, None],
        g,
        d,
    ),
    "rows from 4 on are zero": lambda i, w, g, d: (i, w * (np.arange(len(w)) < 4)[:, None], g, d),
    "rows from 16 on are zero": lambda i, w, g, d: (i, w * (np.arange(len(w)) < 16)[:, None], g, d),
    "weights are those of row 0": lambda i, w, g, d: (i, np.repeat(w[:1], len(w), 0), g, d),
    "the last inner channel is lost": lambda i, w, g, d: (
        i,
        w,
        g,
        d * (np.arange(d.shape[-1]) < d.shape[-1] - 1),
    ),
    "inner channels from 16 on are lost": lambda i, w, g, d: (
        i,
        w,
        g,
        d * (np.arange(d.shape[-1]) < 16),
    ),
}
_SHARED: dict[str, Callable[[Any], Any]] = {
    "left out": lambda shared: None,
    "doubled": lambda shared: replace(shared, down=shared.down * np.float32(2)),
    "halved": lambda shared: replace(shared, down=shared.down * np.float32(0.5)),
    "too large by 1 %": lambda shared: replace(shared, down=shared.down * np.float32(1.01)),
    "taken off": lambda shared: replace(shared, down=-shared.down),
    "times routed_scaling_factor": lambda shared: replace(
        shared, down=shared.down * np.float32(1.3)
    ),
    "with gate and up exchanged": lambda shared: replace(
        shared,
        gate_up=np.concatenate(
            [shared.gate_up[len(shared.gate_up) // 2 :], shared.gate_up[: len(shared.gate_up) // 2]]
        ),
    ),
    "without its last channel": lambda shared: replace(
        shared, down=shared.down * (np.arange(shared.down.shape[-1]) < shared.down.shape[-1] - 1)
    ),
    "in codes of three bits": lambda shared: replace(shared, down=_coarse(shared.down)),
}


def moe_sum() -> Family:
    make = Maker("MoE sum", "MOEA", "experts, rows and the shared expert in the sum of an MLP")
    for label, change in _SUMS.items():
        plant = call_of("experts", _summed(change))
        whens = (ALWAYS, IN_PREFILL, IN_TREES, LATER_ROUNDS)
        make.add_each(f"routed: {label}", ("MOE-4", "MOE-3"), plant, whens)
    for label, shared in _SHARED.items():
        make.add(f"the shared expert {label}", ("MOE-4",), _shared(shared), ALWAYS)
        for layer in (1, 2):
            make.add(
                f"the shared expert of layer {layer} {label}",
                ("MOE-4",),
                _shared(shared, layer),
                ALWAYS,
            )
    return make.family()


def _summed(change: Any) -> Any:
    def call(original: Any, now: Any, x: Any, *rest: Any) -> Any:
        return original(x, *change(*rest))

    return call


def _shared(change: Callable[[Any], Any], only: int | None = None) -> Callable[[Any, Watch], None]:
    def loaded(model: Any) -> Any:
        if only is None:
            return every_shared(model, change)
        one = every_shared(replace(model, layers=model.layers[only : only + 1]), change)
        layers = (*model.layers[:only], *one.layers, *model.layers[only + 1 :])
        return replace(model, layers=layers)

    return lambda engine, watch: on_load(engine, loaded)


_ROUNDED: dict[str, tuple[str, ...]] = {
    "embed": ("FWD-4",),
    "rms_norm": ("NORM-1", "MLA-1", "MLA-2", "FWD-4"),
    "linear": ("MLA-1", "MLA-2", "MLA-3", "FWD-4", "NORM-1", "MOE-4"),
    "add": ("FWD-4", "NORM-1", "MOE-1", "MOE-4"),
    "silu_mul": ("MOE-4",),
    "rotate": ("MLA-7", "MLA-5", "MLA-6"),
    "absorb_query": ("MLA-3",),
    "verify_attn": ("MLA-3",),
    "unabsorb_value": ("MLA-3",),
    "router_scores": ("MOE-1",),
    "experts": ("MOE-4", "MOE-3"),
}
_DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8": ml_dtypes.float8_e4m3fn,
}


def precision() -> Family:
    make = Maker(
        "precision", "NUM", "what an operation leaves is rounded to fewer bits than is declared"
    )
    for operation, rules in _ROUNDED.items():
        for name, dtype in _DTYPES.items():
            plant = result_of(operation, _rounded(dtype))
            whens = (ALWAYS, OF_A_ROOT, large_from(8), long_from(17), IN_ROUND)
            make.add_each(f"{operation} in {name}", (*rules, "LOSSLESS"), plant, whens)
    return make.family()


def _rounded(dtype: Any) -> Any:
    return lambda result, now, *args: _as(result, dtype)


def _as(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(dtype).astype(np.float32)


def _coarse(w: np.ndarray) -> np.ndarray:
    """Even codes alone: those of the seed model are 4 bits wide, which float8 holds exactly."""
    step = 2 * np.abs(w[w != 0]).min()
    return np.asarray(np.round(w / step) * step, w.dtype)


def _edge(w: np.ndarray, axis: int) -> np.ndarray:
    """Ones, and zeros at the end of the axis (-1 or -2)."""
    kept = (np.arange(w.shape[axis]) < w.shape[axis] - 1).astype(np.float32)
    return kept if axis == -1 else kept[:, None]


def _swapped(w: np.ndarray, axis: int) -> np.ndarray:
    order = np.arange(w.shape[axis])
    order[:2] = order[1::-1]
    return np.take(w, order, axis=axis)


def _one_doubled(w: np.ndarray) -> np.ndarray:
    out = w.copy()
    at = np.unravel_index(int(np.abs(out).argmax()), out.shape)
    out[at] *= 2
    return out


def _fewer(chosen: tuple[Any, Any]) -> tuple[Any, Any]:
    ids, weights = chosen
    least = np.argmin(weights, axis=1)[:, None]
    out = weights.copy()
    np.put_along_axis(out, least, 0, axis=1)
    return ids, out


def _last_zero(chosen: tuple[Any, Any]) -> tuple[Any, Any]:
    ids, weights = chosen
    return ids, weights * (np.arange(weights.shape[1]) < weights.shape[1] - 1).astype(np.float32)


def _weighed(chosen: tuple[Any, Any], change: Any) -> tuple[Any, Any]:
    ids, weights = chosen
    return ids, change(weights).astype(np.float32)


def _choice(eligible: np.ndarray, scores: np.ndarray, config: Any) -> tuple[Any, Any]:
    ids = np.argsort(-eligible, axis=-1, kind="stable")[:, : config.num_experts_per_tok]
    ids = np.sort(ids, axis=-1)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights * np.float32(config.routed_scaling_factor)


def _by_group(
    scores: np.ndarray, bias: np.ndarray, config: Any, best: int, *, biased: bool = True
) -> tuple[Any, Any]:
    """A group's score is the sum of its `best` best."""
    n, e = scores.shape
    grouped = (scores + bias).reshape(n, config.n_group, -1)
    scored = grouped if biased else scores.reshape(grouped.shape)
    of_group = np.sort(scored, axis=-1)[..., -best:].sum(axis=-1)
    order = np.argsort(-of_group, axis=-1, kind="stable")[:, : config.topk_group]
    kept = np.zeros(of_group.shape, bool)
    np.put_along_axis(kept, order, True, axis=-1)
    eligible = np.where(kept[..., None], grouped, -np.inf).reshape(n, e)
    return _choice(eligible, scores, config)


def _best_group(choose: Any, scores: np.ndarray, bias: np.ndarray, config: Any) -> tuple[Any, Any]:
    """The best group's experts first, then what is left: one group alone holds too few."""
    n, e = scores.shape
    grouped = (scores + bias).reshape(n, config.n_group, -1)
    of_group = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    best = np.argmax(of_group, axis=-1)
    eligible = grouped.copy()
    eligible[np.arange(n), best] += 100
    return _choice(eligible.reshape(n, e), scores, config)
