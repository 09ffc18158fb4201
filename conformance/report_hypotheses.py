"""Why a group of findings looks as it does: explanations ranked, and how to tell one from the next.

`explained` is the data, `hypothesis_lines` its text.

Cases and modes are experiments that have been made: what fits the first finding and not another of
the same fault is ruled out, and what the mode `forward` speaks for comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kdtr.conformance.diagnosis_scene import FITS, Hint
from kdtr.conformance.finding_groups import Group
from kdtr.conformance.plain_text import entry
from kdtr.conformance.report_experiments import Bench, Experiment, alone, by_hand, telling


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An explanation of the first finding; `against` is what speaks against it, or ""."""

    hint: Hint
    against: str = ""


def ranked(group: Group, bench: Bench) -> list[Hypothesis]:
    """Those of the first finding, best first; what is ruled out comes last."""
    hints = list(group.first.looks_like)
    right = bench.right_by_hand(group.first)
    if right is not None and all(hint.fit >= 1 for hint in hints):
        hints.sort(key=lambda hint: by_hand(hint) is not right)
    found = [Hypothesis(hint, _against(hint, group)) for hint in hints]
    if all(one.against for one in found):  # then the cases have no fault in common: none is out
        return [Hypothesis(hint) for hint in hints]
    return sorted(found, key=lambda one: bool(one.against))


@dataclass(frozen=True, slots=True)
class Telling:
    """An experiment that ends differently under explanations `names`, by their numbers."""

    names: tuple[str, ...]
    experiment: Experiment

    def label(self) -> str:
        """As in "1, 2 or 3"."""
        return f"{', '.join(self.names[:-1])} or {self.names[-1]}"


@dataclass(frozen=True, slots=True)
class Explanations:
    """Why a group looks as it does.

    rivals     what explains enough to be the cause, best first: explanation 1, 2, ...
    tellings   what tells each from the next
    partial    what says where, more than why; and what would make it certain, where that is known
    ruled_out  with what speaks against each
    """

    rivals: tuple[Hint, ...]
    tellings: tuple[Telling, ...]
    partial: tuple[tuple[Hint, Experiment | None], ...]
    ruled_out: tuple[Hypothesis, ...]


def explained(group: Group, bench: Bench) -> Explanations:
    """What the first finding looks like, as far as the others leave it."""
    found = ranked(group, bench)
    left = [one.hint for one in found if not one.against]
    rivals = tuple(hint for hint in left if hint.fit >= FITS)
    return Explanations(
        rivals,
        _tellings(rivals, group, bench),
        tuple((hint, alone(hint, group.first, bench)) for hint in left if hint not in rivals),
        tuple(one for one in found if one.against),
    )


def hypothesis_lines(group: Group, bench: Bench, width: int) -> list[str]:
    """Rivals numbered, with what tells one from the next; then what says where, more than why."""
    found = explained(group, bench)
    text: list[str] = []
    for number, hint in enumerate(found.rivals, start=1):
        label = "looks like" if number == 1 else "or like"
        text += entry(label, f"{number}: {hint}" if len(found.rivals) > 1 else str(hint), width)
    for telling_ in found.tellings:
        text += _experiment_lines(telling_.label(), telling_.experiment, width)
    for hint, experiment in found.partial:
        text += entry("looks like", str(hint), width)
        text += _experiment_lines("to be sure", experiment, width)
    for one in found.ruled_out:
        text += entry("not", f"{one.hint.says}: {one.against}", width)
    return text


def _tellings(rivals: tuple[Hint, ...], group: Group, bench: Bench) -> tuple[Telling, ...]:
    """Each rival against the next; an experiment that tells several, once."""
    found: list[Telling] = []
    for number, both in enumerate(pairwise(rivals), start=1):
        names = (str(number), str(number + 1))
        experiment = telling(*both, names, group.first, bench)
        if found and found[-1].experiment == experiment:
            found[-1] = Telling((*found[-1].names, names[1]), experiment)
        else:
            found.append(Telling(names, experiment))
    return tuple(found)


def _experiment_lines(label: str, experiment: Experiment | None, width: int) -> list[str]:
    if experiment is None:
        return []
    text = entry(label, experiment.says, width)
    if experiment.command:
        text.append(f"  run       {experiment.command}")  # one line, to be copied
    return text


def _against(hint: Hint, group: Group) -> str:
    if hint.fit < 1:  # it says where, more than why
        return ""
    others = group.against(hint)
    if not others:
        return ""
    place, first = others[0].place, group.first.place
    name = "" if place.bundle == first.bundle else f"{Path(place.bundle).stem}: "
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"it does not fit {name}{place.case} / {place.mode}{more}"
