"""What a campaign has shown so far, from its directory: the shards merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdtr.property_tests.campaign_directory import Directory
from kdtr.property_tests.campaign_plan import (
    BAD,
    SKIPPED,
    UNIT_VERDICTS,
    Unit,
    first_units,
    more_units,
)
from kdtr.property_tests.campaign_shard import Head, pyarrow, read_rows
from kdtr.property_tests.campaign_unit import CASES, FILES
from kdtr.property_tests.trees import SHAPES
from kdtr.property_tests.watch import EXCUSED, HELD


@dataclass(slots=True)
class Summary:
    """Sums over shards.

    failures  where the files of failures are
    laws      cases by (law, verdict); those that held are the proof
    worst     by law, the largest error as a fraction of its bound, and its stage
    ended     units by verdict
    skipped   laws for which the engine lacks a verb, or what else they need
    early     by law, units that ended early and why the first of them did
    bad       units that failed, crashed or took too long, in order
    missing   units that have not run
    """

    campaign: dict[str, Any]
    failures: Path
    laws: Counter[tuple[str, str]] = field(default_factory=Counter)
    trees: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    scattered: int = 0
    deepest: int = 0
    widest: int = 0
    discarded: int = 0
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    skipped: set[str] = field(default_factory=set)
    early: dict[str, tuple[int, str]] = field(default_factory=dict)
    bad: list[Head] = field(default_factory=list)
    missing: list[Unit] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Those that held: what was excused as a near tie shows nothing."""
        return self._of(HELD)

    @property
    def unshown(self) -> list[str]:
        """Laws of which no example held, though the engine has what they need."""
        return [
            law
            for law in self.campaign["laws"]
            if not self.laws[law, HELD] and law not in self.skipped
        ]

    @property
    def passed(self) -> bool:
        """As much has held as was asked for, of every law something, and nothing broke."""
        enough = self.cases >= self.campaign["cases"] and not self.unshown
        return enough and not self.bad and not self.missing

    def _of(self, verdict: str) -> int:
        return sum(n for (_, ended), n in self.laws.items() if ended == verdict)

    def lines(self) -> list[str]:
        """For people: laws, shapes, units, and what went wrong at the end."""
        return [
            *self._laws(),
            "",
            *self._shapes(),
            "",
            *self._units(),
            *self._wrong(),
        ]

    def _laws(self) -> list[str]:
        names = self.campaign["laws"]
        width = max(len(name) for name in (*names, "law"))
        head = "".join(f"  {verdict:>9}" for verdict in CASES)
        lines = [f"{'law':<{width}}{head}  error/bound"]
        for law in names:
            counts = "".join(f"  {self.laws[law, verdict]:>9,}" for verdict in CASES)
            worst = f"  {self.worst[law][0]:.3f} {self.worst[law][1]}" if law in self.worst else ""
            lines.append(f"{law:<{width}}{counts}{worst}")
        sums = "".join(f"  {self._of(verdict):>9,}" for verdict in CASES)
        lines.append(f"{'all laws':<{width}}{sums}")
        return lines

    def _shapes(self) -> list[str]:
        width = max(len(shape) for shape in (*SHAPES, "all shapes"))
        lines = [f"{'shape':<{width}}  {'trees':>11}  {'rows':>11}"]
        for shape in SHAPES:
            lines.append(f"{shape:<{width}}  {self.trees[shape]:>11,}  {self.rows[shape]:>11,}")
        trees, rows = self.trees.total(), self.rows.total()
        lines.append(f"{'all shapes':<{width}}  {trees:>11,}  {rows:>11,}")
        lines.append(
            f"deepest {self.deepest}, most siblings {self.widest}, {self.scattered:,} commits of a "
            "path that is not a prefix of the nodes"
        )
        return lines

    def _units(self) -> list[str]:
        engine, info, versions = (self.campaign[k] for k in ("engine", "info", "versions"))
        ended = ", ".join(f"{self.ended[v]:,} {v}" for v in UNIT_VERDICTS if self.ended[v])
        lines = [
            f"engine    {engine['name']}: {info['name']} {info['version']} on {info['device']}",
            f"versions  {', '.join(f'{name} {value}' for name, value in versions.items())}",
            f"units     {ended or 'none'}; {len(self.missing):,} missing; seed "
            f"{self.campaign['seed']}, {self.campaign['examples']} examples each",
            f"cases     {self.cases:,} of {self.campaign['cases']:,} asked for; "
            f"{self._of(EXCUSED):,} excused and {self.discarded:,} discarded besides",
        ]
        for law, (n, why) in self.early.items():
            lines.append(f"early     {law}, {n} units: {why}")
        if self.unshown and not self.missing:
            lines.append(f"unshown   no example held: {', '.join(self.unshown)}")
        return lines

    def _wrong(self) -> list[str]:
        lines = []
        for head in self.bad:
            lines += ["", f"{head.verdict.upper()}  {head.unit.id}"]
            text = head.failure.replace(FILES, f"{self.failures}/")
            lines += [f"  {line}" for line in text.splitlines()]
        return lines


