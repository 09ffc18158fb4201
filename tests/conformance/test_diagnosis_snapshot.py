"""A snapshot of which the case records no truth is held against rows that are computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from showing_less import MINIMAL, engine, less_of

from kdtr.conformance import Finding, GateResult, GoldenBundle, diagnosis_past
from kdtr.conformance.case import CasePlan
from kdtr.conformance.golden import record_bundle
from kdtr.conformance.mutants import make_engine as mutant
from kdtr.contract import LogicalCache

Judge = Callable[..., GateResult]

SNAPSHOT = (*MINIMAL, "snapshot")
SUSPECT = (
    "all 4 rows differ, the root too, which sees the cache and itself alone, and the round before "
    "was right: suspect what its commit left, or what was written over committed rows"
)


@pytest.fixture(scope="module")
def decisions(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of a Y; the cache is recorded after the last alone."""
    path = tmp_path_factory.mktemp("golden") / "decisions.kdtr"
    bundle = GoldenBundle.open(small)
    y = next(case.inputs for case in bundle.cases if case.inputs.alias == "y")
    plan = CasePlan(y.alias, y.why, y.rules, y.rounds, y.chunks, level="decisions")
    record_bundle(path, {"name": "small"}, bundle.config, bundle.weights, (plan,))
    bundle.close()
    return path


def first(judge: Judge, engine: Any, bundle: Path) -> Finding:
    (finding,) = judge(engine, bundle, "y", modes=["stepwise"]).findings
    return finding


class Altered:
    """The engine, whose snapshots are changed before they are shown."""

    def __init__(self, engine: Any, change: Callable[[LogicalCache], LogicalCache]) -> None:
        self._engine = engine
        self._change = change
        self.info = engine.info

    def load(self, source: Any) -> Any:
        return _Altered(self._engine.load(source), {"open": self._open})

    def _open(self, session: Any) -> Any:
        return _Altered(session, {"snapshot": self._change})


class _Altered:
    def __init__(self, inner: Any, changes: Mapping[str, Callable[[Any], Any]]) -> None:
        self._inner = inner
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._changes:
            return value
        return lambda *args, **kwargs: self._changes[name](value(*args, **kwargs))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no_compaction", "the accepted rows were not moved: slot L + k holds node k, not path[k]"),
        (
            "last_move_skipped",
            "the last move is missing: the deepest accepted node was not moved",
        ),
        ("only_c_kv_moves", "only c_kv was moved; k_pe stayed: slot L + k has that of node k"),
    ],
)
def test_a_wrong_commit_is_read_from_the_snapshot(
    judge: Judge, decisions: Path, fault: str, says: str
) -> None:
    finding = first(judge, engine(fault, SNAPSHOT), decisions)

    assert ("round1", "logits") == (finding.place.point, finding.stage)
    assert (
        f"the cache that round0 left, by its snapshot(): {says} (fits every element, COMMIT-1)"
    ) == str(finding.looks_like[0])
    assert "" == finding.next_step
    assert {"COMMIT-1", "COMMIT-3"} <= set(finding.rules)


def test_rows_that_no_known_commit_leaves_are_named(judge: Judge, decisions: Path) -> None:
    """Slot 2 is never as it should be; the forward does not read what is shown of it."""

    def change(cache: LogicalCache) -> LogicalCache:
        c_kv = cache.c_kv.copy()
        c_kv[1, 2] += 1
        return replace(cache, c_kv=c_kv)

    finding = first(judge, Altered(engine("no_compaction", SNAPSHOT), change), decisions)

    assert (
        f"{SUSPECT}; in the snapshot() after round0 slots 2, 7, 8 in all layers are wrong "
        "(fits 50%, COMMIT-3, SLOT-2)"
    ) == str(finding.looks_like[0])


def test_a_snapshot_that_is_right_is_no_suspect(judge: Judge, decisions: Path) -> None:
    """What the next forward reads was never compacted, and the snapshot shows it compacted."""
    finding = first(judge, less_of(mutant("M039"), SNAPSHOT), decisions)

    assert ("round1", "logits") == (finding.place.point, finding.stage)
    assert (
        f"{SUSPECT}; the snapshot() after round0 has the right rows: this forward read others, or "
        "wrote over them (fits 50%, COMMIT-3, SLOT-2)"
    ) == str(finding.looks_like[0])
    assert finding.next_step.startswith("show the stages positions and mask to learn which")


def test_the_same_of_a_snapshot_that_was_judged(judge: Judge, small: Path) -> None:
    finding = first(judge, mutant("M039"), small)

    assert ("round1", "scores") == (finding.place.point, finding.stage)
    assert "the snapshot() after round0 has the right rows" in str(finding.looks_like[0])
    assert "would tell" not in str(finding.looks_like[0])


def test_of_a_model_too_large_to_compute_again_is_said_what_would_tell(
    judge: Judge, decisions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis_past, "_MOST_WORK", 0)

    finding = first(judge, engine("no_compaction", SNAPSHOT), decisions)

    assert (
        f"{SUSPECT}; what snapshot() showed after round0 was compared with nothing, as the case "
        "does not record the cache there (level decisions); the same case in a bundle that `kdtr "
        "golden` records, which keeps every stage, would tell (fits 50%, COMMIT-3, SLOT-2)"
    ) == str(finding.looks_like[0])
    assert (
        "suspect the cache that round0 left: it kept path 0-2-3, which belongs in slots 6..8 "
        "(COMMIT-1 and COMMIT-3); the stages c_kv and k_pe would tell"
    ) == finding.next_step


def test_without_a_snapshot_it_is_asked_for(judge: Judge, decisions: Path) -> None:
    finding = first(judge, engine("no_compaction"), decisions)

    assert str(finding.looks_like[0]).endswith("; snapshot() would tell")
    assert finding.next_step.endswith("; snapshot() and the stages c_kv and k_pe would tell")
