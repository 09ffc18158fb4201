"""`kdtr xray`: read mask, positions, cache and routing from an engine's logits alone."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtr.conformance import standard_streams
from kdtr.conformance.engine_loader import load_engine
from kdtr.conformance.finding import Verdict
from kdtr.conformance.plain_text import engine_name, printable_lines
from kdtr.conformance.xray import DTYPES, XrayModel, XrayResult, run_xray, xray_models
from kdtr.contract import CaseError, EngineError, EngineInfo, KdtrError
from kdtr.kdtr_format import config_tensors, export_checkpoint, export_gguf, write_bundle

XRAY_HELP = """\
Generated checkpoints whose logits list what every row saw: which rows, at which distance, with
which weight; and which experts were chosen. The engine shows logits and nothing else.

--export writes the models to DIR: NAME/ for transformers and engines like it, NAME.gguf for
llama.cpp (needs the extra kdtr[gguf]), NAME.kdtr for kdtr. Without --engine that is all.
"""
_STYLE = {Verdict.PASS: "green", Verdict.UNSUPPORTED: "dim"}


def add_xray_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = XRAY_HELP
    parser.add_argument("--engine", metavar="NAME", help="as for `kdtr gate`")
    parser.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword of the factory, as a Python literal or text; repeat for more",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the checkpoints, and the rounding that is granted; default: bfloat16, and what "
        "the engine declares",
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="only this one; repeatable"
    )
    parser.add_argument("--export", metavar="DIR", help="write the models, see below")


def xray_command(
    args: argparse.Namespace,
    options: Mapping[str, Any],
    console: Console,
    progress: Callable[[str], None],
    command: str,
) -> bool:
    """Run what was asked for; whether it passed."""
    models = _selected(args.model)
    if args.export is None and args.engine is None:
        raise EngineError("kdtr xray needs --engine NAME, --export DIR or both")
    if args.export is not None:
        for line in export_models(models, Path(args.export), args.dtype, progress):
            console.print(Text(line), soft_wrap=True)
    if args.engine is None:
        return True
    engine = load_engine(args.engine, options)
    start = time.perf_counter()
    result = run_xray(engine, dtype=args.dtype, models=models, progress=progress)
    standard_streams.put_back()
    again = [command, "xray", "--engine", args.engine]
    again += [word for text in args.engine_option for word in ("--engine-option", text)]
    again += ["--dtype", args.dtype] if args.dtype else []
    for i, finding in enumerate(result.findings):
        line = shlex.join([*again, "--model", finding.place.case])
        result.findings[i] = replace(finding, reproduce=line)
    print_xray(console, engine.info, result, time.perf_counter() - start)
    return result.passed


def export_models(
    models: tuple[XrayModel, ...],
    directory: Path,
    dtype: str | None,
    progress: Callable[[str], None],
) -> Iterator[str]:
    """Write every model in every format; yields the paths, and what could not be written."""
    directory.mkdir(parents=True, exist_ok=True)
    for model in models:
        progress(f"writing {model.name}")
        source = (model.config, model.tensors(dtype or "bfloat16"))
        export_checkpoint(source, directory / model.name)
        yield str(directory / model.name)
        tensors = {f"weights/{name}": array for name, array in source[1].items()}
        metadata = {"model": {"name": f"x-ray {model.name}", "why": model.why}}
        path = directory / f"{model.name}.kdtr"
        write_bundle(path, {**config_tensors(model.config), **tensors}, metadata)
        yield str(path)
        path = directory / f"{model.name}.gguf"
        try:
            export_gguf(source, path)
            yield str(path)
        except KdtrError as error:
            yield f"{path} not written: {error}"


def print_xray(console: Console, info: EngineInfo, result: XrayResult, seconds: float) -> None:
    """A table of the models, the findings, and a closing line."""
    console.print(Text(engine_name(info)), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("model", "verdict"):
        table.add_column(name)
    for name in ("rows", "error/bound", "seconds"):
        table.add_column(name, justify="right")
    for one in result.models:
        verdict = "-" if one.verdict is Verdict.UNSUPPORTED else one.verdict.value
        style = _STYLE.get(one.verdict, "bold red")
        table.add_row(
            one.name,
            Text(verdict, style=style),
            str(one.rows),
            f"{one.headroom:.2g}" if one.compared else "",
            f"{one.seconds:.1f}",
        )
    console.print(table)
    for one in result.models:
        if one.note:
            console.print(Text(f"{one.name}: {one.note}"), soft_wrap=True)
    told: set[str] = set()
    for finding in result.findings:
        console.print()
        for line in printable_lines(finding.lines(console.width, told)):
            console.print(Text(line), soft_wrap=True)
        told.update(finding.rules)
    verdict = "passed" if result.passed else "FAILED"
    compared = sum(one.compared for one in result.models)
    if not compared:
        verdict = "FAILED: nothing was compared"
    rows = sum(one.rows for one in result.models)
    console.print(
        Text(
            f"\nx-ray {verdict}: {_findings(len(result.findings))}; {compared} logits of {rows} "
            f"rows in {seconds:.1f} s",
            style="bold green" if result.passed else "bold red",
        ),
        soft_wrap=True,
    )


def _selected(names: list[str]) -> tuple[XrayModel, ...]:
    models = xray_models()
    unknown = sorted(set(names) - {model.name for model in models})
    if unknown:
        raise CaseError(
            f"no x-ray model {', '.join(unknown)}; there are "
            f"{', '.join(model.name for model in models)}"
        )
    return tuple(model for model in models if not names or model.name in names)


def _findings(n: int) -> str:
    return f"{n} finding{'' if n == 1 else 's'}"