def summarise(directory: Directory) -> Summary:
    """Merge the shards of a directory. Raises CampaignError where they do not fit its manifest."""
    campaign = directory.manifest()
    heads = directory.heads(campaign)
    summary = Summary(campaign, directory.failures)
    planned = dict.fromkeys(planned_units(campaign, heads))
    summary.missing = [unit for unit in planned if unit not in heads]
    for unit in sorted(heads, key=lambda unit: unit.id):
        _add_head(summary, heads[unit])
    _add_rows(summary, directory, heads)
    return summary


def planned_units(campaign: Mapping[str, Any], heads: Mapping[Unit, Head]) -> list[Unit]:
    """The units of a campaign, as far as what has ended tells.

    Once all that are planned have ended, more are added for the cases that still lack: the plan
    follows from the outcomes, so a campaign that is resumed has the plan it had.
    """
    laws, cases = campaign["laws"], campaign["cases"]
    examples, seed = campaign["examples"], campaign["seed"]
    units = first_units(laws, cases, examples, seed)
    while all(unit in heads for unit in units):
        lacking = cases - sum(heads[unit].held for unit in units)
        more = more_units({u: heads[u].verdict for u in units}, laws, lacking, examples, seed)
        if not more:
            break
        units += more
    return units


def _add_head(summary: Summary, head: Head) -> None:
    summary.ended[head.verdict] += 1
    summary.discarded += head.discarded
    if head.verdict == SKIPPED:
        summary.skipped.add(head.unit.law)
    if head.verdict in BAD:
        summary.bad.append(head)
    elif head.why:
        n, why = summary.early.get(head.unit.law, (0, head.why))
        summary.early[head.unit.law] = (n + 1, why)


def _add_rows(summary: Summary, directory: Directory, heads: Mapping[Unit, Head]) -> None:
    pa, _ = pyarrow()
    if not heads:
        return
    shards = [read_rows(directory.shards / f"{unit.id}.parquet") for unit in heads]
    table = pa.concat_tables(shards)
    if not table.num_rows:
        return
    counted = table.group_by(["law", "verdict"]).aggregate([([], "count_all")]).to_pylist()
    for row in counted:
        summary.laws[row["law"], row["verdict"]] += row["count_all"]
    for shape in SHAPES:
        summary.trees[shape] = _of(table, f"trees_{shape}", "sum")
        summary.rows[shape] = _of(table, f"rows_{shape}", "sum")
    summary.scattered = _of(table, "scattered", "sum")
    summary.deepest = _of(table, "deepest", "max")
    summary.widest = _of(table, "widest", "max")
    at = table.select(["law", "worst", "worst_stage"]).drop_null()
    for row in at.group_by(["law", "worst_stage"]).aggregate([("worst", "max")]).to_pylist():
        found = (row["worst_max"], row["worst_stage"])
        summary.worst[row["law"]] = max(found, summary.worst.get(row["law"], (0.0, "")))


def _of(table: Any, column: str, how: str) -> int:
    """One number over a column: its sum or its largest."""
    result = table.group_by([]).aggregate([(column, how)])
    return int(result[f"{column}_{how}"][0].as_py())
