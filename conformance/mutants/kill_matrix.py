"""The kill matrix as Markdown: what became of every mutant, and what waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kdtr.conformance.mutants.gaps import LOGITS_ONLY, SHOWN
from kdtr.conformance.mutants.kill_run import KillRow
from kdtr.conformance.mutants.mutant import Waiting
from kdtr.conformance.mutants.trial import Trial

HEAD = """\
# The kill matrix

Faults that real engines had, each planted alone in the host engine (`conformance/mutants`) and
brought before the judge, up to the first finding: the tiny bundle, which records every stage, and
then the corpus; the cases of a bundle as the gate has them. Written by `make mutants`; never
edited.

*Named*, with all stages shown: the first finding is at the stage at which the fault must be seen
first, and it or its best explanation cites the rule that the fault breaks. *Named*, with logits
alone (no stage, no snapshot): the finding or its best explanation cites the rule, or the x-ray set
does. *Killed*: there is a finding, and it says another thing. A class is one of the list of faults
and no rule, though some look alike.
"""

COLUMNS = (
    *("mutant", "class", "fault", "breaks", "seen first at"),
    *("all stages", "by", "logits alone", "by"),
)


def matrix_text(rows: Sequence[KillRow], waiting: Sequence[Waiting]) -> str:
    """All of the page."""
    return "\n".join([HEAD, *_lines(rows, waiting)]) + "\n"


def summary(rows: Sequence[KillRow], waiting: Sequence[Waiting]) -> str:
    """The counts in two lines."""
    counts = [
        f"{what}: {sum(one.killed for one in trials)} killed, "
        f"{sum(one.named for one in trials)} named"
        for what, trials in (
            ("all stages", [row.shown for row in rows]),
            ("logits alone", [row.logits_only for row in rows]),
        )
    ]
    return f"{len(rows)} mutants; {'; '.join(counts)}.\n{len(waiting)} faults wait for a part."


def living(rows: Sequence[KillRow]) -> list[str]:
    """The mutants that no case kills though every stage is shown."""
    return [row.mutant.number for row in rows if not row.shown.killed]


def _lines(rows: Sequence[KillRow], waiting: Sequence[Waiting]) -> Iterator[str]:
    yield from (summary(rows, waiting), "")
    yield _row(COLUMNS)
    yield _row(["---"] * len(COLUMNS))
    for row in rows:
        one = row.mutant
        cells = [one.number, one.kind, one.what, one.rules[0], one.stage]
        for trial in (row.shown, row.logits_only):
            cells += [_became(trial), trial.where]
        yield _row(cells)
    yield from _tiers(rows)
    yield from ("", "## First findings", "", "With all stages shown, in a line each.", "")
    for row in rows:
        yield f"- {row.mutant.number} `{row.mutant.name}`: {row.shown.says or 'none'}"
    yield from _unnamed(rows)
    yield from ("", "## Waiting", "", "Faults of parts that the host engine does not have.", "")
    yield from ("| mutant | class | fault | waits for |", "| --- | --- | --- | --- |")
    for wait in waiting:
        yield _row([wait.number, wait.kind, wait.what, wait.part])


def _tiers(rows: Sequence[KillRow]) -> Iterator[str]:
    asked = [(row.mutant, row.tiers) for row in rows if row.tiers is not None]
    if not asked:
        return
    of = asked[0][1].of
    yield from ("", "## By tier", "")
    yield (
        "With all stages shown: the first case of each tier that kills, and how many of the "
        f"{of} cases of the quick corpus do. *Smoke* is plain decoding and chains."
    )
    yield ""
    columns = ("mutant", "smoke", "tiny", "corpus", f"of {of} quick cases")
    yield _row(columns)
    yield _row(["---"] * len(columns))
    for mutant, found in asked:
        places = [one or "lives" for one in (found.smoke, found.tiny, found.corpus)]
        yield _row([mutant.number, *places, str(len(found.quick))])


def _unnamed(rows: Sequence[KillRow]) -> Iterator[str]:
    yield from ("", "## Not named", "")
    for row in rows:
        number, rules = row.mutant.number, " or ".join(row.mutant.rules)
        for how, trial, reasons in (
            ("all stages", row.shown, SHOWN),
            ("logits alone", row.logits_only, LOGITS_ONLY),
        ):
            if trial.named:
                continue
            seen = f"seen at {trial.stage}, of {rules} at {row.mutant.stage}" * trial.killed
            why = reasons.get(number, "no reason is known")
            yield f"- {number}, {how}: {seen or 'it lives'}: {why}"


def _became(trial: Trial) -> str:
    return "named" if trial.named else "killed" if trial.killed else "**lives**"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
