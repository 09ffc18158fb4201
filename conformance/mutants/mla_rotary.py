"""MLAR: pairs, columns and precision of the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import every_attention, kv_a, on_load, wrap

MLA_ROTARY = MutantClass("rotary layout and precision")


@MLA_ROTARY.mutant("M080", "MLAR-1", breaks="MLA-7", first_seen_at="q_pe", needs="core")
def half_split_pairs(engine: Any) -> None:
    """Pairs (i, i + r/2) where the model has (2i, 2i + 1)."""

    def unsplit(rope: Any) -> Any:
        """Half-split rows back in the checkpoint's order: firsts and seconds by turns."""
        return np.stack(np.split(rope, 2, axis=-2), axis=-2).reshape(rope.shape)

    def change(attention: Any) -> Any:
        r = len(kv_a(attention)) - len(attention.kv_norm)
        h, _, d = attention.w_kc.shape
        qkv_a = np.concatenate([attention.qkv_a[:-r], unsplit(attention.qkv_a[-r:])])
        b = attention.q_b.reshape(h, d + r, -1)
        b = np.concatenate([b[:, :d], unsplit(b[:, d:])], axis=1).reshape(h * (d + r), -1)
        return replace(attention, qkv_a=qkv_a, q_b=b)

    on_load(engine, lambda weights: every_attention(weights, change))


@MLA_ROTARY.mutant("M082", "MLAR-3", breaks="MLA-6", first_seen_at="q_pe", needs="core")
def frequencies_in_bfloat16(engine: Any) -> None:
    """Inverse frequencies are rounded to bfloat16."""

    def rotary_angles(original: Any, positions: Any, inverse: Any, factor: float) -> Any:
        rounded = inverse.astype(ml_dtypes.bfloat16).astype(np.float64)
        return original(positions, rounded, factor)

    wrap(engine, rotary_angles=rotary_angles)


@MLA_ROTARY.mutant("M083", "MLAR-4", breaks="MLA-7", first_seen_at="q_pe", needs="core")
def angles_in_bfloat16(engine: Any) -> None:
    """Angles are rounded to bfloat16 before cos and sin."""

    def rotary_angles(original: Any, positions: Any, inverse: Any, factor: float) -> Any:
        angles = positions.astype(np.float64)[:, None] * inverse
        rounded = angles.astype(ml_dtypes.bfloat16).astype(np.float64)
        return (
            (np.cos(rounded) * factor).astype(np.float32),
            (np.sin(rounded) * factor).astype(np.float32),
        )

    wrap(engine, rotary_angles=rotary_angles)


@MLA_ROTARY.mutant("M084", "MLAR-5", breaks="MLA-2", first_seen_at="c_kv", needs="core")
def columns_swapped(engine: Any) -> None:
    """The columns are taken as [k_pe | c_kv]."""

    def change(attention: Any) -> Any:
        columns = kv_a(attention)
        r = len(columns) - len(attention.kv_norm)
        rows = attention.qkv_a[: -len(columns)]
        return replace(attention, qkv_a=np.concatenate([rows, np.roll(columns, -r, axis=0)]))

    on_load(engine, lambda weights: every_attention(weights, change))
