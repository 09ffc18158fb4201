"""Wrong embeddings, norms, columns and rotations: what attention is given, made otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np

from kdtr.conformance.diagnosis_forward import (
    Array,
    Workings,
    frequencies,
    mscale,
    rms_norm,
    rotate,
)
from kdtr.conformance.diagnosis_past import Past
from kdtr.conformance.diagnosis_twist import Twist, twisted
from kdtr.contract import ModelConfig


def projection_twists(past: Past) -> Iterator[Twist]:
    """All of this file, for the scene's forward."""
    yield from _embeddings(past)
    yield from _norms(past)
    yield from _columns(past)
    yield from _rotations(past)
    yield from _roundings(past)


def _embeddings(past: Past) -> Iterator[Twist]:
    def at_zero(x: Array, positions: Array) -> Array:
        return x * (positions != 0)[:, None]

    def scaled(x: Array, positions: Array) -> Array:
        return x * x.shape[-1] ** 0.5

    for says, embed in (
        ("the embedding of the row at position 0 is zero", at_zero),
        ("embeddings are multiplied by sqrt(hidden_size)", scaled),
    ):
        yield twisted(past, says, "FWD-4", "embedding", replace(past.right, embed=embed), 3)


_NORMS = {  # by kind: the name, and where it is seen first
    "input": ("input norm", "q_nope"),
    "q_a": ("q_a norm", "q_nope"),
    "kv_a": ("kv_a norm", "c_kv"),
    "post": ("post-attention norm", "router_scores"),
    "final": ("final norm", "final_hidden"),
}
_MAIN, _LATENT = ("input", "post", "final"), ("q_a", "kv_a")


def _norms(past: Past) -> Iterator[Twist]:
    config = past.scene.config
    seen = {kind: stage for kind, (_, stage) in _NORMS.items()}
    if config.is_dense(0):
        seen["post"] = "mlp_out"

    def other(
        kinds: tuple[str, ...], norm: Callable[[str, Array, Array, float], Array]
    ) -> Workings:
        def either(kind: str, x: Array, weight: Array, eps: float) -> Array:
            return norm(kind, x, weight, eps) if kind in kinds else rms_norm(kind, x, weight, eps)

        return replace(past.right, norm=either)

    def with_eps(eps: float) -> Callable[[str, Array, Array, float], Array]:
        return lambda kind, x, weight, _: rms_norm(kind, x, weight, eps)

    eps_of = {
        f"rms_norm_eps = {config.rms_norm_eps:g}": config.rms_norm_eps,
        f"latent_norm_eps = {config.latent_norm_eps:g}": config.latent_norm_eps,
    }
    eps_of |= {f"{eps:g}": eps for eps in (1e-5, 1e-6, 1e-8) if eps not in eps_of.values()}
    groups: list[tuple[tuple[str, ...], str, float, str]] = [
        (_MAIN, "input, post-attention and final norms take", config.rms_norm_eps, "q_nope"),
        (_LATENT, "q_a and kv_a norms take", config.latent_norm_eps, "q_nope"),
    ]
    groups += [
        (
            (kind,),
            f"{name} takes",
            config.latent_norm_eps if kind in _LATENT else config.rms_norm_eps,
            seen[kind],
        )
        for kind, (name, _) in _NORMS.items()
    ]
    for kinds, who, right, seen_in in groups:
        for name, eps in eps_of.items():
            if eps != right:
                says = f"the {who} eps {name}, should take {right:g}"
                specific = 3 if len(kinds) > 1 and "=" in name else 2
                how = other(kinds, with_eps(eps))
                yield twisted(past, says, "NORM-1", seen_in, how, specific, sure=False)
    for kind, (name, _) in _NORMS.items():
        seen_in = seen[kind]
        rule = "MLA-2" if kind == "kv_a" else "MLA-1" if kind == "q_a" else "NORM-1"
        for says, norm in (
            (f"the {name} is missing", lambda kind, x, weight, eps: x),
            (
                f"the {name} lacks its weight",
                lambda kind, x, weight, eps: rms_norm(kind, x, np.ones_like(weight), eps),
            ),
            (f"the {name} is applied twice", _twice),
            (f"the {name} subtracts the mean, as LayerNorm does", _layer_norm),
            (
                f"the {name} multiplies by 1 + weight",
                lambda kind, x, weight, eps: rms_norm(kind, x, 1 + weight, eps),
            ),
        ):
            yield twisted(past, says, rule, seen_in, other((kind,), norm), 3, sure=False)


