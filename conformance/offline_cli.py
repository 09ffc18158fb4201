"""`kdtr questions` and `kdtr judge`: engines that read and write a file (docs/offline.md)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.drive import OFFLINE
from kdtr.conformance.finding import Place
from kdtr.conformance.gate import GateResult, Selection, run_gate
from kdtr.conformance.offline_engine import ReplayEngine
from kdtr.conformance.offline_questions import write_questions
from kdtr.conformance.report_files import add_report_options
from kdtr.contract import BundleError, EngineInfo


def add_questions_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="GOLDEN", help="a golden bundle (.kdtr)")
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="where to write the questions (.kdtr)"
    )


def questions_command(args: argparse.Namespace) -> str:
    """Write the questions; returns what to tell."""
    golden = GoldenBundle.open(args.bundle)
    try:
        write_questions(golden, args.out)
        points = sum(len(case.inputs.points()) for case in golden.cases)
        return f"{args.out}: {len(golden.cases)} cases, {points} points"
    finally:
        golden.close()


def add_judge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("answers", metavar="ANSWERS", help="what the engine wrote (.kdtr)")
    parser.add_argument(
        "--against", required=True, metavar="GOLDEN", help="the bundle that the questions are of"
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="only this case; repeatable"
    )
    parser.add_argument("--until", metavar="POINT", help="stop each case after it, e.g. round2")
    add_report_options(parser)


def judge_command(
    args: argparse.Namespace, progress: Callable[[str], None], command: str
) -> tuple[EngineInfo, GateResult]:
    """Judge a file of answers: the gate, in the one mode in which a file can be asked.

    Raises BundleError where there is no file or it cannot be read, EngineError where it holds no
    answers to these questions, and BundleError for a `--against` that is no golden bundle.
    """
    if not Path(args.answers).exists():
        raise BundleError(f"{args.answers}: no such file; expected what the engine wrote")
    golden = GoldenBundle.open(args.against)
    try:
        engine = ReplayEngine(args.answers, golden)
    finally:
        golden.close()
    result = judge_answers(
        engine, args.against, Selection(frozenset(args.case), until=args.until), progress
    )
    result.part = "part of the answers" if args.case or args.until else "answers"
    again = [command, "judge", args.answers, "--against", args.against]
    for case in result.results:
        case.findings = [
            replace(finding, reproduce=_again(again, finding.place)) for finding in case.findings
        ]
    return engine.info, result


def judge_answers(
    engine: ReplayEngine,
    golden: Any,
    selection: Selection,
    progress: Callable[[str], None],
) -> GateResult:
    """Every case of the golden bundle at path `golden`; of what the file lacks, none is judged."""
    return run_gate(
        engine,
        [golden],
        engine_name="offline",
        selection=replace(selection, modes=frozenset({OFFLINE.name})),
        progress=progress,
        modes=(OFFLINE,),
        of_case=lambda model, case: model.of(case),
    )


def _again(words: Sequence[str], place: Place) -> str:
    case = [] if place.case == "all" else ["--case", place.case]
    until = ["--until", place.point] if case and place.point not in ("open", "close") else []
    return shlex.join([*words, *case, *until])
