"""Why a group of findings looks as it does: explanations ranked, and how to tell one from the next.

Cases and modes are experiments that have been made: what fits the first finding and not another of
the same fault is ruled out, and what the mode `forward` speaks for comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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


def hypothesis_lines(group: Group, bench: Bench, width: int) -> list[str]:
    """Rivals numbered, with what tells one from the next; then what says where, more than why."""
    found = ranked(group, bench)
    left = [one.hint for one in found if not one.against]
    rivals = [hint for hint in left if hint.fit >= FITS]
    text: list[str] = []
    for number, hint in enumerate(rivals, start=1):
        label = "looks like" if number == 1 else "or like"
        text += entry(label, f"{number}: {hint}" if len(rivals) > 1 else str(hint), width)
    for label, experiment in _tellings(rivals, group, bench):
        text += _experiment_lines(label, experiment, width)
    for hint in left:
        if hint not in rivals:
            text += entry("looks like", str(hint), width)
            text += _experiment_lines("to be sure", alone(hint, group.first, bench), width)
    for one in found:
        if one.against:
            text += entry("not", f"{one.hint.says}: {one.against}", width)
    return text


def _tellings(rivals: list[Hint], group: Group, bench: Bench) -> list[tuple[str, Experiment]]:
    """What tells each from the next, and its label; an experiment that tells several, once."""
    found: list[tuple[list[str], Experiment]] = []
    for number, both in enumerate(pairwise(rivals), start=1):
        names = (str(number), str(number + 1))
        experiment = telling(*both, names, group.first, bench)
        if found and found[-1][1] == experiment:
            found[-1][0].append(names[1])
        else:
            found.append(([*names], experiment))
    return [(f"{', '.join(names[:-1])} or {names[-1]}", one) for names, one in found]


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
    place = others[0].place
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"it does not fit {place.case} / {place.mode}{more}"
