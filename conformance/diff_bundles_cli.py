"""`kdtr diff`: two bundles side by side."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console

from kdtr.conformance.diff_bundles import BundleDifference, diff_bundles
from kdtr.conformance.inspect_bundle_cli import show
from kdtr.conformance.plain_text import printable
from kdtr.kdtr_format import Bundle

_SHOWN = 20  # lines of metadata


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a golden bundle, or any KDTR file")
    parser.add_argument("b", metavar="B", help="another")


def diff_command(args: argparse.Namespace, console: Console) -> int:
    """Compare and show; returns the exit code: 0 same content, 1 different."""
    with Bundle.open(args.a) as a, Bundle.open(args.b) as b:
        a.verify()
        b.verify()
        found = diff_bundles(a, b)
        show(console, [f"A  {a.sha256()}  {printable(args.a)}"])
        show(console, [f"B  {b.sha256()}  {printable(args.b)}"])
        show(console, difference_lines(found))
    return 0 if found.same_content else 1


def difference_lines(found: BundleDifference) -> Iterator[str]:
    """The comparison as text; the last line is the verdict."""
    if found.metadata:
        yield "metadata"
    for path, a, b in found.metadata[:_SHOWN]:
        yield f"  {printable(path)}"
        yield f"    A         {printable(a)}"
        yield f"    B         {printable(b)}"
    if len(found.metadata) > _SHOWN:
        yield f"  and {len(found.metadata) - _SHOWN} more"
    for side, cases in zip("AB", found.cases, strict=True):
        if cases:
            yield f"cases only in {side}: {printable(', '.join(cases))}"
    if found.first is not None:
        yield f"first difference: {printable(found.first.place)}"
        yield f"  tensor    {printable(found.first.name)}"
        yield from (f"  {printable(line)}" for line in found.first.lines)
    for side, names in zip("AB", found.only, strict=True):
        if names:
            yield f"tensors only in {side}: {len(names)}{_parts(names)}"
    yield _verdict(found)


def _verdict(found: BundleDifference) -> str:
    if found.same_bytes:
        return "same bytes"
    if found.same_content:
        return "same content; the bytes differ in alignment or in what a reader may ignore"
    return f"{len(found.unequal)} of {found.n_common} common tensors differ{_parts(found.unequal)}"


def _parts(names: Sequence[str]) -> str:
    """How many of the names are in each part of a bundle, in parentheses."""
    parts = Counter(name.partition("/")[0] for name in names if "/" in name)
    told = ", ".join(f"{part} {count}" for part, count in parts.items())
    return f" ({printable(told)})" if told else ""
