"""`kdtr mutants`: plant every fault, judge it, and print the kill matrix."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kdtr.conformance.mutants.kill_matrix import living, matrix_text, summary
from kdtr.conformance.mutants.kill_run import run_mutants
from kdtr.conformance.mutants.zoo import CLASSES, MUTANTS, WAITING
from kdtr.contract import CaseError

MUTANTS_HELP = """\
Each mutant is the engine with one fault that a real engine had. It is judged as `kdtr gate` would,
up to the first finding: with all stages shown, and with logits alone. Exit code 1 if one lives.

Without BUNDLE the corpus is judged; put the bundles that record every stage first, as
`make mutants` does: the first finding is then at the stage where the fault begins.
"""


def add_mutants_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = MUTANTS_HELP
    parser.add_argument("bundles", nargs="*", metavar="BUNDLE", help="golden bundles (.kdtr)")
    parser.add_argument(
        "--engine",
        default="host",
        metavar="NAME",
        help="a registered engine of this project, which mutants can wrap (default: host)",
    )
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        choices=[*CLASSES],
        help="only the mutants of this class; repeatable",
    )
    parser.add_argument(
        "--mutant", action="append", default=[], metavar="NUMBER", help="only this; repeatable"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: one per core)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the matrix there, as Markdown")


def mutants_command(
    args: argparse.Namespace, console: Console, progress: Callable[[str], None]
) -> bool:
    """Try what was asked for; whether all of it was killed."""
    numbers = _selected(args.classes, args.mutant)
    if args.out and len(numbers) < len(MUTANTS):
        raise CaseError("--out writes the whole matrix; leave --class and --mutant out")
    if args.workers < 1:
        raise CaseError(f"--workers {args.workers}; expected at least 1")
    waiting = [
        one
        for name, family in CLASSES.items()
        for one in family.waiting
        if not args.mutant and (not args.classes or name in args.classes)
    ]
    bundles = args.bundles or shipped_corpus()
    rows = run_mutants(
        numbers, bundles, engine=args.engine, workers=args.workers, progress=progress
    )
    text = matrix_text(rows, waiting)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")
        console.print(Text(summary(rows, waiting)), soft_wrap=True)
    else:
        console.print(Text(text.rstrip("\n")), soft_wrap=True)
    alive = living(rows)
    if alive:
        console.print(Text(f"FAILED: {', '.join(alive)} lives", style="bold red"), soft_wrap=True)
    return not alive


def shipped_corpus() -> list[str]:
    """The bundles that come with the package."""
    folder = resources.files("kdtr.conformance").joinpath("corpus")
    return sorted(str(path) for path in folder.iterdir() if path.name.endswith(".kdtr"))


def _selected(classes: list[str], numbers: list[str]) -> list[str]:
    unknown = sorted(set(numbers) - set(MUTANTS))
    if unknown:
        waits = [f"{one} waits for {WAITING[one].part}" for one in unknown if one in WAITING]
        raise CaseError(
            f"no mutant {', '.join(unknown)}{''.join(f'; {text}' for text in waits)}; expected "
            f"some of {', '.join(MUTANTS)}"
        )
    of_class = {one.number for name in classes or CLASSES for one in CLASSES[name].mutants}
    return [one for one in MUTANTS if one in of_class and (not numbers or one in numbers)]
