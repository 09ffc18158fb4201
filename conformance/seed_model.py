"""Weights and drafts from an integer hash: any language regenerates them in a few lines.

Every weight is code * 2**-k with an integer code, of 4 bits where no model says otherwise: -7..7,
exact in float32, bfloat16 and float16, and in int4 with a power-of-two scale. Engines of any
precision start from the same numbers. Codes of 8 bits, sign included, show an engine that keeps
weights in float8 or int4.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, sqrt

import ml_dtypes
import numpy as np

from kdtr.contract import ModelConfig, tensor_shapes

_BITS = 4  # of a code

# Gains chosen once, so that the router and the head decide with room to spare.
_GAIN = {"gate.weight": 2.5, "lm_head.weight": 2.0}
_EMBEDDING_SCALE = 2.0**-2
_NORM_SCALE = 2.0**-5
_BIAS_SCALE = 2.0**-6


def hash_u64(seed: int, stream: str, n: int) -> np.ndarray:
    """n 64-bit values: splitmix64 of seed + FNV-1a(stream) + index, all modulo 2**64."""
    state = 0xCBF29CE484222325
    for byte in stream.encode():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64((seed + state) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hash_below(seed: int, stream: str, n: int, bound: int) -> np.ndarray:
    """n integers 0..bound-1, bound < 2**32: the upper half times bound, upper half again."""
    return ((hash_u64(seed, stream, n) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)


def seed_tensors(
    config: ModelConfig, seed: int, *, matrix_bits: int = _BITS
) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint with this configuration, float32, on the code grid.

    matrix_bits  of the codes of matrices, sign included; norms and biases have 4
    """
    return {
        name: _tensor(name, shape, seed, matrix_bits)
        for name, shape in tensor_shapes(config).items()
    }


@dataclass(frozen=True, slots=True)
class SeedModel:
    """A generated model: a configuration, a seed, and what is bent on purpose.

    bias             added to every correction bias: strongly negative ones tell -inf from 0
    twins            pairs of tokens (kept, copied) with equal rows in the head: exact ties
    near_twins       the same, but for 0 and near_gap in channel 1: near ties
    near_gap         2**-20: below float32's noise; 2**-11: above it, below a step of bfloat16
    matrix_bits      of the codes of matrices: 4, or 8
    flat_router      the router of every layer is zero and so is its bias: ties of experts
    negative_logits  a feature that every token has pulls all logits below zero
    """

    name: str
    config: ModelConfig
    seed: int
    bias: float = 0.0
    twins: tuple[tuple[int, int], ...] = ()
    near_twins: tuple[tuple[int, int], ...] = ()
    near_gap: float = 2.0**-20
    matrix_bits: int = _BITS
    flat_router: bool = False
    negative_logits: bool = False

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint in bfloat16, which holds it exactly."""
        tensors = seed_tensors(self.config, self.seed, matrix_bits=self.matrix_bits)
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name] += np.float32(self.bias)
            if self.flat_router and ".mlp.gate." in name:
                tensors[name] = np.zeros_like(tensors[name])
        head = tensors["lm_head.weight"]
        for kept, copied in (*self.twins, *self.near_twins):
            head[copied] = head[kept]
        for kept, copied in self.near_twins:
            head[kept, 1], head[copied, 1] = 0, self.near_gap
        if self.negative_logits:
            tensors["model.embed_tokens.weight"][:, 0] = 4
            head[:, 0] = -5
        stored = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
        for name, array in stored.items():
            assert np.array_equal(array.astype(np.float32), tensors[name]), f"{name} is inexact"
        return stored


def _tensor(name: str, shape: tuple[int, ...], seed: int, matrix_bits: int) -> np.ndarray:
    is_vector = "norm" in name or name.endswith("e_score_correction_bias")
    most = 2 ** ((_BITS if is_vector else matrix_bits) - 1) - 1
    size = int(np.prod(shape))
    codes = hash_below(seed, name, size, 2 * most + 1).astype(np.float32) - np.float32(most)
    codes = codes.reshape(shape)
    if "norm" in name:
        return 1 + codes * np.float32(_NORM_SCALE)
    if name.endswith("e_score_correction_bias"):
        return codes * np.float32(_BIAS_SCALE)
    if name == "model.embed_tokens.weight":
        return codes * np.float32(_EMBEDDING_SCALE * 2.0 ** (_BITS - matrix_bits))
    gain = next((g for suffix, g in _GAIN.items() if name.endswith(suffix)), 1.0)
    std = sqrt(most * (most + 1) / 3)  # of the uniform distribution over the codes
    return codes * np.float32(_power_of_two_below(gain / (std * shape[-1] ** 0.5)))


def _power_of_two_below(x: float) -> float:
    _, exponent = frexp(x)
    return 2.0 ** (exponent - 1)
