"""Stages of one forward of llama.cpp, from the callback that it calls for every node of its graph.

The callback is always set, as the columns of scores and mask are cells of the cache, and which cell
a row was given is seen in the first layer's write to it. Without a trace it asks for that alone.
Not shown: slots and moves, as rows lie in cells that llama.cpp chooses and are never moved; and
`scores` with flash attention, which does not store them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kdtr.adapters.llamacpp_library import GgmlTensor, half_split, library, read
from kdtr.adapters.session import Rows, Stages
from kdtr.contract import EngineError, ModelConfig

_SHOWN_ALWAYS = (
    *("parents", "tokens", "positions", "mask", "embedding", "q_nope", "q_pe", "c_kv", "k_pe"),
    *("out_latent", "attn_out", "router_scores", "expert_ids", "expert_weights", "mlp_out"),
    *("hidden", "final_hidden", "logits", "targets", "path", "bonus", "emitted"),
)
SHOWN = frozenset(_SHOWN_ALWAYS)
SHOWN_WITHOUT_FLASH = SHOWN | {"scores"}

# Names that llama.cpp gives to nodes, "name-layer". Of equal names the last one counts: a view of
# what is not yet rotated or normed comes first; weights are divided, then scaled.
_ROWS = {
    "kv_cmpr": "c_kv",
    "ffn_moe_probs": "router_scores",
    "ffn_moe_topk": "expert_ids",
    "ffn_moe_weights": "expert_weights",
    "ffn_moe_weights_norm": "expert_weights",
    "ffn_moe_weights_scaled": "expert_weights",
    "ffn_out": "mlp_out",
    "l_out": "hidden",
    "result_norm": "final_hidden",
    "result_output": "logits",
}
_READ = frozenset({*_ROWS, "q_nope", "q_pe", "k_pe", "kq", "kq_soft_max", "kqv"})


class Taps:
    """The callback of one context, and what it has seen."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._operation = library().operation
        self._cells: list[int] = []  # of the committed rows, in their order
        self._fresh: list[int] = []  # of the forward under way
        self._rows: Rows | None = None
        self._stages: Stages | None = None
        self._product: dict[int, np.ndarray] = {}  # by layer, unscaled [h, n, cells]
        self._fault: BaseException | None = None
        self.callback = library().api.ggml_backend_sched_eval_callback(self._called)

    @contextmanager
    def during(self, rows: Rows, stages: Stages | None) -> Iterator[None]:
        """One forward; an error inside a callback, from where none can be raised, is raised."""
        self._rows, self._stages, self._fresh, self._fault = rows, stages, [], None
        self._product = {}
        del self._cells[rows.committed_len :]
        yield
        if self._fault is not None:
            raise EngineError(f"reading llama.cpp's graph raised {self._fault!r}")
        if len(self._fresh) != len(rows.tokens):
            raise EngineError(
                f"llama.cpp wrote {len(self._fresh)} cells for {len(rows.tokens)} rows"
            )

    def keep(self, committed_len: int, path: tuple[int, ...]) -> None:
        """After a commit: the cells of the path are the next committed ones."""
        self._cells = self._cells[:committed_len] + [self._fresh[node] for node in path]

    def _called(self, pointer: int, ask: bool, _: Any) -> bool:
        """`ask`: whether the node is wanted; else it is computed, and false would end the graph."""
        try:
            tensor = GgmlTensor.from_address(pointer)
            if ask:
                return self._wanted(tensor)
            self._take(tensor)
        except BaseException as fault:
            self._fault = self._fault or fault
        return True

    def _wanted(self, tensor: GgmlTensor) -> bool:
        operation = self._operation(tensor.op)
        if operation == "SET_ROWS":
            return _is_first_write(tensor)
        if self._stages is None:
            return False
        name, _ = _name(tensor)
        is_flash = operation == "FLASH_ATTN_EXT"
        return name in _READ or is_flash or _weight(tensor).endswith(_BY_WEIGHT)

    def _take(self, tensor: GgmlTensor) -> None:
        operation = self._operation(tensor.op)
        if operation == "SET_ROWS":
            if _is_first_write(tensor):
                self._fresh = read(tensor.src[1].contents).ravel().tolist()
            return
        if self._stages is None:
            return
        name, layer = _name(tensor)
        if name in _ROWS:
            self._put_rows(_ROWS[name], layer, read(tensor))
        elif name == "q_nope":
            self._stages["q_nope", layer] = read(tensor)[0]
        elif name == "q_pe":
            self._stages["q_pe", layer] = half_split(read(tensor)[0])
            if operation == "ROPE":  # and not the view of what is not yet rotated
                self._stages["positions", None] = read(tensor.src[1].contents).ravel()
        elif name == "k_pe":
            self._stages["k_pe", layer] = half_split(read(tensor)[0, :, 0])
        elif name == "kq":
            assert layer is not None
            self._product[layer] = read(tensor)[0]
        elif name == "kq_soft_max":
            self._put_scores(layer, tensor)
        elif name == "kqv":
            self._stages["out_latent", layer] = read(tensor)[0].swapaxes(0, 1)  # [h, n, c]
        elif operation == "FLASH_ATTN_EXT":
            self._put_mask(read(tensor.src[3].contents))
            self._stages["out_latent", self._layer_of_flash()] = read(tensor)[0]  # [n, h, c]
        else:
            self._put_by_weight(tensor)

    def _put_rows(self, stage: str, layer: int | None, array: np.ndarray) -> None:
        """[1, .., n, width], or [1, n, k, 1] of expert weights."""
        assert self._stages is not None
        assert self._rows is not None
        n = len(self._rows.tokens)
        self._stages[stage, layer] = array.reshape(n, -1)

    def _put_by_weight(self, tensor: GgmlTensor) -> None:
        """Nodes without a name of their own: by the matrix that they were multiplied with."""
        assert self._stages is not None
        weight, rows = _weight(tensor), read(tensor)[0, 0]
        if weight == "token_embd.weight":
            self._stages["tokens", None] = read(tensor.src[1].contents).ravel()
            self._stages["embedding", None] = rows
        elif weight.endswith("attn_output.weight"):
            self._stages["attn_out", int(weight.split(".")[1])] = rows

    def _put_mask(self, mask: np.ndarray) -> np.ndarray:
        """mask [1, 1, n or more, cells]: 0 where visible, else -inf; as [n, L + n] bool."""
        assert self._stages is not None
        assert self._rows is not None
        columns = [*self._cells, *self._fresh]
        visible = mask[0, 0, : len(self._rows.tokens)] == 0  # rows may be padded
        others = np.ones(visible.shape[1], dtype=bool)
        others[columns] = False
        if visible[:, others].any():
            raise EngineError("llama.cpp's mask shows cells that hold no row of this sequence")
        self._stages["mask", None] = visible[:, columns]
        return visible

    def _put_scores(self, layer: int | None, tensor: GgmlTensor) -> None:
        """kq is unscaled: the softmax scales and masks it in one pass, by its own parameter."""
        assert self._stages is not None
        assert layer is not None
        visible = self._put_mask(read(tensor.src[1].contents))
        (scale,) = struct.unpack("<f", bytes(tensor.op_params)[:4])
        product = self._product.pop(layer) * np.float32(scale)  # [h, n, cells]
        scores = np.where(visible[None], product[:, : len(visible)], np.float32(-np.inf))
        self._stages["scores", layer] = scores[..., [*self._cells, *self._fresh]].swapaxes(0, 1)

    def _layer_of_flash(self) -> int:
        assert self._stages is not None
        return sum(name == "out_latent" for name, _ in self._stages)


_BY_WEIGHT = ("token_embd.weight", "attn_output.weight")


def _name(tensor: GgmlTensor) -> tuple[str, int | None]:
    """'kq-3' -> ('kq', 3), 'result_norm' -> ('result_norm', None)."""
    name, dash, layer = tensor.name.decode().rpartition("-")
    return (name, int(layer)) if dash and layer.isdigit() else (tensor.name.decode(), None)


def _weight(tensor: GgmlTensor) -> str:
    """The name of the first operand, where there is one."""
    return tensor.src[0].contents.name.decode() if tensor.src[0] else ""


def _is_first_write(tensor: GgmlTensor) -> bool:
    """The write of the first layer's rows: the destination is a view of its cache."""
    return tensor.name.decode().startswith("cache_k_l0")
