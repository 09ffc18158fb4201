"""The families as Markdown: how many variants, what kills and names them, and what lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from kdtr.conformance.mutants.families.all import FAMILIES, VARIANTS
from kdtr.conformance.mutants.families.hunt import Catch
from kdtr.conformance.mutants.families.reasons import reason
from kdtr.conformance.quick_corpus import QuickCorpus

HEAD = """\
# Families of mutants

The list of faults ([kill-matrix.md](kill-matrix.md)) is a sample. A family holds the neighbours of
a class: the same change by one or by M, up or down, of the first row, the last or the odd ones, in
one layer, head, page or verb, only from the second round on, after a rejection, past a length or a
size of tree (`conformance/mutants/families`). Each fault comes on its plainest occasion and, by
turns, on one of the others. Every variant is planted alone in the host engine and brought before
the judge, with all stages shown, up to the first finding. Written by `make mutants`; never edited.

A variant is *killed* by a finding, and *named* if that or its best explanation cites one of the
variant's rules. `make mutants` judges the quick corpus alone. `make quick-corpus` chooses that
anew, for each change of corpus or families: it runs what lives through all cases, and compares
every array that it shows, bit for bit, with an honest engine's.
"""


def families_text(caught: Mapping[str, Catch], quick: QuickCorpus) -> str:
    """All of the page."""
    return "\n".join([HEAD, *_lines(caught, quick)]) + "\n"


def families_summary(caught: Mapping[str, Catch]) -> str:
    """The counts in a line."""
    killed = [one for one in caught.values() if one.by is not None]
    named = sum(one.named for one in killed)
    return (
        f"{len(caught)} variants in {len(_families(caught))} families; {len(killed)} killed, of "
        f"which {named} named; {len(caught) - len(killed)} live. {_distinct(killed)} first "
        "findings differ, so at least as many variants do."
    )


def _distinct(killed: Iterable[Catch]) -> int:
    """First findings that differ in their case, point, element or value."""
    return len({(one.by, one.at, one.stage, one.actual, one.says) for one in killed})


def unexplained(caught: Mapping[str, Catch]) -> list[str]:
    """Variants that live, and nobody has said why."""
    return [name for name, one in caught.items() if one.by is None and not reason(name)]


def _families(caught: Mapping[str, Catch]) -> list[str]:
    return [*dict.fromkeys(VARIANTS[name].family for name in caught)]


def _lines(caught: Mapping[str, Catch], quick: QuickCorpus) -> Iterator[str]:
    yield from (families_summary(caught), "")
    yield from _table(
        ("family", "class", "what is varied", "variants", "killed", "named", "named of killed"),
        _family_rows(caught),
    )
    yield from ("", "## The quick corpus", "")
    yield (
        f"{len(quick.cases)} of {quick.of} cases: without any one of them a mutant lives. "
        "`kdtr gate --quick` judges these."
    )
    yield ""
    first = Counter(str(one.by) for one in caught.values() if one.by is not None)
    rows = []
    for one in quick.cases:
        entry = f"{one.bundle.removesuffix('.kdtr')}/{one.case}"
        why = one.kills[0] if one.kills else "it records every stage"
        rows.append((entry, str(first[entry]), why))
    columns = ("case", "killed first by it", "killed by it alone")
    yield from _table(columns, rows)
    yield from ("", "## What is killed, and not named", "")
    yield "The stage of the first finding, the rules that it cites, and how many variants say so."
    yield ""
    yield from _table(("family", "stage", "cites", "variants", "for example"), _misnamed(caught))
    yield from ("", "## What lives", "")
    yield from _table(("variant", "in the cases that it was run in", "why"), _living(caught, quick))


def _family_rows(caught: Mapping[str, Catch]) -> Iterator[tuple[str, ...]]:
    for family in FAMILIES:
        mine = [caught[one.name] for one in family.variants if one.name in caught]
        killed = [one for one in mine if one.by is not None]
        named = sum(one.named for one in killed)
        share = f"{100 * named / len(killed):.0f} %" if killed else ""
        counts = (str(len(mine)), str(len(killed)), str(named), share)
        if mine:
            yield (family.title, family.kind, family.what, *counts)


def _misnamed(caught: Mapping[str, Catch]) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, one in caught.items():
        if one.by is not None and not one.named:
            key = (VARIANTS[name].family, one.stage, ", ".join(one.rules) or "none")
            groups.setdefault(key, []).append(VARIANTS[name].label)
    for (family, stage, rules), labels in sorted(groups.items(), key=lambda x: -len(x[1])):
        yield family, stage, rules, str(len(labels)), labels[0]


def _living(caught: Mapping[str, Catch], quick: QuickCorpus) -> Iterator[tuple[str, ...]]:
    for name, one in caught.items():
        if one.by is None:
            same = quick.lives.get(name)
            how = "not run" if same is None else "as honest, bit for bit" if same else "other bits"
            yield name, how, reason(name) or "no reason is known"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join(['---'] * len(columns))} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
