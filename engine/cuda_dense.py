"""Rows through weights on a CUDA device: rows.cu, and the launchers of projections and experts."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np

from kdtr.contract import Array, ModelConfig
from kdtr.engine import cuda_experts, cuda_linear, cuda_router
from kdtr.engine.cuda_device import BLOCK, CudaDevice, i64, launching
from kdtr.engine.kernel_set import Routed
from kdtr.engine.weights import MoeWeights


class DenseOperations(CudaDevice):
    """The part of a `KernelSet` whose rows do not meet: embedding, norms, projections, experts."""

    @launching
    def embed(self, table: Array, tokens: Array) -> Array:
        n, m = len(tokens), table.shape[1]
        out = self._empty((n, m), self._real)
        self._launch("rows", "embed", (n, 1, 1), BLOCK, table, tokens, out, m, self._count(n))
        return out

    @launching
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        n, width = x.shape
        out = self._empty((n, width), self._real)
        self._launch(
            "rows",
            "rms_norm",
            (n, 1, 1),
            BLOCK,
            *(x, *i64(x.strides[0] // x.itemsize), weight, ctypes.c_float(eps), out, width),
            self._count(n),
        )
        return out

    @launching
    def add_norm(
        self, residual: Array, delta: Array, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        n, m = residual.shape
        total, normed = (self._empty((n, m), self._real) for _ in range(2))
        self._launch(
            "rows",
            "add_norm",
            (n, 1, 1),
            BLOCK,
            *(residual, delta, weight, ctypes.c_float(eps), total, normed, m, self._count(n)),
        )
        return total, normed

    @launching
    def linear(self, x: Array, weight: Array) -> Array:
        return cuda_linear.linear(
            partial(self._modules.kernel, "linear"),
            x,
            weight,
            self._count(len(x)),
            wgmma=self._hopper("linear_wgmma"),
            overlap=True,
        )

    @launching
    def swiglu(self, x: Array, gate_up: Array, down: Array) -> Array:
        return cuda_experts.swiglu(
            partial(self._modules.kernel, "experts"),
            partial(self._modules.kernel, "linear"),
            x,
            gate_up,
            down,
            self._count(len(x)),
            wgmma=self._hopper("linear_wgmma"),
            overlap=True,
        )

    @launching
    def route(self, x: Array, gate: Array, correction_bias: Array, config: ModelConfig) -> Routed:
        kernel = partial(self._modules.kernel, "router")
        groups = cuda_router.new_groups(len(x), len(gate), config.num_experts_per_tok)
        count = self._count(len(x))
        chosen = cuda_router.route(
            kernel, x, gate, correction_bias, config, count, groups, self._arrived, overlap=True
        )
        return Routed(*chosen, groups)

    @launching
    def moe(self, x: Array, routed: Routed, weights: MoeWeights) -> Array:
        shared, count, groups = weights.shared, self._count(len(x)), routed.groups
        if groups is None:
            router = partial(self._modules.kernel, "router")
            groups = cuda_router.grouped(router, routed.ids, len(weights.down), count, overlap=True)
        return cuda_experts.moe(
            partial(self._modules.kernel, "experts"),
            x,
            routed.ids,
            routed.weights,
            weights.gate_up,
            weights.down,
            None if shared is None else (shared.gate_up, shared.down),
            groups,
            count,
            overlap=True,
        )

    @launching
    def argmax(self, logits: Array) -> Array:
        n, w = logits.shape
        targets = self._empty((n,), np.int64)
        count = self._count(n)
        self._launch("rows", "argmax", (n, 1, 1), 1024, logits, targets, w, count)
        return targets
