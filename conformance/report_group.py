"""A group of findings as text: the simplest in full, then where else it is seen."""

from __future__ import annotations

from collections.abc import Iterable

from kdtr.conformance.bundle_names import names_to_tell
from kdtr.conformance.finding_groups import Group
from kdtr.conformance.plain_text import entry, printable_lines
from kdtr.conformance.report_experiments import Bench
from kdtr.conformance.report_hypotheses import hypothesis_lines

_NAMED = 12  # cases; of more, their number


def group_lines(group: Group, bench: Bench, width: int = 80, told: Iterable[str] = ()) -> list[str]:
    """Without colour, and with nothing in it that a terminal might act on.

    told  ids of rules whose sentences were printed above
    """
    first = group.first
    name = names_to_tell(bench.results).get(first.place.bundle, "")
    text = first.what_lines(width, name) + first.rule_lines(width, told)
    text += hypothesis_lines(group, bench, width)
    text += _also_lines(group, width)
    text += first.then_lines(width)
    return printable_lines(text)


def _also_lines(group: Group, width: int) -> list[str]:
    cases, modes = group.also_in(), group.modes()
    if not cases and len(modes) < 2:
        return []
    parts = []
    if cases:
        names = ", ".join(cases[:_NAMED])
        more = f" and {len(cases) - _NAMED} more" if len(cases) > _NAMED else ""
        places = [(one.place.bundle, one.place.case) for one in group.findings]
        n_bundles = len({place[0] for place in places if place != places[0]})
        of = f" of {n_bundles} bundles" if n_bundles > 1 else ""
        parts.append(f"{len(cases)} case{'' if len(cases) == 1 else 's'}{of}: {names}{more}")
    if len(modes) > 1:
        parts.append(f"in the modes {', '.join(modes)}")
    return entry("also in" if cases else "seen", "; ".join(parts), width)
