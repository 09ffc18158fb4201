"""`kdtr campaign` and `kdtr campaign-report`: the laws at scale.

The command finds these verbs by the entry points of the group `kdtr.verbs`, so this file is read
whenever `kdtr` starts: everything that is not always installed is imported late.
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtr.conformance.engine_options import engine_options
from kdtr.contract import UnsupportedError

if TYPE_CHECKING:
    from kdtr.property_tests.campaign_crew import Crew
    from kdtr.property_tests.campaign_plan import Setup
    from kdtr.property_tests.campaign_run import Request
    from kdtr.property_tests.campaign_unit import Outcome

HELD, BROKEN = 0, 1  # exit codes
_EXTRA = ("pytest", "hypothesis", "pyarrow")


def add_campaign(verbs: Any) -> None:
    """Add `campaign` to the parser's verbs."""
    parser = verbs.add_parser(
        "campaign", help="hold an engine to the laws in as many examples as you like"
    )
    parser.set_defaults(command=_campaign)
    parser.add_argument(
        "--engine",
        required=True,
        metavar="NAME",
        help="package.module:factory, stdio:COMMAND, or a registered name such as host",
    )
    for flag, what in (
        ("--engine-option", "a keyword of its factory, as a Python literal or text; repeatable"),
        (
            "--twin-option",
            "a keyword that gives a second engine which nobody may tell from the first, such as "
            "page_size=3; repeatable; without it the laws of two engines are left out",
        ),
    ):
        parser.add_argument(flag, action="append", default=[], metavar="KEY=VALUE", help=what)
    parser.add_argument(
        "--law", action="append", default=[], metavar="NAME", help="only this law; repeatable"
    )
    parser.add_argument(
        "--cases",
        type=_positive,
        default=100_000,
        help="at least so many that hold (default: 100000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="another one, other cases (default: 0)")
    parser.add_argument(
        "--unit",
        type=_positive,
        default=200,
        metavar="CASES",
        help="cases that one process runs in one go and writes as one file (default: 200)",
    )
    parser.add_argument(
        "--unit-timeout",
        type=_seconds,
        metavar="S",
        help="end a unit that runs for so many seconds, shrinking a failure included, and note it "
        "as a timeout when it happens twice; loading the engine is not counted",
    )
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="engines at a time (default: one per core)"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on this Ray cluster; without an address the one Ray finds, or this machine",
    )
    parser.add_argument(
        "--gpus-per-worker",
        type=_not_negative,
        default=0.0,
        metavar="X",
        help="with --ray: GPUs that an engine takes, such as 1 or 0.25 (default: 0)",
    )
    parser.add_argument("--out", metavar="DIR", help="the results; a run that was cut goes on here")
    parser.add_argument(
        "--unit-id", metavar="UNIT", help="run this one unit again, as a failure names it"
    )


def add_report(verbs: Any) -> None:
    """Add `campaign-report` to the parser's verbs."""
    parser = verbs.add_parser("campaign-report", help="sum up what a campaign has shown so far")
    parser.set_defaults(command=_report)
    parser.add_argument("directory", metavar="DIR", help="what `kdtr campaign --out` wrote")


def _campaign(args: argparse.Namespace) -> int:
    _installed("kdtr campaign", _EXTRA, "campaign")
    from kdtr.property_tests.campaign_plan import CampaignError
    from kdtr.property_tests.campaign_run import Request

    if args.gpus_per_worker and args.ray is None:
        raise CampaignError("--gpus-per-worker is Ray's to give out; add --ray")
    request = Request(
        args.engine,
        tuple(engine_options("--engine-option", args.engine_option).items()),
        tuple(engine_options("--twin-option", args.twin_option).items()),
        tuple(args.law),
        args.cases,
        args.seed,
        args.unit,
    )
    if args.unit_id is not None:
        return _one_unit(args, request)
    if args.out is None:
        raise CampaignError("--out is missing; expected the directory for the results")
    from kdtr.property_tests.campaign_progress import Progress
    from kdtr.property_tests.campaign_run import run_campaign

    with Progress() as progress:
        summary = run_campaign(
            request, Path(args.out), lambda setup: _hire(args, setup), progress.show
        )
    print("\n".join(summary.lines()))
    return HELD if summary.passed else BROKEN


def _hire(args: argparse.Namespace, setup: Setup) -> Crew:
    if args.ray is not None:
        from kdtr.property_tests.campaign_ray import RayActors

        return RayActors(
            setup,
            args.workers,
            address=args.ray,
            gpus_per_worker=args.gpus_per_worker,
            limit_s=args.unit_timeout,
        )
    from kdtr.property_tests.campaign_processes import Processes

    return Processes(setup, args.workers or _cores(), args.unit_timeout)


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _one_unit(args: argparse.Namespace, request: Request) -> int:
    """Run one unit in a process of its own and tell how it ended; writes failures only."""
    from kdtr.property_tests.campaign_plan import BAD, CampaignError, Setup, unit_of
    from kdtr.property_tests.campaign_run import law_names

    unit = unit_of(args.unit_id, request.seed, request.most)
    if unit.law not in law_names(request):
        raise CampaignError(f"--unit-id {unit.id}: no law {unit.law} in this campaign")
    here = str(Path.cwd())
    crew = _hire(
        args, Setup(request.engine, request.options, request.twin_options, request.most, here)
    )
    try:
        crew.describe()
        (outcome,) = crew.outcomes([unit])
    finally:
        crew.close()
    print(
        f"{outcome.verdict}  {unit.id}: {outcome.held} of {len(outcome.cases)} cases held, "
        f"{outcome.discarded} discarded"
    )
    if outcome.why:
        print(_told(outcome, Path(args.out or "kdtr-failures")))
    return BROKEN if outcome.verdict in BAD else HELD


def _told(outcome: Outcome, directory: Path) -> str:
    from kdtr.property_tests.campaign_unit import FILES

    if outcome.failure is None:
        return outcome.why
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in outcome.failure.files.items():
        (directory / name).write_bytes(content)
    return outcome.failure.text.replace(FILES, f"{directory}/")


def _report(args: argparse.Namespace) -> int:
    _installed("kdtr campaign-report", _EXTRA, "campaign")
    from kdtr.property_tests.campaign_directory import Directory
    from kdtr.property_tests.campaign_summary import summarise

    summary = summarise(Directory(Path(args.directory)))
    print("\n".join(summary.lines()))
    return HELD if summary.passed else BROKEN


def _installed(verb: str, packages: tuple[str, ...], extra: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"{verb} needs {', '.join(missing)}; install the extra: pip install 'kdtr[{extra}]'"
        )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; expected at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}; expected more than 0 seconds")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}; expected 0 or more")
    return value
