"""One sequence in transformers' own DynamicCache.

For this architecture the library caches latents: per layer, `keys` are the normed c_kv
[1, 1, s, c] and `values` the rotated k_pe [1, 1, s, r], and every forward expands all of them. A
tree is appended behind the committed rows, and a commit gathers the accepted path and crops.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from kdtr.adapters.hf_checkpoint import libraries
from kdtr.adapters.hf_taps import host, tapped
from kdtr.adapters.session import Rows, Stages

ADDITIVE, BOOLEAN = "additive", "boolean"


class TransformersBackend:
    """See `adapters.session.Backend`."""

    moves_rows = True

    def __init__(self, model: Any, mask: str) -> None:
        self._model = model
        self._mask = mask
        self.cache = _new_cache(model)

    def forward(self, rows: Rows, stages: Stages | None) -> np.ndarray:
        torch, _ = libraries()
        self._crop(rows.committed_len)
        watch = (
            nullcontext()
            if stages is None
            else tapped(self._model, self.cache, rows.committed_len, stages)
        )
        with torch.inference_mode(), watch:
            output = self._model(
                input_ids=torch.tensor([rows.tokens]),
                attention_mask=four_dimensional(rows.mask, self._mask, self._model.dtype),
                position_ids=torch.tensor(rows.positions)[None],
                cache=self.cache,
                use_cache=True,
            )
        return host(output.logits[0])

    def keep(self, rows: Rows, path: tuple[int, ...]) -> None:
        torch, _ = libraries()
        length = rows.committed_len
        if path != tuple(range(len(path))):
            source = torch.tensor([*range(length), *(length + node for node in path)])
            for layer in self.cache.layers:
                layer.keys = layer.keys.index_select(-2, source)
                layer.values = layer.values.index_select(-2, source)
        self._crop(length + len(path))

    def latents(self, committed_len: int) -> tuple[np.ndarray, np.ndarray]:
        config, layers = self._model.config, self.cache.layers
        if not committed_len:
            n = config.num_hidden_layers
            return np.zeros((n, 0, config.kv_lora_rank)), np.zeros((n, 0, config.qk_rope_head_dim))
        return (
            np.stack([host(layer.keys[0, 0, :committed_len]) for layer in layers]),
            np.stack([host(layer.values[0, 0, :committed_len]) for layer in layers]),
        )

    def clear(self) -> None:
        self.cache = _new_cache(self._model)

    def close(self) -> None:
        self.cache = None

    def _crop(self, length: int) -> None:
        """Rows of a forward that was never committed are removed, and not only masked."""
        surplus = self.cache.get_seq_length() - length
        if surplus and not length:  # crop(-n) of all n rows
            self.clear()
        elif surplus:
            self.cache.crop(-surplus)


def four_dimensional(visible: np.ndarray, kind: str, dtype: Any) -> Any:
    """visible [n, s] bool -> what the model takes as it is, [1, 1, n, s].

    kind  "additive": 0 and -inf, in the model's dtype; "boolean": true where visible
    """
    torch, _ = libraries()
    shown = torch.tensor(visible)[None, None]
    if kind == BOOLEAN:
        return shown
    return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, float("-inf"))


def _new_cache(model: Any) -> Any:
    _, transformers = libraries()
    return transformers.DynamicCache(config=model.config)
