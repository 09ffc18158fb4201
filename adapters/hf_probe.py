"""Before a model is used: a row that is masked must not be read, and the cache must hold latents.

transformers takes a 4-D mask as it is. sdpa understands a boolean one; eager adds it to the scores,
where true is 1 and false 0: every row is visible, and nothing is raised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtr.adapters.hf_backend import TransformersBackend
from kdtr.adapters.hf_checkpoint import libraries
from kdtr.adapters.session import Rows, Stages
from kdtr.contract import UnsupportedError


def probe(model: Any, mask: str, attention: str) -> None:
    """Raise UnsupportedError where a masked token moves a row, or the cache is no latent cache.

    Two siblings at position 0, so the second must not read the first. Its output of the first
    layer's attention is compared bit for bit under two tokens for the first: nothing but attention
    joins the rows there, and both forwards have the same shapes.
    """
    torch, transformers = libraries()
    embedding = model.model.embed_tokens.weight
    differ = torch.nonzero((embedding != embedding[0]).any(dim=-1))
    if not len(differ):
        return  # all tokens are one: nothing can leak
    other = int(differ[0])
    seen = [_attention_row(model, mask, token) for token in (0, other)]
    if seen[0].tobytes() != seen[1].tobytes():
        raise UnsupportedError(
            f"a masked token is read: with attention = {attention!r} and mask = {mask!r}, "
            f"transformers {transformers.__version__} gives a row another value when the token "
            "that it must not see changes (MASK-2); expected mask = 'additive', or 'boolean' with "
            "attention = 'sdpa'"
        )
    _check_cache(model, mask)


def _attention_row(model: Any, mask: str, first: int) -> np.ndarray:
    stages: Stages = {}
    TransformersBackend(model, mask).forward(_siblings(first), stages)
    return stages["attn_out", 0][1]


def _siblings(first: int) -> Rows:
    return Rows(0, (first, 0), np.zeros(2, dtype=np.int64), np.eye(2, dtype=bool), None)


def _check_cache(model: Any, mask: str) -> None:
    _, transformers = libraries()
    config, backend = model.config, TransformersBackend(model, mask)
    backend.forward(_siblings(0), None)
    layer = backend.cache.layers[0]
    shapes = (tuple(layer.keys.shape), tuple(layer.values.shape))
    wanted = ((1, 1, 2, config.kv_lora_rank), (1, 1, 2, config.qk_rope_head_dim))
    if shapes != wanted:
        raise UnsupportedError(
            f"transformers {transformers.__version__} caches keys {list(shapes[0])} and values "
            f"{list(shapes[1])} for two tokens; expected latents {list(wanted[0])} and "
            f"{list(wanted[1])}, as in transformers 5.24"
        )
