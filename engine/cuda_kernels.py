"""The CUDA kernel set: every operation a launch of `kernels/*.cu` through CuPy.

Arrays are CuPy's; one of the storage dtype bfloat16 is an array of its bits, uint16, so that
nothing but our kernels can compute with it. Everything runs on the set's own stream, because a
graph cannot be captured on the default one.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Generic, TypeVar

import ml_dtypes
import numpy as np

from kdtr.contract import (
    Array,
    ModelConfig,
    NumericProfile,
    Trace,
    TreeError,
    UnsupportedError,
)
from kdtr.engine import cuda_attention, cuda_experts, cuda_linear
from kdtr.engine.cuda_guard import Guard
from kdtr.engine.cuda_launch import launch
from kdtr.engine.cuda_launcher import CudaLauncher
from kdtr.engine.cuda_modules import Modules, import_cupy
from kdtr.engine.kernel_set import DeviceInt, Latents, Routed, Rows, Visibility, Walk
from kdtr.engine.paging import PagedCache
from kdtr.engine.weights import MoeWeights

T = TypeVar("T")
Operation = TypeVar("Operation", bound=Callable[..., Any])

_BLOCK = 256
_QUERY_ROWS, _QUERY_COLUMNS = 8, 16  # of latent_query, per block and per warp
MOST_NODES = 9_985  # the largest bucket of rows whose parents fit the shared memory asked for
_LIMITS = {
    "n_routed_experts": cuda_experts.MAX_EXPERTS,
    "num_experts_per_tok": cuda_experts.MAX_CHOSEN,
    "n_group": cuda_experts.MAX_GROUPS,
    "kv_lora_rank": 1024,
    "qk_rope_head_dim": 256,
    "qk_nope_head_dim": 256,
}


@dataclass(frozen=True, slots=True)
class Graph(Generic[T]):
    """A captured program, what a replay leaves, and the memory that both live in."""

    graph: Any
    result: T
    memory: Any
    guard: Guard | None


def _on_stream(operation: Operation) -> Operation:
    """The set's stream is the current one while the operation runs."""

    @wraps(operation)
    def run(self: CudaKernels, *args: Any, **kwargs: Any) -> Any:
        with self._stream:
            return operation(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class CudaKernels:
    """A `KernelSet` on the current device; `rows` is set by `over`.

    graphs   whether trees are captured as CUDA graphs
    guarded  whether buffers lie between guard bands that are compared after each run
    Raises UnsupportedError without a usable device, EngineError for a kernel that does not compile.
    """

    def __init__(self, dtype: str, *, graphs: bool, guarded: bool) -> None:
        self._cupy = import_cupy()
        self._modules = Modules(self._cupy, dtype)
        self._real = np.dtype(np.float32 if dtype == "float32" else np.uint16)
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        with self._stream:
            cuda_linear.arrived()  # not in a graph's memory
        self._guarded = guarded
        self._warm: set[Any] | None = set() if graphs else None
        self._rows: Rows | None = None
        self._ones: dict[int, Array] = {}
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._cupy.cuda.Device().id)
        self.device = properties["name"].decode()
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
    def check_model(config: ModelConfig) -> None:
        """What shared memory and registers were laid out for."""
        for field, most in _LIMITS.items():
            value = getattr(config, field)
            if value > most:
                raise UnsupportedError(
                    f"{field} = {value}; the CUDA kernels take at most {most}: use engine host"
                )

    def launcher(self, cache: PagedCache) -> CudaLauncher:
        """Its graphs hold the addresses of this cache."""
        return CudaLauncher(self, self._warm)

    def over(self, rows: Rows) -> CudaKernels:
        """The same set, whose kernels read these rows' count."""
        bound = copy.copy(self)
        bound._rows = rows
        return bound

    # Launching (`CudaLauncher`)

    @_on_stream
    def launch(self, program: Callable[[Trace], T], trace: Trace) -> T:
        """The program as it comes."""
        if not self._guarded:
            return program(trace)
        guard = Guard(self._cupy, self._cupy.get_default_memory_pool().malloc)
        with self._cupy.cuda.using_allocator(guard.malloc):
            result = program(trace)
        guard.check()
        return result

    @_on_stream
    def capture(self, program: Callable[[Trace], T], trace: Trace) -> Graph[T]:
        """The program as a graph; nothing has run yet."""
        pool, kept = self._cupy.cuda.MemoryPool(), []
        guard = Guard(self._cupy, pool.malloc) if self._guarded else None

        def malloc(size: int) -> Any:
            """What a graph has captured stays: a pool that runs short frees what looks unused."""
            kept.append(pool.malloc(size))
            return kept[-1]

        with self._cupy.cuda.using_allocator(malloc if guard is None else guard.malloc):
            self._stream.begin_capture()
            try:
                result = program(trace)
            except BaseException:
                with suppress(Exception):  # the capture is invalid: the first error is the one
                    self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
        return Graph(graph, result, kept, guard)

    @_on_stream
    def replay(self, graph: Graph[T]) -> T:
        """Runs it; the result's arrays are those of every replay."""
        graph.graph.launch(self._stream)
        if graph.guard is not None:
            graph.guard.check()
        return graph.result

    # Memory

    @_on_stream
    def upload(self, host: np.ndarray) -> Array:
        array = self._empty(host.shape, host.dtype)
        array.set(np.ascontiguousarray(host))
        return array

    def device_int(self, value: int) -> DeviceInt:
        return self.upload(np.array([value], np.int64))

    def upload_weight(self, host: np.ndarray) -> Array:
        if self._real == np.uint16:
            return self.upload(host.astype(ml_dtypes.bfloat16).view(np.uint16))
        return self.upload(host)

    @_on_stream
    def overwrite(self, array: Array, host: np.ndarray) -> None:
        array.set(np.ascontiguousarray(host))

    @_on_stream
    def to_host(self, array: Array) -> np.ndarray:
        host: np.ndarray = self._cupy.asnumpy(array)
        if host.dtype == np.uint16:
            return host.view(ml_dtypes.bfloat16).astype(np.float32)
        return host

    @_on_stream
    def new_rows(self, n_layers: int, n_rows: int, row_len: int) -> Array:
        return self._empty((n_layers, n_rows, row_len), self._real)

    @_on_stream
    def poison_rows(self, rows: Array, first: int, count: int) -> None:
        n_layers, _, row_len = rows.shape
        n = count * row_len
        grid = (min(1024, -(-n // _BLOCK)), n_layers, 1)
        self._launch(
            "latents", "poison_rows", grid, _BLOCK, rows, *_i64(rows[0].size, first * row_len, n)
        )

    @_on_stream
    def read_rows(self, cache: PagedCache, n_slots: int) -> np.ndarray:
        n_layers, _, row_len = cache.rows.shape
        out = self._empty((n_layers, n_slots, row_len), self._real)
        if n_slots:
            self._launch(
                "latents",
                "read_rows",
                (n_slots, n_layers, 1),
                _BLOCK,
                *(cache.rows, *_i64(cache.rows[0].size), cache.page_table, cache.page_size),
                *(out, row_len, int(self._swizzled(cache))),
            )
        return self.to_host(out)

    # Tree

    @_on_stream
    def build_best_first(
        self, draft_logits: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        depths, w = draft_logits.shape
        k = min(budget, w)
        if depths == 0 or k == 0:
            return np.array([-1]), np.array([-1])
        logits = self.upload(np.asarray(draft_logits, np.float64))
        tokens = self._empty((depths, k), np.int32)
        log_probs = self._empty((depths, k), np.float64)
        self._launch(
            "best_first", "rank_tokens", (depths, 1, 1), 256, logits, w, k, tokens, log_probs
        )
        prefixes = self._empty((2 * budget + 1, 32), np.uint8)  # sizeof(Prefix)
        paths = self._empty((budget + 1, depths), np.int32)
        parents, nodes = (self._empty((budget + 1,), np.int64) for _ in range(2))
        n_nodes = self._empty((1,), np.int64)
        self._launch(
            "best_first",
            "grow_tree",
            (1, 1, 1),
            32,
            *(tokens, log_probs, depths, k, budget, prefixes, paths, parents, nodes, n_nodes),
        )
        n = int(self.to_host(n_nodes)[0])
        return self.to_host(parents[:n]), self.to_host(nodes[:n])

    @_on_stream
    def tree_layout(self, parents: Array, committed_len: DeviceInt) -> tuple[Array, Array]:
        n = len(parents)
        positions, bits = self._layout(n)
        self._launch(
            "tree",
            "tree_layout",
            (-(-n // 128), 1, 1),
            128,
            *(parents, committed_len, positions, bits, n, bits.shape[1]),
            shared=4 * n,
        )
        return positions, bits

    @_on_stream
    def causal_layout(self, n: int, committed_len: DeviceInt) -> tuple[Array, Array]:
        positions, bits = self._layout(n)
        self._launch(
            "tree",
            "causal_layout",
            (n, 1, 1),
            128,
            *(committed_len, positions, bits, bits.shape[1]),
        )
        return positions, bits

    def mask_block(self, mask: np.ndarray) -> Array:
        n, width = mask.shape
        padded = np.zeros((n, -(-width // 32) * 32), bool)
        padded[:, :width] = mask
        return self.upload(np.packbits(padded, axis=1, bitorder="little").view(np.uint32))

    @_on_stream
    def full_mask(self, visibility: Visibility) -> Array:
        rows = self._bound()
        bits = visibility.block
        n, words = bits.shape
        out = self._empty((n, rows.max_slots), np.bool_)
        self._launch(
            "tree",
            "full_mask",
            (n, 1, 1),
            _BLOCK,
            *(bits, words, 32 * words, visibility.open_len, out, *_i64(rows.max_slots)),
        )
        return out

    # Dense

    @_on_stream
    def embed(self, table: Array, tokens: Array) -> Array:
        n, m = len(tokens), table.shape[1]
        out = self._empty((n, m), self._real)
        self._launch("rows", "embed", (n, 1, 1), _BLOCK, table, tokens, out, m, self._count(n))
        return out

    @_on_stream
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        n, width = x.shape
        out = self._empty((n, width), self._real)
        self._launch(
            "rows",
            "rms_norm",
            (n, 1, 1),
            _BLOCK,
            *(x, *_i64(x.strides[0] // x.itemsize), weight, ctypes.c_float(eps), out, width),
            self._count(n),
        )
        return out

    @_on_stream
    def add_norm(
        self, residual: Array, delta: Array, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        n, m = residual.shape
        total, normed = (self._empty((n, m), self._real) for _ in range(2))
        self._launch(
            "rows",
            "add_norm",
            (n, 1, 1),
            _BLOCK,
            *(residual, delta, weight, ctypes.c_float(eps), total, normed, m, self._count(n)),
        )
        return total, normed

    @_on_stream
    def linear(self, x: Array, weight: Array) -> Array:
        return cuda_linear.linear(
            partial(self._modules.kernel, "linear"), x, weight, self._count(len(x)), overlap=True
        )

    @_on_stream
    def swiglu(self, x: Array, gate_up: Array, down: Array) -> Array:
        return cuda_experts.swiglu(
            partial(self._modules.kernel, "experts"),
            partial(self._modules.kernel, "linear"),
            x,
            gate_up,
            down,
            self._count(len(x)),
            overlap=True,
        )

    # Attention

    @_on_stream
    def rotary_angles(
        self, positions: Array, inverse_frequencies: Array, factor: float
    ) -> tuple[Array, Array]:
        n, half = len(positions), len(inverse_frequencies)
        cos, sin = (self._empty((n, half), np.float32) for _ in range(2))
        self._launch(
            "latents",
            "rotary_angles",
            (n, 1, 1),
            32,
            *(positions, inverse_frequencies, ctypes.c_double(factor), cos, sin, half),
            self._count(n),
        )
        return cos, sin

    @_on_stream
    def append_normed(
        self,
        cache: PagedCache,
        layer: int,
        slots: Array,
        projected: Array,
        q_norm: Array | None,
        kv_norm: Array,
        eps: float,
        cos: Array,
        sin: Array,
    ) -> Latents:
        n, width = projected.shape
        q, c = 0 if q_norm is None else len(q_norm), len(kv_norm)
        r = width - q - c
        q_a = None if q_norm is None else self._empty((n, q), self._real)
        c_kv, k_pe = self._empty((n, c), self._real), self._empty((n, r), self._real)
        self._launch(
            "latents",
            "append_normed",
            (n, 1, 1),
            _BLOCK,
            *(projected, *_i64(width), q_norm, kv_norm, ctypes.c_float(eps), cos, sin, slots),
            *(q_a, c_kv, k_pe, cache.rows[layer], cache.page_table, cache.page_size, q, c, r),
            int(self._swizzled(cache)),
        )
        return Latents(q_a, c_kv, k_pe)

    @_on_stream
    def latent_query(self, q: Array, w_kc: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Two views of one array [n, h, c + r], as `verify_attn` reads it."""
        n, h, width = q.shape
        _, c, d = w_kc.shape
        r = width - d
        query = self._empty((n, h, c + r), self._real)
        if cuda_linear.fast_query(q, w_kc):
            kernel = partial(self._modules.kernel, "linear")
            count = self._count(n)
            cuda_linear.latent_query(kernel, q, w_kc, cos, sin, query, count, overlap=True)
            return query[..., :c], query[..., c:]
        warps = _BLOCK // 32
        self._launch(
            "latents",
            "latent_query",
            (h, -(-n // _QUERY_ROWS), -(-c // (warps * _QUERY_COLUMNS))),
            _BLOCK,
            *(q, w_kc, cos, sin, query, h, c, d, r, self._count(n)),
            shared=4 * _QUERY_ROWS * d,
        )
        return query[..., :c], query[..., c:]

    @_on_stream
    def new_scores(self, n: int, n_heads: int, visibility: Visibility) -> Array:
        scores = self._empty((n, n_heads, self._bound().max_slots), np.float32)
        self._launch("tree", "fill_neg_inf", (1024, 1, 1), _BLOCK, scores, *_i64(scores.size))
        return scores

    @_on_stream
    def verify_attn(
        self,
        cache: PagedCache,
        layer: int,
        q_latent: Array,
        q_pe: Array,
        visibility: Visibility,
        scale: float,
        split_size: int,
        scores: Array | None = None,
    ) -> Array:
        rows = self._bound()
        hopper = "verify_attn_wgmma"
        return cuda_attention.verify_attn(
            partial(self._modules.kernel, "verify_attn"),
            partial(self._modules.kernel, "verify_attn_mma"),
            cuda_attention.LayerCache(
                cache.rows[layer], cache.page_table, cache.page_size, self._swizzled(cache)
            ),
            self._joined(q_latent, q_pe),
            cuda_attention.DeviceVisibility(
                rows.count, visibility.open_len, rows.n_slots, visibility.block
            ),
            cache.latent_len,
            scale,
            split_size,
            rows.max_slots,
            scores,
            wgmma=partial(self._modules.kernel, hopper) if self._modules.has(hopper) else None,
        )

    @_on_stream
    def unabsorb_value(self, out_latent: Array, w_vc: Array) -> Array:
        n, h, _ = out_latent.shape
        out = self._empty((n, h, w_vc.shape[1]), self._real)
        cuda_linear.batched_linear(
            partial(self._modules.kernel, "linear"),
            out_latent,
            w_vc,
            out,
            self._count(n),
            overlap=True,
        )
        return out.reshape(n, -1)

    # Experts

    @_on_stream
    def route(self, x: Array, gate: Array, correction_bias: Array, config: ModelConfig) -> Routed:
        kernel = partial(self._modules.kernel, "experts")
        groups = cuda_experts.new_groups(len(x), len(gate), config.num_experts_per_tok)
        count = self._count(len(x))
        chosen = cuda_experts.route(
            kernel, x, gate, correction_bias, config, count, groups, overlap=True
        )
        return Routed(*chosen, groups)

    @_on_stream
    def moe(self, x: Array, routed: Routed, weights: MoeWeights) -> Array:
        shared = weights.shared
        return cuda_experts.moe(
            partial(self._modules.kernel, "experts"),
            x,
            routed.ids,
            routed.weights,
            weights.gate_up,
            weights.down,
            None if shared is None else (shared.gate_up, shared.down),
            self._count(len(x)),
            routed.groups,
            overlap=True,
        )

    # Decisions

    @_on_stream
    def argmax(self, logits: Array) -> Array:
        n, w = logits.shape
        targets = self._empty((n,), np.int64)
        count = self._count(n)
        self._launch("rows", "argmax", (n, 1, 1), 1024, logits, targets, w, count)
        return targets

    @_on_stream
    def accept_walk(
        self,
        tokens: Array,
        parents: Array,
        targets: Array,
        stop_tokens: Array,
        max_emitted: DeviceInt,
    ) -> Walk:
        n = len(tokens)
        path = self._empty((n,), np.int64)
        accept_len, bonus = (self._empty((1,), np.int64) for _ in range(2))
        self._launch(
            "tree",
            "accept_walk",
            (1, 1, 1),
            128,
            *(tokens, parents, targets, stop_tokens, len(stop_tokens), max_emitted),
            *(path, accept_len, bonus, n),
        )
        return Walk(path, accept_len, bonus)

    @_on_stream
    def commit_rows(
        self, cache: PagedCache, path: Array, accept_len: Array, committed_len: DeviceInt
    ) -> Array:
        n = len(path)
        n_layers, _, row_len = cache.rows.shape
        moves = self._empty((n, 2), np.int64)
        self._launch(
            "latents",
            "commit_rows",
            (n_layers, -(-row_len // 128), 1),
            128,
            *(cache.rows, *_i64(cache.rows[0].size), cache.page_table, cache.page_size, path),
            *(accept_len, committed_len, moves, n, row_len, int(self._swizzled(cache))),
        )
        return moves

    # Own

    def _launch(
        self,
        file: str,
        name: str,
        grid: tuple[int, int, int],
        block: int,
        *arguments: Any,
        shared: int = 0,
    ) -> None:
        launch(self._modules.kernel(file, name), grid, block, shared, arguments, overlap=True)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        try:
            return self._cupy.empty(shape, dtype)
        except self._cupy.cuda.memory.OutOfMemoryError:
            free, total = self._cupy.cuda.runtime.memGetInfo()
            n_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            raise MemoryError(
                f"{n_bytes} bytes asked for, {free} of the {total} bytes of {self.device} are free"
            ) from None

    def _layout(self, n: int) -> tuple[Array, Array]:
        return self._empty((n,), np.int64), self._empty((n, -(-n // 32)), np.uint32)

    def _bound(self) -> Rows:
        assert self._rows is not None, "an operation over rows, outside of `over`"
        return self._rows

    def _count(self, n: int) -> DeviceInt:
        """Rows that count: of the rows bound, or all n."""
        if self._rows is not None and self._rows.n == n:
            return self._rows.count
        if n not in self._ones:
            self._ones[n] = self.device_int(n)
        return self._ones[n]

    def _swizzled(self, cache: PagedCache) -> bool:
        """Whether rows are stored as the tensor cores' attention loads them."""
        sizes = cache.latent_len, cache.rows.shape[-1] - cache.latent_len
        fast = sizes == (cuda_attention.SWIZZLED_LATENT, cuda_attention.SWIZZLED_ROPE)
        whole_tiles = cache.page_size % cuda_attention.TILE == 0
        return bool(self._real == np.uint16 and fast and whole_tiles)

    def _joined(self, q_latent: Array, q_pe: Array) -> Array:
        """The array [n, h, c + r] that both are views of; whoever replaced one pays for a copy."""
        n, h, c = q_latent.shape
        base = q_latent.base
        if (
            base is not None
            and base is q_pe.base
            and base.shape == (n, h, c + q_pe.shape[-1])
            and q_latent.data.ptr == base.data.ptr
        ):
            return base
        return self._cupy.concatenate([q_latent, q_pe], axis=-1)


def _i64(*numbers: int) -> list[ctypes.c_longlong]:
    return [ctypes.c_longlong(number) for number in numbers]
