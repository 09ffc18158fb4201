"""Hugging Face transformers behind the engine interface: `kdtr.adapters:make_hf_engine`."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakSet

from kdtr.adapters import checks
from kdtr.adapters.hf_backend import ADDITIVE, BOOLEAN, TransformersBackend
from kdtr.adapters.hf_checkpoint import (
    DTYPES,
    EAGER,
    GROUPED,
    SDPA,
    Choices,
    libraries,
    load_transformers,
)
from kdtr.adapters.hf_probe import probe
from kdtr.adapters.hf_taps import SHOWN, SHOWN_BY_EAGER
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

_OFFERED = frozenset(VERBS) - {"build", "verify_batch", "commit_batch"}
_ISLANDS = "RMSNorm, rotary angles, router and softmax compute in float32"


class TransformersModel:
    """See `contract.Model`."""

    def __init__(self, name: str, config: ModelConfig, model: Any, mask: str) -> None:
        self._name = name
        self._config = config
        self._model: Any = model
        self._mask = mask
        self._sessions: WeakSet[AdapterSession] = WeakSet()

    @property
    def config(self) -> ModelConfig:
        return self._config

    def open(self, *, max_len: int) -> AdapterSession:
        if self._model is None:
            raise SessionError("the model is closed; load it again")
        slots = checks.slots(max_len, self._config)
        backend = TransformersBackend(self._model, self._mask)
        session = AdapterSession(self._name, _OFFERED, self._config, backend, slots)
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Closes the sessions, and drops the weights."""
        sessions = list(self._sessions)
        for session in sessions:
            session.refuse_in_trace("close")  # all, before one is closed
        for session in sessions:
            session.close()
        self._model = None
        gc.collect()  # modules refer to each other in circles


class TransformersEngine:
    """See `contract.Engine`."""

    def __init__(self, choices: Choices, mask: str) -> None:
        self._choices, self._mask = choices, mask
        self._libraries = libraries()

    @property
    def info(self) -> EngineInfo:
        torch, transformers = self._libraries
        dtype, attention = self._choices.dtype, self._choices.attention
        return EngineInfo(
            name=f"transformers ({dtype}, {attention})",
            version=f"{transformers.__version__}, torch {torch.__version__}",
            device="cpu",
            profile=_profile(dtype, attention),
            verbs=_OFFERED,
            stages=SHOWN_BY_EAGER if attention == EAGER else SHOWN,
            conventions={"islands of float32": _ISLANDS},
        )

    def load(self, source: ModelSource) -> TransformersModel:
        config, model = load_transformers(source, self._choices)
        probe(model, self._mask, self._choices.attention)
        return TransformersModel(self.info.name, config, model, self._mask)


def make_hf_engine(
    *,
    dtype: str = "float32",
    attention: str = EAGER,
    mask: str = ADDITIVE,
    experts: str = EAGER,
) -> TransformersEngine:
    """DeepseekV3ForCausalLM of transformers, on the CPU.

    dtype      "float32", "bfloat16" or "float64" (with islands of float32, which the profile says)
    attention  transformers' attn_implementation, "eager" or "sdpa"
    mask       "additive" (0 and -inf), or "boolean", which is refused where it leaks
    experts    transformers' experts_implementation: "eager", or "grouped_mm", the library's choice,
               for which torch wants widths of a multiple of 16 bytes
    Raises ConfigError for an option, UnsupportedError where a library is missing.
    """
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("attention", attention, (EAGER, SDPA)),
        ("mask", mask, (ADDITIVE, BOOLEAN)),
        ("experts", experts, (EAGER, GROUPED)),
    ):
        if value not in known:
            raise ConfigError(f"{name} = {value!r}; expected one of {', '.join(map(repr, known))}")
    return TransformersEngine(Choices(dtype, attention, experts), mask)


def _profile(dtype: str, attention: str) -> NumericProfile:
    """Sums are in float32 in every dtype: in float64 too a row passes through the islands."""
    return NumericProfile(
        weights=dtype,
        activations=dtype,
        latents=dtype,
        scores="float32" if attention == SDPA and dtype == "bfloat16" else dtype,
        logits=dtype,
        accumulation="float32",
    )
