"""One mutant's trials for a reader at a terminal: what it is, what must be said, what is said."""

from __future__ import annotations

from collections.abc import Iterator

from kdtr.conformance.mutants.kill_run import KillRow
from kdtr.conformance.mutants.trial import Trial
from kdtr.conformance.plain_text import entry
from kdtr.contract import rule


def mutant_lines(row: KillRow, title: str, width: int) -> Iterator[str]:
    """`title` is the class in words."""
    one = row.mutant
    yield f"{one.number}  {one.name}  ({title}; {one.kind} in the list of faults)"
    yield from entry("fault", one.what, width)
    for rule_id in one.rules:
        yield from entry(rule_id, rule(rule_id), width)
    yield from entry("wanted", f"seen first at {one.stage}, {' or '.join(one.rules)} cited", width)
    for how, trial in (("all stages shown", row.shown), ("logits alone", row.logits_only)):
        yield f"  {how}: {_became(trial)}"
        if trial.killed:
            yield from entry("at", trial.where, width)
            yield from entry("says", trial.says, width)
            yield from entry("cites", ", ".join(trial.rules), width)


def _became(trial: Trial) -> str:
    if not trial.killed:
        return f"it lives, after {trial.judged} cases"
    if trial.named:
        return "killed and named"
    return "killed, and not named: the finding says another thing"
