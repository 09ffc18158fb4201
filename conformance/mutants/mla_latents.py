"""MLAW: norms of latents, padded heads, the final norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import on_load, wrap

MLA_LATENTS = MutantClass("latent norms and heads")


@MLA_LATENTS.mutant("M086", "MLAW-1", breaks="NORM-1", first_seen_at="q_nope", needs="core")
def latent_eps_of_other_norms(engine: Any) -> None:
    """Rms_norm_eps in the q_a and kv_a norms. Only an eps of some size shows it."""
    others: list[float] = []

    def eps_of(is_latent: bool, eps: float) -> float:
        if not is_latent:  # the input norm comes first
            others[:] = [eps]
        return others[0]

    with_eps(engine, eps_of)


@MLA_LATENTS.mutant("M088", "MLAW-3", breaks="MLA-2", first_seen_at="c_kv", needs="core")
def latent_before_its_norm(engine: Any) -> None:
    """The latent is cached as it was before the kv_a norm."""

    def append_normed(
        original: Any,
        cache: Any,
        layer: int,
        slots: Any,
        projected: Any,
        q_norm: Any,
        kv_norm: Any,
        *rest: Any,
    ) -> Any:
        latents = original(cache, layer, slots, projected, q_norm, kv_norm, *rest)
        q = 0 if q_norm is None else len(q_norm)
        c_kv = projected[:, q : q + len(kv_norm)]
        engine.kernels.append_latents(cache, layer, slots, c_kv, latents.k_pe)
        return latents._replace(c_kv=c_kv)

    wrap(engine, append_normed=append_normed)


@MLA_LATENTS.mutant("M090", "MLAW-5", breaks="MLA-3", first_seen_at="scores", needs="core")
def heads_repeated(engine: Any) -> None:
    """Heads are padded by repeating each, and the first h outputs are kept."""

    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, *rest: Any
    ) -> Any:
        h = q_latent.shape[1]
        padded = (np.repeat(part, 2, axis=1)[:, :h] for part in (q_latent, q_pe))
        return original(cache, layer, *padded, *rest)

    wrap(engine, verify_attn=verify_attn)


@MLA_LATENTS.mutant("M092", "MLAW-7", breaks="NORM-1", first_seen_at="final_hidden", needs="core")
def final_norm_twice(engine: Any) -> None:
    """The final norm is applied twice."""
    final: list[Any] = []

    def rms_norm(original: Any, x: Any, weight: Any, eps: float) -> Any:
        once = original(x, weight, eps)
        return original(once, weight, eps) if weight is final[0] else once

    wrap(engine, rms_norm=rms_norm)

    def change(weights: Any) -> Any:
        final[:] = [weights.final_norm]
        return weights

    on_load(engine, change)


def with_eps(engine: Any, eps_of: Callable[[bool, float], float]) -> None:
    """Each norm's eps is eps_of(whether it is a latent's, the right one)."""
    latent: list[Any] = []

    def rms_norm(original: Any, x: Any, weight: Any, eps: float) -> Any:
        return original(x, weight, eps_of(any(weight is one for one in latent), eps))

    wrap(engine, rms_norm=rms_norm)

    def change(weights: Any) -> Any:
        for layer in weights.layers:
            latent.extend((layer.attention.q_norm, layer.attention.kv_norm))
        return weights

    on_load(engine, change)
