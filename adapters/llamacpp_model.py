"""A model of llama.cpp from anything that `open_model` reads, through a GGUF file in float32."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any
from weakref import finalize

from kdtr.adapters.llamacpp_express import expressible
from kdtr.adapters.llamacpp_library import failure, library
from kdtr.contract import ModelConfig, ModelSource, check_tensors
from kdtr.kdtr_format import export_gguf, open_model

# Written into the file, but given to every context too: what is read of it differs by version.
_GIVEN_TO_CONTEXTS = ("beta_fast", "beta_slow")


class LoadedModel:
    """The configuration as it was given, and llama_model's pointer; None once it is closed.

    Its weights are given back by close(), or when nobody holds it: contexts do, as they read it.
    """

    def __init__(self, config: ModelConfig, pointer: Any) -> None:
        self.config = config
        self.pointer = pointer
        self._free = finalize(self, library().api.llama_model_free, pointer)

    def close(self) -> None:
        self.pointer = None
        self._free()  # the second time it does nothing


def load_llamacpp(source: ModelSource) -> LoadedModel:
    """Raises ConfigError, CheckpointError, BundleError, UnsupportedError; EngineError where
    llama.cpp does not load what was written."""
    model = open_model(source)
    check_tensors(model.config, model.shapes)
    api = library().api
    accepted = _GIVEN_TO_CONTEXTS if model.config.yarn is not None else ()
    with tempfile.TemporaryDirectory(prefix="kdtr-llamacpp-") as folder:
        path = Path(folder) / "model.gguf"
        config, tensors = expressible(model)
        export_gguf((config, tensors), path, dtype="float32", accept_loss=accepted)
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = False  # weights as they are, not repacked
        pointer = api.llama_model_load_from_file(str(path).encode(), parameters)
    if not pointer:
        raise failure("llama.cpp did not load the exported model")
    return LoadedModel(model.config, ctypes.c_void_p(pointer))
