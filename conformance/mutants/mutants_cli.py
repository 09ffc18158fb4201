"""`kdtr mutants`: plant every fault, judge it, and print the kill matrix."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kdtr.conformance.mutants.docket import Entry
from kdtr.conformance.mutants.families.all import VARIANTS
from kdtr.conformance.mutants.families.families_page import (
    families_summary,
    families_text,
    unexplained,
)
from kdtr.conformance.mutants.families.families_run import (
    FIRST,
    SUBJECTS,
    choose_quick,
    hunt_all,
)
from kdtr.conformance.mutants.kill_matrix import living, matrix_text, summary
from kdtr.conformance.mutants.kill_run import KillRow, run_mutants
from kdtr.conformance.mutants.mutant import Waiting
from kdtr.conformance.mutants.one_mutant import mutant_lines
from kdtr.conformance.mutants.zoo import CLASSES, MUTANTS, WAITING
from kdtr.conformance.quick_corpus import QuickCorpus, read_quick, shipped_corpus
from kdtr.contract import CaseError

MUTANTS_HELP = """\
Each mutant is the engine with one fault that a real engine had. It is judged as `kdtr gate` would,
up to the first finding: with all stages shown, and with logits alone. Exit code 1 if one lives.

Without BUNDLE the corpus is judged; put the bundles that record every stage first, as
`make mutants` does: the first finding is then at the stage where the fault begins.

With --class or --mutant, what is said of each is printed in words; with --out the kill matrix is
written; --families-out and --quick-out are the work of minutes, on every core.
"""
Progress = Callable[[str], None]


def add_mutants_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = MUTANTS_HELP
    parser.add_argument("bundles", nargs="*", metavar="BUNDLE", help="golden bundles (.kdtr)")
    parser.add_argument(
        "--engine",
        default="host",
        metavar="NAME",
        help="a registered engine of this project, which mutants can wrap (default: host)",
    )
    titles = ", ".join(f"{name} {one.title}" for name, one in CLASSES.items())
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        choices=[*CLASSES],
        metavar="CLASS",
        help=f"only the mutants of this class; repeatable: {titles}",
    )
    parser.add_argument(
        "--mutant",
        action="append",
        default=[],
        metavar="NUMBER",
        help="only this, as M042; repeatable",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: one per core)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the matrix there, as Markdown")
    parser.add_argument(
        "--families-out",
        metavar="FILE",
        help="judge the generated families too, by the quick corpus, and write their page there",
    )
    parser.add_argument(
        "--quick-out",
        metavar="FILE",
        help="nothing else: run all of it through all cases, and write the quick corpus there",
    )


def mutants_command(args: argparse.Namespace, console: Console, progress: Progress) -> bool:
    """Try what was asked for; whether all of it was killed."""
    numbers = _selected(args.classes, args.mutant)
    is_part = len(numbers) < len(MUTANTS)
    for option in ("out", "families_out", "quick_out"):
        if getattr(args, option) and is_part:
            name = option.replace("_", "-")
            raise CaseError(f"--{name} writes the whole matrix; leave --class and --mutant out")
    if args.workers < 1:
        raise CaseError(f"--workers {args.workers}; expected at least 1")
    bundles = args.bundles or shipped_corpus()
    if args.quick_out:
        return _quick(args.quick_out, bundles, args.workers, console, progress)
    quick = read_quick().of_bundles(bundles) if args.out or args.families_out else None
    rows = run_mutants(
        numbers,
        bundles,
        engine=args.engine,
        workers=args.workers,
        quick=None if quick is None else _entries(quick),
        progress=progress,
    )
    _tell(args, rows, console)
    alive = living(rows)
    if args.families_out and quick is not None:
        alive += _families(args.families_out, bundles, quick, args.workers, console, progress)
    if alive:
        console.print(Text(f"FAILED: {', '.join(alive)} lives", style="bold red"), soft_wrap=True)
    return not alive


def _tell(args: argparse.Namespace, rows: Sequence[KillRow], console: Console) -> None:
    waiting = _waiting(args.classes, args.mutant)
    if args.out:
        Path(args.out).write_text(matrix_text(rows, waiting), encoding="utf-8")
    elif len(rows) < len(MUTANTS):
        title = {one.number: family.title for family in CLASSES.values() for one in family.mutants}
        for row in rows:
            for line in mutant_lines(row, title[row.mutant.number], console.width):
                console.print(Text(line), soft_wrap=True)
            console.print()
    else:
        console.print(Text(matrix_text(rows, waiting).rstrip("\n")), soft_wrap=True)
        return
    console.print(Text(summary(rows, waiting)), soft_wrap=True)


def _families(
    out: str,
    bundles: Sequence[str],
    quick: QuickCorpus,
    workers: int,
    console: Console,
    progress: Progress,
) -> list[str]:
    """Write the page; the variants that live without a reason."""
    caught = hunt_all(
        VARIANTS,
        bundles,
        first=sorted(_entries(quick), key=lambda one: one != FIRST),  # else as they are chosen
        only_first=True,
        workers=workers,
        progress=progress,
    )
    Path(out).write_text(families_text(caught, quick), encoding="utf-8")
    console.print(Text(families_summary(caught)), soft_wrap=True)
    return unexplained(caught)


def _quick(
    out: str, bundles: Sequence[str], workers: int, console: Console, progress: Progress
) -> bool:
    caught = hunt_all(SUBJECTS, bundles, workers=workers, progress=progress)
    sums = {Path(one).name: hashlib.sha256(Path(one).read_bytes()).hexdigest() for one in bundles}
    quick = choose_quick(caught, bundles, sums, workers=workers, progress=progress)
    Path(out).write_text(quick.text(), encoding="utf-8")
    console.print(
        Text(
            f"{len(quick.cases)} of {quick.of} cases kill all {len(caught) - len(quick.lives)} of "
            f"{len(caught)} mutants and variants that any case kills"
        ),
        soft_wrap=True,
    )
    return True


def _entries(quick: QuickCorpus) -> list[Entry]:
    return [Entry(one.bundle.removesuffix(".kdtr"), one.case) for one in quick.cases]


def _waiting(classes: list[str], numbers: list[str]) -> list[Waiting]:
    return [
        one
        for name, family in CLASSES.items()
        for one in family.waiting
        if not numbers and (not classes or name in classes)
    ]


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
