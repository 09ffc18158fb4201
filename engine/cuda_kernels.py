"""The CUDA kernel set: every operation a launch of `kernels/*.cu` through CuPy, by subject.

    cuda_device.py   stream, turn, launches: what all of them share
    cuda_storage.py  arrays to the device and from it, weights, cache rows
    cuda_graphs.py   programs, launched or captured
    cuda_tree.py     layouts, walk, best-first trees
    cuda_dense.py    embedding, norms, projections, experts
    cuda_latents.py  attention, and the rows it reads

Arrays are CuPy's. What runs a program, and when as a graph: `cuda_launcher.py`.
"""

from __future__ import annotations

import copy
from typing import Any

from kdtr.contract import InputError, ModelConfig, NumericProfile, TreeError, UnsupportedError
from kdtr.engine import cuda_router
from kdtr.engine.cuda_dense import DenseOperations
from kdtr.engine.cuda_graphs import GraphOperations
from kdtr.engine.cuda_latents import LatentOperations
from kdtr.engine.cuda_launch import MOST_BLOCKS
from kdtr.engine.cuda_launcher import CudaLauncher
from kdtr.engine.cuda_shared import MOST_LATENT, MOST_NODES, MOST_NOPE, MOST_ROPE
from kdtr.engine.cuda_tree import TreeOperations
from kdtr.engine.kernel_set import Rows
from kdtr.engine.paging import PagedCache

_LIMITS = {
    "n_routed_experts": cuda_router.MAX_EXPERTS,
    "num_experts_per_tok": cuda_router.MAX_CHOSEN,
    "n_group": cuda_router.MAX_GROUPS,
    "kv_lora_rank": MOST_LATENT,
    "qk_rope_head_dim": MOST_ROPE,
    "qk_nope_head_dim": MOST_NOPE,
}


class CudaKernels(TreeOperations, DenseOperations, LatentOperations, GraphOperations):
    """A `KernelSet` on the device that is current when it is made.

    graphs   whether trees are captured as CUDA graphs
    guarded  whether buffers lie between guard bands that are compared after each run
    Raises UnsupportedError without a usable device, EngineError for a kernel that does not compile
    or load, MemoryError without room for the kernels.
    """

    def __init__(self, dtype: str, *, graphs: bool, guarded: bool) -> None:
        super().__init__(dtype, guarded=guarded)
        # Shapes that a session has run, by what else decides which kernels are launched.
        self._warm: dict[tuple[ModelConfig, int], set[Any]] | None = {} if graphs else None
        # Not batch invariant: the attention's splits depend on the number of rows.
        self.profile = NumericProfile(
            weights=dtype,
            activations=dtype,
            latents=dtype,
            logits=dtype,
            deterministic=True,
            batch_invariant=False,
        )

    @staticmethod
    def check_tree(n_nodes: int) -> None:
        """A tree's parents lie in the shared memory of a block, its bucket's padding too."""
        if n_nodes > MOST_NODES:
            raise TreeError(
                f"a tree of {n_nodes} nodes; the CUDA kernels lay out at most {MOST_NODES}: split "
                "it, or use engine host"
            )

    @staticmethod
    def check_row_count(verb: str, n_rows: int, config: ModelConfig) -> None:
        """Blocks of 8 rows along a grid, and rows that experts find by offsets of 32 bits."""
        most = min(8 * MOST_BLOCKS, ((1 << 32) - 1) // (2 * config.hidden_size))
        if n_rows > most:
            raise InputError(
                f"{verb} of {n_rows} rows; the CUDA kernels take at most {most} of this model at "
                "once: prefill in chunks of no more"
            )

    @staticmethod
    def check_model(config: ModelConfig) -> None:
        """What shared memory and registers were laid out for."""
        for field, most in _LIMITS.items():
            value = getattr(config, field)
            if value > most:
                raise UnsupportedError(
                    f"{field} = {value}; the CUDA kernels take at most {most}: use engine host"
                )

    def launcher(self, cache: PagedCache, config: ModelConfig) -> CudaLauncher:
        """Its graphs hold the addresses of this cache."""
        if self._warm is None:
            return CudaLauncher(self, cache, None)
        return CudaLauncher(self, cache, self._warm.setdefault((config, cache.page_size), set()))

    def over(self, rows: Rows) -> CudaKernels:
        """The same set, whose kernels read these rows' count."""
        bound = copy.copy(self)
        bound._rows = rows
        return bound
