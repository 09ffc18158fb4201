"""`kdtr inspect`: show a KDTR file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.case_index import case_points
from kdtr.conformance.inspect_bundle import (
    case_lines,
    entry_lines,
    file_lines,
    golden_lines,
    metadata_lines,
    tensor_lines,
)
from kdtr.contract import BundleError, CaseError, KdtrError
from kdtr.kdtr_format import Bundle


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a golden bundle, or any KDTR file")
    parser.add_argument(
        "--case", metavar="NAME", help="only this case, by alias or id; with --tensors, its tensors"
    )
    parser.add_argument("--tensors", action="store_true", help="list the tensors")
    parser.add_argument(
        "--tensor",
        action="append",
        default=[],
        metavar="NAME",
        help="show the values of this tensor; repeatable",
    )


def inspect_command(args: argparse.Namespace, console: Console) -> int:
    """Show what was asked for; returns the exit code.

    A golden bundle that this kdtr refuses is shown as any KDTR file, and refused at the end.
    """
    path = Path(args.file)
    with Bundle.open(path) as bundle:
        bundle.verify()
        golden, refusal = _golden(path, bundle)
        aliases = _aliases(golden, args.case)
        values = {name: bundle[name] for name in args.tensor}  # refused before anything is shown
        show(console, file_lines(path, bundle))
        if args.tensors or not args.tensor:
            _show_contents(args, console, bundle, golden, aliases)
        entries = {entry.name: entry for entry in bundle.entries}
        for name, array in values.items():
            show(console, tensor_lines(entries[name], array))
    if refusal is not None:
        raise refusal
    return 0


def show(console: Console, lines: Iterable[str]) -> None:
    """Print lines as they are: no wrapping, no markup, nothing that the output cannot encode."""
    for line in lines:
        text = line.encode(console.encoding, "replace").decode(console.encoding)
        console.print(Text(text), soft_wrap=True)


def _show_contents(
    args: argparse.Namespace,
    console: Console,
    bundle: Bundle,
    golden: GoldenBundle | None,
    aliases: tuple[str, ...],
) -> None:
    if args.tensors:
        entries = bundle.entries
        if args.case is not None:
            parts = tuple(f"{side}/{alias}/" for side in ("input", "expect") for alias in aliases)
            entries = bundle.view(*parts).entries
        show(console, entry_lines(entries))
    elif golden is None:
        show(console, ["", "no golden bundle that can be read: metadata and tensors follow"])
        show(console, metadata_lines(bundle.metadata))
        show(console, entry_lines(bundle.entries))
    else:
        show(console, golden_lines(golden, bundle.metadata))
        for case in golden.cases:
            if case.inputs.alias in aliases:
                show(console, case_lines(case))


def _golden(path: Path, bundle: Bundle) -> tuple[GoldenBundle | None, KdtrError | None]:
    """The golden bundle, or why one that claims to be one is none."""
    if bundle.metadata.get("kind") != "golden":
        return None, None
    try:
        golden = GoldenBundle(path, bundle)
    except KdtrError as error:
        return None, error
    try:
        for case in golden.cases:
            list(case_points(case))
    except BundleError as error:
        return None, BundleError(f"{path}: {error}")
    return golden, None


def _aliases(golden: GoldenBundle | None, case: str | None) -> tuple[str, ...]:
    """The aliases of the cases to show."""
    if golden is None:
        if case is not None:
            raise CaseError(f"--case {case}: no golden bundle that can be read; leave it out")
        return ()
    inputs = [entry.inputs for entry in golden.cases]
    chosen = tuple(i.alias for i in inputs if case is None or case in (i.alias, i.case_id))
    if case is not None and not chosen:
        raise CaseError(f"no case {case}; the bundle has {', '.join(i.alias for i in inputs)}")
    return chosen
