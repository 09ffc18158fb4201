"""The reference behind the engine interface: `kdtr.reference:make_engine`."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from importlib.metadata import version
from operator import index
from weakref import WeakSet

import numpy as np

from kdtr.contract import (
    TRACED,
    VERBS,
    CacheError,
    ConfigError,
    EngineInfo,
    InputError,
    ModelConfig,
    ModelSource,
    NumericProfile,
    SessionError,
    check_bits,
)
from kdtr.kdtr_format import open_model
from kdtr.reference.arithmetic import FAST, FIXED, Arithmetic
from kdtr.reference.cache import AppendCache, NewCache, ScratchCache
from kdtr.reference.emulated import STORAGE, EmulatedArithmetic
from kdtr.reference.session import ReferenceSession
from kdtr.reference.weights import ModelWeights, read_weights

_ARITHMETIC: dict[str, Arithmetic] = {
    FIXED.name: FIXED,
    FAST.name: FAST,
    **{storage: EmulatedArithmetic(storage) for storage in STORAGE},
}
_CACHES: dict[str, NewCache] = {"append": AppendCache, "scratch": ScratchCache}


class ReferenceModel:
    """Weights in float64; see `contract.Model`."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        new_cache: NewCache,
        config: ModelConfig,
        weights: ModelWeights,
    ) -> None:
        self._arithmetic = arithmetic
        self._new_cache = new_cache
        self._config = config
        self._weights = weights
        self._sessions: WeakSet[ReferenceSession] = WeakSet()
        self._closed = False

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def weights(self) -> ModelWeights:
        """The interpreted weights, for those who call the equations themselves."""
        return self._weights

    def open(self, *, max_len: int) -> ReferenceSession:
        if self._closed:
            raise SessionError("the model is closed; load it again")
        limit = self._config.max_position_embeddings
        try:
            slots = 0 if isinstance(max_len, bool | np.bool_) else index(max_len)
        except TypeError:
            slots = 0
        check_bits("max_len", slots)
        if not 1 <= slots <= limit:
            raise InputError(
                f"max_len = {max_len!r}; expected 1..max_position_embeddings = {limit}"
            )
        row_len = self._config.kv_lora_rank + self._config.qk_rope_head_dim
        n_bytes = slots * (self._config.num_hidden_layers * row_len + 2) * 8  # 64-bit numbers
        try:
            if n_bytes > _memory_bytes():  # not refused by every system
                raise MemoryError
            session = ReferenceSession(
                self._arithmetic, self._config, self._weights, self._new_cache, slots
            )
        except (MemoryError, ValueError, OverflowError):  # the latter two: no array is that large
            raise CacheError(
                f"max_len = {slots} needs {n_bytes} bytes of cache, more than there are; "
                "open it with a smaller max_len"
            ) from None
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Closes the sessions, or none; Python frees the arrays."""
        sessions = list(self._sessions)
        for session in sessions:
            session.refuse_in_trace("close")
        for session in sessions:
            session.close()
        self._closed = True


class ReferenceEngine:
    """See `contract.Engine`."""

    def __init__(self, arithmetic: Arithmetic, cache: str) -> None:
        self._arithmetic = arithmetic
        self._cache = cache

    @property
    def info(self) -> EngineInfo:
        name = self._arithmetic.name
        storage, accumulation = (name, "float32") if name in STORAGE else ("float64", "float64")
        stored = dict.fromkeys(("weights", "activations", "latents", "scores", "logits"), storage)
        return EngineInfo(
            name=f"reference ({self._arithmetic.name}, {self._cache})",
            version=_version(),
            device="cpu",
            profile=NumericProfile(
                **stored,
                accumulation=accumulation,
                deterministic=True,
                batch_invariant=self._arithmetic is not FAST,
            ),
            verbs=frozenset(VERBS) - {"verify_batch", "commit_batch"},
            stages=TRACED,
        )

    def load(self, source: ModelSource) -> ReferenceModel:
        model = open_model(source)
        weights = read_weights(model.config, model.tensors, model.shapes)
        return ReferenceModel(self._arithmetic, _CACHES[self._cache], model.config, weights)


@lru_cache  # it reads and parses a file, and `info` is asked for again and again
def _version() -> str:
    return version("kdtr")


def _memory_bytes() -> float:
    """Of this machine; inf where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def make_engine(*, arithmetic: str = "fixed", cache: str = "append") -> ReferenceEngine:
    """The reference.

    arithmetic  "fixed": the same bits everywhere, the truth; "fast": BLAS, for volume;
                "float32", "bfloat16", "float16": an honest engine of that precision, emulated
    cache       "append" (append-then-compact) or "scratch"; nobody can tell from outside
    """
    if arithmetic not in _ARITHMETIC:
        known = ", ".join(map(repr, _ARITHMETIC))
        raise ConfigError(f"arithmetic = {arithmetic!r}; expected one of {known}")
    if cache not in _CACHES:
        raise ConfigError(f"cache = {cache!r}; expected 'append' or 'scratch'")
    return ReferenceEngine(_ARITHMETIC[arithmetic], cache)
