"""A model of transformers from anything that `open_model` reads, through the library's own loader.

torch and transformers are imported by `libraries()` and not before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kdtr.contract import ModelConfig, ModelSource, UnsupportedError, check_tensors
from kdtr.contract.hf_config_writer import unknown_to_transformers, write_hf_config
from kdtr.kdtr_format import export_checkpoint, open_model
from kdtr.kdtr_format.checkpoint import INDEX, SINGLE

_N_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
DTYPES = tuple(_N_BYTES)
EAGER, SDPA, GROUPED = "eager", "sdpa", "grouped_mm"


class Libraries(NamedTuple):
    """The modules; typed as Any, as both are large, and perhaps not installed."""

    torch: Any
    transformers: Any


def libraries() -> Libraries:
    """Raises UnsupportedError where one of them cannot be imported."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"the hf engine needs torch and transformers, which cannot be imported ({error}); "
            "expected them: pip install 'kdtr[hf]'"
        ) from error
    return Libraries(torch, transformers)


def refuse_unknown(config: ModelConfig) -> None:
    """Raise UnsupportedError for what DeepseekV3ForCausalLM would compute otherwise."""
    unknown = unknown_to_transformers(config)
    if unknown:
        raise UnsupportedError(
            f"transformers (DeepseekV3ForCausalLM) cannot say this model: "
            f"{'; '.join(unknown.values())}"
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """How transformers is to compute.

    dtype      of DTYPES: weights are converted to it, but the router's, which stay float32
    attention  attn_implementation: "eager" or "sdpa"
    experts    experts_implementation: "eager" or "grouped_mm"
    """

    dtype: str
    attention: str
    experts: str


def load_transformers(source: ModelSource, choices: Choices) -> tuple[ModelConfig, Any]:
    """The configuration, and a DeepseekV3ForCausalLM in evaluation mode.

    Raises ConfigError, CheckpointError, BundleError, UnsupportedError.
    """
    model = open_model(source)
    config = model.config
    refuse_unknown(config)
    _refuse_widths(config, choices)
    check_tensors(config, model.shapes)
    if isinstance(source, str | os.PathLike):
        directory = Path(source)
        if (directory / SINGLE).is_file() or (directory / INDEX).is_file():  # else not found
            return config, _from_directory(directory, config, choices)
    with tempfile.TemporaryDirectory(prefix="kdtr-hf-") as folder:
        directory = Path(folder) / "checkpoint"
        export_checkpoint(source, directory)
        return config, _from_directory(directory, config, choices)


def _refuse_widths(config: ModelConfig, choices: Choices) -> None:
    """torch's grouped_mm raises in the middle of a forward: it is said before."""
    if choices.experts != GROUPED or config.first_k_dense_replace == config.num_hidden_layers:
        return
    n_bytes = _N_BYTES[choices.dtype]
    for name in ("hidden_size", "moe_intermediate_size"):
        width = getattr(config, name)
        if width * n_bytes % 16:
            raise UnsupportedError(
                f"{name} = {width} in {choices.dtype} is {width * n_bytes} bytes; torch's "
                f"grouped_mm takes multiples of 16 bytes: expected experts = {EAGER!r}"
            )


def _from_directory(directory: Path, config: ModelConfig, choices: Choices) -> Any:
    """Whatever the directory's model_type says, it is read as deepseek_v3: Kimi K2 is one."""
    torch, transformers = libraries()
    with _quiet(transformers.utils.logging):
        model, report = transformers.DeepseekV3ForCausalLM.from_pretrained(
            directory,
            config=transformers.DeepseekV3Config(**write_hf_config(config)),
            dtype=getattr(torch, choices.dtype),
            attn_implementation=choices.attention,
            experts_implementation=choices.experts,
            output_loading_info=True,
            local_files_only=True,
        )
    wrong = {name: sorted(map(str, report[name])) for name in _LOADED_WHOLE if report.get(name)}
    if wrong:
        told = "; ".join(f"{name}: {', '.join(of[:3])}" for name, of in wrong.items())
        raise UnsupportedError(f"transformers did not load the checkpoint whole: {told}")
    return model.eval()


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """No progress bars, and no warning that YaRN's factor is not a ratio of two other fields."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# What from_pretrained reports, and fills with random numbers where it must.
_LOADED_WHOLE = ("missing_keys", "mismatched_keys", "error_msgs")
