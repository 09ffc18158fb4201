"""KDTR bundles (FORMAT.md) and Hugging Face checkpoint directories, as named arrays; exports."""

from kdtr.kdtr_format.checkpoint import Checkpoint, read_checkpoint
from kdtr.kdtr_format.checkpoint_writer import write_checkpoint
from kdtr.kdtr_format.gguf_export import export_gguf
from kdtr.kdtr_format.hf_export import export_checkpoint
from kdtr.kdtr_format.model import config_tensors, read_model
from kdtr.kdtr_format.model_source import OpenModel, open_model
from kdtr.kdtr_format.reader import Bundle, TensorView
from kdtr.kdtr_format.structure import Entry
from kdtr.kdtr_format.writer import write_bundle

__all__ = [
    "Bundle",
    "Checkpoint",
    "Entry",
    "OpenModel",
    "TensorView",
    "config_tensors",
    "export_checkpoint",
    "export_gguf",
    "open_model",
    "read_checkpoint",
    "read_model",
    "write_bundle",
    "write_checkpoint",
]
