"""Loaded weights that open sessions."""

from __future__ import annotations

from weakref import WeakSet

from kdtr.contract import CacheError, InputError, ModelConfig, SessionError
from kdtr.engine.checks import integer
from kdtr.engine.forward import Forward
from kdtr.engine.paging import PagedCache
from kdtr.engine.session import TreeSession


class TreeModel:
    """A `Model` of the contract: one forward, shared by the sessions it opens."""

    def __init__(self, forward: Forward, *, page_size: int) -> None:
        self._config = forward.config
        self._forward: Forward | None = forward  # None once closed
        self._page_size = page_size
        self._sessions: WeakSet[TreeSession] = WeakSet()  # does not keep their caches alive

    @property
    def config(self) -> ModelConfig:
        return self._config

    def open(self, *, max_len: int) -> TreeSession:
        """A session of max_len slots (SLOT-3)."""
        if self._forward is None:
            raise SessionError("open on a closed model; load it again")
        slots = integer("max_len", max_len)
        if not 1 <= slots <= self._config.max_position_embeddings:
            raise InputError(
                f"max_len = {slots}; expected 1..{self._config.max_position_embeddings}, "
                "the model's max_position_embeddings"
            )
        try:
            cache = PagedCache(
                self._forward.kernels, self._config, capacity=slots, page_size=self._page_size
            )
        except (MemoryError, ValueError, OverflowError) as error:  # the latter: no array so large
            c, r = self._config.kv_lora_rank, self._config.qk_rope_head_dim
            bits = self._forward.kernels.profile.latents.lstrip("bfloat")
            n_bytes = slots * self._config.num_hidden_layers * (c + r) * int(bits) // 8
            detail = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""
            raise CacheError(
                f"max_len = {slots} needs {n_bytes} bytes of cache, more than there are{detail}; "
                "open it with a smaller max_len"
            ) from None
        session = TreeSession(self._forward, cache)
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Give the weights' memory back; closes the sessions that still need them, or none."""
        sessions = list(self._sessions)
        for session in sessions:
            session.refuse_in_trace("close")
        for session in sessions:
            session.close()
        self._sessions.clear()
        self._forward = None
