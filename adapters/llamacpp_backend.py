"""One sequence in llama.cpp's unified cache: trees as sequences, acceptance as their operations.

The committed rows are sequence 0. For a verify every leaf of the tree becomes a sequence: a node
belongs to those of all leaves below it, and the committed rows to all of them. llama.cpp lets a
token see the cells of its first sequence up to its own position, which is its path (MASK-2). A
commit keeps the sequence of a leaf below the path's end, cut to the path, and forgets the others.
Cells are never moved.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from kdtr.adapters.llamacpp_library import F16, F32, failure, half_split, library
from kdtr.adapters.llamacpp_model import LoadedModel
from kdtr.adapters.llamacpp_taps import Taps
from kdtr.adapters.session import Rows, Stages
from kdtr.contract import DraftTree, EngineError, ModelConfig, UnsupportedError

CACHE_TYPES = {"float32": F32, "float16": F16}
_ALL = -1  # of positions: from the first, to the last
_FLASH_ATTENTION = {False: 0, True: 1}  # llama_flash_attn_type


class LlamaBackend:
    """See `adapters.session.Backend`."""

    moves_rows = False

    def __init__(
        self, model: LoadedModel, slots: int, *, cache: str, flash_attention: bool, threads: int
    ) -> None:
        self._api = library().api
        self._config = model.config
        self._model = model  # outlives the context
        self._taps = Taps(model.config)
        self._most_leaves = int(self._api.llama_max_parallel_sequences())
        parameters = self._api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = slots
        parameters.n_seq_max = min(slots, self._most_leaves)
        parameters.kv_unified = True
        parameters.type_k = parameters.type_v = CACHE_TYPES[cache]
        parameters.flash_attn_type = _FLASH_ATTENTION[flash_attention]
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.no_perf = True
        parameters.cb_eval = self._taps.callback
        if model.config.yarn is not None:
            parameters.yarn_beta_fast = model.config.yarn.beta_fast
            parameters.yarn_beta_slow = model.config.yarn.beta_slow
        context = self._api.llama_init_from_model(model.pointer, parameters)
        if not context:
            raise failure("llama.cpp made no context")
        self._context: Any = ctypes.c_void_p(context)
        self._memory = ctypes.c_void_p(self._api.llama_get_memory(self._context))
        self._n_leaves = 1  # sequences that hold anything

    def forward(self, rows: Rows, stages: Stages | None) -> np.ndarray:
        leaves = leaves_below(rows.tree, len(rows.tokens))
        n_leaves = 1 + max(max(of) for of in leaves)
        if n_leaves > self._most_leaves:
            raise UnsupportedError(
                f"the tree has {n_leaves} leaves; llama.cpp has {self._most_leaves} sequences, "
                "and every leaf is one"
            )
        self._drop_uncommitted(rows.committed_len)
        for leaf in range(1, n_leaves):
            self._api.llama_memory_seq_cp(self._memory, 0, leaf, _ALL, _ALL)
        self._n_leaves = n_leaves
        with self._taps.during(rows, stages):
            self._decode(rows, leaves)
        return self._logits(len(rows.tokens))

    def keep(self, rows: Rows, path: tuple[int, ...]) -> None:
        leaf = min(leaves_below(rows.tree, len(rows.tokens))[path[-1]])
        length = rows.committed_len + len(path)
        self._taps.keep(rows.committed_len, path)
        self._removed(leaf, length)
        self._api.llama_memory_seq_keep(self._memory, leaf)
        if leaf:
            self._api.llama_memory_seq_cp(self._memory, leaf, 0, _ALL, _ALL)
            self._removed(leaf, _ALL)
        self._n_leaves = 1

    def latents(self, committed_len: int) -> tuple[np.ndarray, np.ndarray]:
        """From llama_state_seq_get_data: the cells of sequence 0, by position."""
        config = self._config
        if not committed_len:
            n = config.num_hidden_layers
            return np.zeros((n, 0, config.kv_lora_rank)), np.zeros((n, 0, config.qk_rope_head_dim))
        size = self._api.llama_state_seq_get_size(self._context, 0)
        buffer = (ctypes.c_uint8 * size)()
        if self._api.llama_state_seq_get_data(self._context, buffer, size, 0) != size:
            raise failure("llama.cpp did not write the state of the sequence")
        return read_latents(bytes(buffer), config, committed_len)

    def clear(self) -> None:
        self._api.llama_memory_clear(self._memory, True)
        self._n_leaves = 1

    def close(self) -> None:
        if self._context is not None:
            self._api.llama_free(self._context)
        self._context = None

    def _decode(self, rows: Rows, leaves: list[tuple[int, ...]]) -> None:
        n = len(rows.tokens)
        batch = self._api.llama_batch_init(n, 0, max(map(len, leaves)))
        try:
            batch.n_tokens = n
            for i, token in enumerate(rows.tokens):
                batch.token[i], batch.pos[i] = token, int(rows.positions[i])
                batch.logits[i] = 1
                batch.n_seq_id[i] = len(leaves[i])
                for k, leaf in enumerate(leaves[i]):
                    batch.seq_id[i][k] = leaf
            status = self._api.llama_decode(self._context, batch)
        finally:
            self._api.llama_batch_free(batch)
        if status:
            raise failure(f"llama_decode of {n} rows returned {status}")

    def _logits(self, n: int) -> np.ndarray:
        rows = [self._api.llama_get_logits_ith(self._context, i) for i in range(n)]
        width = self._config.vocab_size
        return np.stack([np.ctypeslib.as_array(row, shape=(width,)) for row in rows])

    def _drop_uncommitted(self, committed_len: int) -> None:
        for leaf in range(1, self._n_leaves):
            self._removed(leaf, _ALL)
        self._removed(0, committed_len)
        self._n_leaves = 1

    def _removed(self, sequence: int, start: int) -> None:
        if not self._api.llama_memory_seq_rm(self._memory, sequence, start, _ALL):
            raise failure(f"llama.cpp did not remove sequence {sequence} from position {start}")


def leaves_below(tree: DraftTree | None, n: int) -> list[tuple[int, ...]]:
    """Per row, the numbers of the leaves below it or at it, ascending; without a tree, one leaf."""
    if tree is None:
        return [(0,)] * n
    inner = set(tree.parents)
    below: list[list[int]] = [[] for _ in range(n)]
    for leaf, node in enumerate(i for i in range(n) if i not in inner):
        while node >= 0:
            below[node].append(leaf)
            node = tree.parents[node]
    return [tuple(of) for of in below]


def read_latents(
    state: bytes, config: ModelConfig, committed_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """c_kv [l, L, c] and k_pe [l, L, r] from the state of one sequence; later positions, which a
    verify left there, are passed over.

    magic u32, sequence i32, n_stream u32, n_cells u32; per cell its position i32, the number of its
    sequences u32 and the sequences; v_trans u32, n_layer u32; per layer the ggml_type i32, the
    bytes of a row u64 and the rows [n_cells, c + r], whose rotated part is in pairs.
    """
    _, _, n_streams, n_cells = struct.unpack_from("<IiII", state)
    at = 16
    positions = []
    for _ in range(n_cells):
        position, n_sequences = struct.unpack_from("<iI", state, at)
        positions.append(position)
        at += 8 + 4 * n_sequences
    _, n_layers = struct.unpack_from("<II", state, at)
    at += 8
    held = sorted(position for position in positions if position < committed_len)
    found = (n_streams, held, n_layers)
    wanted = (1, list(range(committed_len)), config.num_hidden_layers)
    if found != wanted:
        raise EngineError(
            f"llama.cpp's state has (streams, positions, layers) {found}; expected {wanted}"
        )
    order, c = np.argsort(positions)[:committed_len], config.kv_lora_rank
    latents = []
    for _ in range(n_layers):
        kind, row_bytes = struct.unpack_from("<iQ", state, at)
        at += 12
        dtype = np.dtype(np.float32 if kind == F32 else np.float16)
        if kind not in (F32, F16) or row_bytes != (c + config.qk_rope_head_dim) * dtype.itemsize:
            raise EngineError(
                f"llama.cpp's state has rows of {row_bytes} bytes of ggml_type {kind}; expected "
                f"{c + config.qk_rope_head_dim} numbers in float32 or float16"
            )
        rows = np.frombuffer(state, dtype, n_cells * row_bytes // dtype.itemsize, at)
        latents.append(rows.reshape(n_cells, -1)[order])
        at += n_cells * row_bytes
    both = np.stack(latents)
    return both[..., :c].copy(), half_split(both[..., c:])
