"""`kdtr export`: write a model as a Hugging Face directory or as GGUF."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kdtr.conformance.seed_model import SeedModel
from kdtr.conformance.tiny_corpus import TINY_SEED
from kdtr.contract import ModelConfig, ModelSource, UnsupportedError
from kdtr.kdtr_format import export_checkpoint, export_gguf

_DTYPES = ("float32", "bfloat16", "float16")
_FILES = (".safetensors", ".kdtr", ".json", ".bin")  # as a directory's name surely a mistake

EXPORT_HELP = """\
PATH is a file ending in .gguf (architecture deepseek2, for llama.cpp; needs the extra kdtr[gguf])
or a directory (config.json and safetensors, for transformers and engines like it). Equal input
gives equal bytes. What GGUF cannot say is refused by name.
"""


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXPORT_HELP
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--tiny", action="store_true", help="the seed model")
    model.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a Hugging Face directory, or a .kdtr bundle with weights",
    )
    parser.add_argument("--to", required=True, metavar="PATH", help="what to write, see below")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert; default: each tensor's own")
    parser.add_argument("--round", action="store_true", help="allow a conversion that is not exact")
    parser.add_argument(
        "--stacked",
        action="store_true",
        help="directory: the routed experts as one tensor per layer, as transformers 5 has them",
    )
    parser.add_argument(
        "--accept-loss",
        action="append",
        default=[],
        metavar="NAME",
        help="GGUF: write although llama.cpp will compute this otherwise; repeat for more",
    )


def export_command(args: argparse.Namespace, progress: Callable[[str], None]) -> list[str]:
    """Write what was asked for; returns the notes for the user."""
    source: ModelSource = args.source or ""
    if args.tiny:
        tiny = ModelConfig.tiny()
        source = (tiny, SeedModel("tiny", tiny, TINY_SEED).tensors())
    target = Path(args.to)
    if target.suffix in _FILES:
        raise UnsupportedError(
            f"--to {target}: {target.suffix} files are not written; "
            f"expected a directory, or a path ending in .gguf"
        )
    progress(f"writing {target}")
    if target.suffix == ".gguf":
        if args.stacked:
            raise UnsupportedError("--stacked is for directories; GGUF always stacks the experts")
        return export_gguf(
            source, target, dtype=args.dtype, rounding=args.round, accept_loss=args.accept_loss
        )
    if args.accept_loss:
        raise UnsupportedError("--accept-loss is for GGUF; a directory loses nothing")
    return export_checkpoint(
        source, target, dtype=args.dtype, rounding=args.round, stacked=args.stacked
    )