def _twice(kind: str, x: Array, weight: Array, eps: float) -> Array:
    return rms_norm(kind, rms_norm(kind, x, weight, eps), weight, eps)


def _layer_norm(kind: str, x: Array, weight: Array, eps: float) -> Array:
    return rms_norm(kind, x - x.mean(axis=-1, keepdims=True), weight, eps)


_Split = Callable[[ModelConfig, Array], tuple[Array, Array]]


def _columns(past: Past) -> Iterator[Twist]:
    """MLA-1 and MLA-2: which columns of a projection are what."""
    right = past.right

    def rope_first(config: ModelConfig, kv: Array) -> tuple[Array, Array]:
        r = config.qk_rope_head_dim
        return kv[:, r:], kv[:, :r]

    def end_of_latent(config: ModelConfig, kv: Array) -> tuple[Array, Array]:
        c = config.kv_lora_rank
        return kv[:, :c], kv[:, c - config.qk_rope_head_dim : c]

    def regrouped(split: _Split) -> _Split:
        """Of weights whose rope rows were put in half-split order when they were loaded."""

        def other(config: ModelConfig, kv: Array) -> tuple[Array, Array]:
            c = config.kv_lora_rank
            latent, rope = kv[:, :c], kv[:, c:]
            rope = np.concatenate([rope[:, 0::2], rope[:, 1::2]], axis=1)
            latent, key = split(config, np.concatenate([latent, rope], axis=1))
            return latent, np.stack(np.split(key, 2, axis=1), axis=2).reshape(key.shape)

        return other

    def query_rope_first(config: ModelConfig, q: Array) -> tuple[Array, Array]:
        r = config.qk_rope_head_dim
        return q[..., r:], q[..., :r]

    def heads_last(config: ModelConfig, q: Array) -> tuple[Array, Array]:
        n, h, x = q.shape
        q = q.reshape(n, x, h).swapaxes(1, 2)
        return q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]

    c, r = past.scene.config.kv_lora_rank, past.scene.config.qk_rope_head_dim
    splits = (
        (
            f"the columns of kv_a are taken as [k_pe {r} | c_kv {c}], should be [c_kv | k_pe]",
            "c_kv",
            rope_first,
        ),
        (
            f"k_pe is taken from columns {c - r}..{c - 1} of kv_a, the end of the latent; should "
            f"be {c}..{c + r - 1}",
            "k_pe",
            end_of_latent,
        ),
    )
    for says, seen_in, split in splits:
        for one in (split, regrouped(split)) if right.interleave else (split,):
            yield twisted(past, says, "MLA-2", seen_in, replace(right, split_latent=one), 3)
    yield twisted(
        past,
        "in each head of q the rope part is taken first, the nope part second",
        "MLA-1",
        "q_nope",
        replace(right, split_query=query_rope_first),
        3,
    )
    yield twisted(
        past,
        "the columns of q are taken as [dimension, head], should be [head, dimension]",
        "MLA-1",
        "q_nope",
        replace(right, split_query=heads_last),
        3,
    )


_Rotate = Callable[[Workings, str, Array, Array], Array]


