"""Stages of one forward of a transformers model, by hooks and by watching the functions it calls.

The model runs as it ships: modules are listened to, and a TorchFunctionMode sees what goes into
the softmax (eager) or into scaled_dot_product_attention (sdpa), and what leaves the sigmoid.
Not shown: out_latent, which the expanded attention never computes, and `scores` under sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from kdtr.adapters.hf_checkpoint import libraries
from kdtr.adapters.session import Stages

SHOWN = frozenset(
    {
        *("parents", "tokens", "positions", "mask", "slots", "embedding", "q_nope", "q_pe"),
        *("c_kv", "k_pe", "attn_out", "router_scores", "expert_ids", "expert_weights", "mlp_out"),
        *("hidden", "final_hidden", "logits", "targets", "path", "bonus", "emitted", "moves"),
    }
)
SHOWN_BY_EAGER = SHOWN | {"scores"}


def host(tensor: Any) -> np.ndarray:
    """A copy on the host; bfloat16, which NumPy lacks, as float32, which holds it."""
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())


@contextmanager
def tapped(model: Any, cache: Any, committed_len: int, stages: Stages) -> Iterator[None]:
    """While open, one forward of `model` fills `stages`.

    cache  the forward's; its rows from committed_len on are those of the forward
    """
    taps = _Taps(model, stages)
    with ExitStack() as stack:
        for handle in taps.hooks():
            stack.callback(handle.remove)
        stack.enter_context(taps.functions())
        yield
    n = len(stages["tokens", None])
    stages["slots", None] = np.arange(cache.get_seq_length() - n, cache.get_seq_length())
    for layer, rows in enumerate(cache.layers):
        stages["k_pe", layer] = host(rows.values[0, 0, committed_len:])


class _Taps:
    def __init__(self, model: Any, stages: Stages) -> None:
        self._model = model
        self._stages = stages
        self._layer: int | None = None  # whose attention is running
        self._router: int | None = None  # whose router is running
        self._nope = model.config.qk_nope_head_dim

    def hooks(self) -> Iterator[Any]:
        inner = self._model.model
        yield self._model.register_forward_pre_hook(self._inputs, with_kwargs=True)
        yield inner.embed_tokens.register_forward_hook(self._rows("embedding", None))
        yield inner.norm.register_forward_hook(self._rows("final_hidden", None))
        yield self._model.lm_head.register_forward_hook(self._rows("logits", None))
        for i, layer in enumerate(inner.layers):
            attention = layer.self_attn
            yield attention.register_forward_pre_hook(self._enter(i), with_kwargs=True)
            yield attention.kv_a_layernorm.register_forward_hook(self._rows("c_kv", i))
            yield attention.register_forward_hook(self._leave(i))
            yield layer.mlp.register_forward_hook(self._rows("mlp_out", i))
            yield layer.register_forward_hook(self._rows("hidden", i))
            if hasattr(layer.mlp, "gate"):
                yield layer.mlp.gate.register_forward_pre_hook(self._enter_router(i))
                yield layer.mlp.gate.register_forward_hook(self._leave_router(i))

    def functions(self) -> Any:
        """A mode that sees every function of torch that the model calls."""
        torch, _ = libraries()
        functional = torch.nn.functional
        taps = self

        class Watch(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                kwargs = kwargs or {}
                if taps._layer is not None:
                    if function is torch.matmul:
                        taps.put_query(args[0])
                    elif function is functional.softmax:
                        taps.put("scores", taps._layer, args[0][0].transpose(0, 1))
                    elif function is functional.scaled_dot_product_attention:
                        taps.put_query(args[0])
                result = function(*args, **kwargs)
                if taps._router is not None and function is torch.Tensor.sigmoid:
                    taps.put("router_scores", taps._router, result)
                return result

        return Watch()

    def put(self, stage: str, layer: int | None, tensor: Any) -> None:
        if (stage, layer) not in self._stages:
            self._stages[stage, layer] = host(tensor)

    def put_query(self, query: Any) -> None:
        """The first operand of the first product is the query, [1, h, n, d + r]."""
        rows = query[0].transpose(0, 1)
        self.put("q_nope", self._layer, rows[..., : self._nope])
        self.put("q_pe", self._layer, rows[..., self._nope :])

    def _inputs(self, _: Any, args: Any, kwargs: Any) -> None:
        self.put("tokens", None, kwargs["input_ids"][0])
        self.put("positions", None, kwargs["position_ids"][0])

    def _enter(self, layer: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            self._layer = layer
            mask = kwargs["attention_mask"][0, 0]  # what attention is given, [n, L + n]
            visible = mask if mask.dtype.is_floating_point is False else mask == 0
            self.put("mask", None, visible)

        return hook

    def _leave(self, layer: int) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            self._layer = None
            self.put("attn_out", layer, output[0][0])

        return hook

    def _enter_router(self, layer: int) -> Any:
        def hook(_: Any, args: Any) -> None:
            self._router = layer

        return hook

    def _leave_router(self, layer: int) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            self._router = None
            _, weights, ids = output
            self.put("expert_ids", layer, ids)
            self.put("expert_weights", layer, weights)

        return hook

    def _rows(self, stage: str, layer: int | None) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output  # [1, n, ..]
            self.put(stage, layer, rows[0])

        return hook
