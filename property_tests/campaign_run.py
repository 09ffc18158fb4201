"""Running a campaign: what is planned and not yet finished, by a crew, into a directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr.contract import EngineError
from kdtr.property_tests.campaign_crew import Hire
from kdtr.property_tests.campaign_directory import Directory, first_difference
from kdtr.property_tests.campaign_plan import BAD, CampaignError, Setup, unit_size, versions
from kdtr.property_tests.campaign_shard import Head, info_values
from kdtr.property_tests.campaign_summary import Summary, planned_units, summarise
from kdtr.property_tests.campaign_unit import Outcome
from kdtr.property_tests.laws import Law, laws


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    laws   by name; none: every law of an engine, and of twins where a twin's options are given
    cases  at least so many that hold
    most   examples of a unit
    """

    engine: str
    options: tuple[tuple[str, Any], ...] = ()
    twin_options: tuple[tuple[str, Any], ...] = ()
    laws: tuple[str, ...] = ()
    cases: int = 100_000
    seed: int = 0
    most: int = 200


@dataclass(frozen=True, slots=True)
class State:
    """How far a campaign is, for whoever shows it.

    cases    that held
    resumed  cases that an earlier run had finished
    planned  cases that the units so far planned give, if all are complete
    """

    cases: int
    resumed: int
    planned: int
    bad: int


Show = Callable[[State], None]


def law_names(request: Request) -> list[str]:
    """The laws of a campaign, in the order of `laws()`. Raises CampaignError."""
    known = laws()
    subjects = ("engine", "twins") if request.twin_options else ("engine",)
    fit = [name for name, law in known.items() if law.subject in subjects]
    for name in request.laws:
        if name not in fit:
            raise CampaignError(f"--law {name}: {_why_not(known.get(name))} {', '.join(fit)}")
    return [name for name in fit if not request.laws or name in request.laws]


def _why_not(law: Law | None) -> str:
    if law is None:
        return "no such law; expected one of"
    if law.subject == "twins":
        return "it takes two engines that nobody may tell apart: add --twin-option, or name one of"
    return "it speaks of no engine; expected one of"


def run_campaign(request: Request, out: Path, hire: Hire, show: Show) -> Summary:
    """Run what is missing in `out` and merge all of it.

    Raises CampaignError for a directory of another campaign, EngineError for an engine that does
    not load.
    """
    names = law_names(request)
    examples = unit_size(len(names), request.cases, request.most)
    campaign = {
        "engine": {
            "name": request.engine,
            "options": {key: repr(value) for key, value in request.options},
            "twin_options": {key: repr(value) for key, value in request.twin_options},
        },
        "versions": versions(),
        "laws": names,
        "cases": request.cases,
        "seed": request.seed,
        "examples": examples,
    }
    setup = Setup(request.engine, request.options, request.twin_options, examples, str(Path.cwd()))
    directory = Directory(out)
    with directory.locked():
        directory.check(campaign)
        crew = hire(setup)
        try:
            campaign["info"] = info_values(crew.describe())
            directory.claim(campaign)
            _run_missing(directory, campaign, crew, show)
        finally:
            crew.close()
        return summarise(directory)


def _run_missing(directory: Directory, campaign: dict[str, Any], crew: Any, show: Show) -> None:
    heads = directory.heads(campaign)
    resumed = _cases(heads)
    while True:
        units = planned_units(campaign, heads)
        missing = [unit for unit in units if unit not in heads]
        if not missing:
            return
        planned = _cases(heads) + sum(unit.examples for unit in missing)
        show(_state(heads, resumed, planned))
        for outcome in crew.outcomes(missing):
            _check_same(outcome, campaign)
            heads[outcome.unit] = directory.keep(outcome, campaign)
            show(_state(heads, resumed, planned))


def _check_same(outcome: Outcome, campaign: dict[str, Any]) -> None:
    """A unit that ran on another engine or by other laws belongs to another campaign."""
    if outcome.info is None:
        return  # its process died; its retry died too
    ran_on = {"info": info_values(outcome.info), "versions": outcome.versions}
    other = first_difference(ran_on, {what: campaign[what] for what in ran_on})
    if other:
        raise EngineError(
            f"unit {outcome.unit.id}: {other}, as at the start: another kdtr, engine or processor "
            "on another machine, or text that was edited since"
        )


def _cases(heads: dict[Any, Head]) -> int:
    return sum(head.held for head in heads.values())


def _state(heads: dict[Any, Head], resumed: int, planned: int) -> State:
    bad = sum(head.verdict in BAD for head in heads.values())
    return State(_cases(heads), resumed, planned, bad)