def _rotations(past: Past) -> Iterator[Twist]:
    config, right = past.scene.config, past.right

    def only(kinds: str, rotation: _Rotate) -> _Rotate:
        return lambda w, kind, x, p: (rotation if kind in kinds else rotate)(w, kind, x, p)

    def other(says: str, rule: str, rotation: _Rotate) -> Iterator[Twist]:
        for kinds, who in (("qk", "q_pe and k_pe are"), ("q", "q_pe is"), ("k", "k_pe is")):
            seen_in = "k_pe" if kinds == "k" else "q_pe"
            how = replace(right, rotate=only(kinds, rotation))
            yield twisted(past, f"{who} {says}", rule, seen_in, how, 3)

    def differently(**changes: object) -> _Rotate:
        return lambda w, kind, x, p: rotate(replace(w, **changes), kind, x, p)  # type: ignore[arg-type]

    pairs = ("(i, i + r/2)", "(2i, 2i + 1)")
    if config.qk_rope_head_dim > 2:
        says = (
            f"rotated in pairs {pairs[not right.interleave]}, should be {pairs[right.interleave]}: "
            f"rope_interleave is {str(right.interleave).lower()}"
        )
        yield from other(says, "MLA-7", differently(interleave=not right.interleave))
        yield from other(
            "shown interleaved, or its halves are mixed: should be half-split",
            "MLA-7",
            _interleaved,
        )
    yield from other("half-split with its halves swapped", "MLA-7", _halves_swapped)
    yield from other("not rotated", "MLA-7", lambda w, kind, x, p: rotate(w, kind, x, 0 * p))
    yield from other("rotated twice", "MLA-7", lambda w, kind, x, p: rotate(w, kind, x, 2 * p))
    yield from other("rotated backwards", "MLA-7", lambda w, kind, x, p: rotate(w, kind, x, -p))
    if config.yarn is None:
        return
    plain = frequencies(config.replace(yarn=None))
    yield from other("rotated by frequencies without YaRN", "MLA-6", differently(frequencies=plain))
    linear = plain / config.yarn.factor
    yield from other(
        "rotated by frequencies that are all divided by YaRN's factor",
        "MLA-6",
        differently(frequencies=linear),
    )
    all_dim = mscale(config.yarn.factor, config.yarn.mscale_all_dim or 1.0)
    amplitudes = {
        "not multiplied by YaRN's factor of cos and sin": 1.0,
        "multiplied by mscale(factor, mscale_all_dim), not by the ratio": all_dim,
        "multiplied by mscale(factor, mscale), not by the ratio": mscale(
            config.yarn.factor, config.yarn.mscale or 1.0
        ),
        "multiplied by YaRN's factor of cos and sin twice": right.amplitude**2,
    }
    for says, amplitude in amplitudes.items():
        if abs(amplitude / right.amplitude - 1) > 1e-9:
            yield from other(says, "MLA-5", differently(amplitude=amplitude))


def _roundings(past: Past) -> Iterator[Twist]:
    """MLA-6, MLA-7: the angles of the rotation in too few bits."""
    right = past.right
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):

        def rounded(x: Array, dtype: type = dtype) -> Array:
            few: Array = x.astype(dtype)
            return few.astype(np.float64)

        how = replace(right, frequencies=rounded(right.frequencies))
        says = f"the inverse frequencies of the rotation are rounded to {name}"
        yield twisted(past, says, "MLA-6", "q_pe", how, 3)
        for what, rule, angle in (
            ("the angles of the rotation are", "MLA-7", lambda p, f, r=rounded: r(p * f)),
            (
                "positions, as the rotation takes them, are",
                "POS-1",
                lambda p, f, r=rounded: r(p) * f,
            ),
        ):
            how = replace(right, angle=angle)
            yield twisted(past, f"{what} rounded to {name}", rule, "q_pe", how, 3)
        how = replace(right, table=rounded)
        says = f"cos and sin of the rotation are rounded to {name}"
        yield twisted(past, says, "MLA-7", "q_pe", how, 2)


def _interleaved(workings: Workings, kind: str, x: Array, positions: Array) -> Array:
    first, second = np.split(rotate(workings, kind, x, positions), 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(x.shape)


def _halves_swapped(workings: Workings, kind: str, x: Array, positions: Array) -> Array:
    return np.concatenate(np.split(rotate(workings, kind, x, positions), 2, axis=-1)[::-1], axis=-1)
