"""llama.cpp behind the engine interface: `kdtr.adapters:make_llamacpp_engine`."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, finalize

from kdtr.adapters import checks
from kdtr.adapters.llamacpp_backend import CACHE_TYPES, LlamaBackend
from kdtr.adapters.llamacpp_library import library
from kdtr.adapters.llamacpp_model import LoadedModel, load_llamacpp
from kdtr.adapters.llamacpp_taps import SHOWN, SHOWN_WITHOUT_FLASH
from kdtr.adapters.session import AdapterSession
from kdtr.contract import (
    VERBS,
    ConfigError,
    EngineInfo,
    ModelConfig,
    ModelSource,
    NumericProfile,
    SessionError,
)

# A mask of one's own cannot be given: what a token sees follows from sequences and positions.
_NOT_OFFERED = {"forward_tokens", "build", "verify_batch", "commit_batch"}
_OFFERED = frozenset(VERBS) - _NOT_OFFERED
# Not under the names of fields: a number there would change the truth (property_tests/subject.py).
_CONVENTIONS = {
    "layout of the cache": "cells of llama.cpp's choice, never moved; shown in logical order",
    "eps of the latent norms": "GGUF has one eps for all norms: in q_a_proj and kv_a_proj instead",
    "no shared expert": "GGUF must have one: one of zeros instead",
    "amplitude of YaRN": "GGUF has equal mscale keys: in the rotated rows instead",
}


class LlamaModel:
    """See `contract.Model`."""

    def __init__(self, name: str, loaded: LoadedModel, **choices: Any) -> None:
        self._name = name
        self._loaded = loaded
        self._choices = choices
        self._sessions: WeakSet[AdapterSession] = WeakSet()

    @property
    def config(self) -> ModelConfig:
        return self._loaded.config

    def open(self, *, max_len: int) -> AdapterSession:
        if self._loaded.pointer is None:
            raise SessionError("the model is closed; load it again")
        slots = checks.slots(max_len, self.config)
        backend = LlamaBackend(self._loaded, slots, **self._choices)
        session = AdapterSession(self._name, _OFFERED, self.config, backend, slots)
        finalize(session, backend.close)  # for one that is dropped without close()
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Closes the sessions, whose contexts read the weights, and then frees these."""
        sessions = list(self._sessions)
        for session in sessions:
            session.refuse_in_trace("close")  # all, before one is closed
        for session in sessions:
            session.close()
        self._loaded.close()


class LlamaEngine:
    """See `contract.Engine`."""

    def __init__(self, cache: str, flash_attention: bool, threads: int) -> None:
        self._cache = cache
        self._flash_attention = flash_attention
        self._threads = threads
        self._version = library().version

    @property
    def info(self) -> EngineInfo:
        flash = "flash attention" if self._flash_attention else "no flash attention"
        return EngineInfo(
            name=f"llama.cpp ({self._cache} cache, {flash})",
            version=f"llama-cpp-python {self._version}",
            device="cpu",
            profile=_profile(self._cache, self._flash_attention),
            verbs=_OFFERED,
            stages=SHOWN if self._flash_attention else SHOWN_WITHOUT_FLASH,
            conventions=_CONVENTIONS,
        )

    def load(self, source: ModelSource) -> LlamaModel:
        return LlamaModel(
            self.info.name,
            load_llamacpp(source),
            cache=self._cache,
            flash_attention=self._flash_attention,
            threads=self._threads,
        )


def make_llamacpp_engine(
    *, cache: str = "float32", flash_attention: bool = False, threads: int = 1
) -> LlamaEngine:
    """llama.cpp's deepseek2, on the CPU, with weights in float32.

    cache            type_k of the context: "float32" or "float16"
    flash_attention  llama.cpp's fused kernel; it reads the cache in float16, whatever it holds
    threads          of llama.cpp
    Raises ConfigError for an option, UnsupportedError where the library is missing.
    """
    if cache not in CACHE_TYPES:
        known = " or ".join(map(repr, CACHE_TYPES))
        raise ConfigError(f"cache = {cache!r}; expected {known}")
    if not isinstance(flash_attention, bool):
        raise ConfigError(f"flash_attention = {flash_attention!r}; expected True or False")
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ConfigError(f"threads = {threads!r}; expected an integer of at least 1")
    return LlamaEngine(cache, flash_attention, threads)


def _profile(cache: str, flash_attention: bool) -> NumericProfile:
    """All in float32, but for a cache of float16: what it is multiplied with, queries and
    probabilities, is rounded to float16 first, and is as far off as scores stored in it. Flash
    attention reads every cache so, and keeps the weighted sum in float16 while it grows."""
    if flash_attention:
        return NumericProfile(activations="float16", latents="float16", scores="float16")
    return NumericProfile(latents=cache, scores=cache)
