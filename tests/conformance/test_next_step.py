"""What a finding says to do next, of real faults in engines that show little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted_faults
import pytest
from hostile_engines import Hostile, changing
from showing_less import MINIMAL, engine

from kdtr.conformance import Finding, GateResult, GoldenBundle
from kdtr.contract import TRACED, Verified

Judge = Callable[..., GateResult]

LAYOUT = "show the stages positions and mask to learn which: a wrong position or mask is first seen"


def first(judge: Judge, engine: Any, bundle: Path, case: str, mode: str = "stepwise") -> Finding:
    (finding,) = judge(engine, bundle, case, modes=[mode]).findings
    return finding


@pytest.mark.parametrize("fault", ["position_by_index", "sibling_visible", "root_low"])
def test_a_layout_that_is_not_shown(judge: Judge, tiny: Path, fault: str) -> None:
    finding = first(judge, engine(fault), tiny, "y-tree")

    assert ("round0", "logits") == (finding.place.point, finding.stage)
    assert finding.next_step == f"{LAYOUT} there"


def test_only_what_is_missing_is_asked_for(judge: Judge, tiny: Path) -> None:
    finding = first(judge, engine("sibling_visible", stages=["positions"]), tiny, "y-tree")

    assert (
        "show the stage mask to learn which: a wrong mask is first seen there" == finding.next_step
    )


@pytest.mark.parametrize(
    ("fault", "point", "of_prefill"),
    [("scale_from_latent", "round0", ""), ("softmax_router", "chunk0", " of prefill")],
)
def test_scores_come_after_the_layout(
    judge: Judge, tiny: Path, fault: str, point: str, of_prefill: str
) -> None:
    finding = first(judge, engine(fault, stages=["positions", "mask"]), tiny, "y-tree")

    assert point == finding.place.point
    assert (
        f"show the stage scores{of_prefill} to learn in which layer it begins" == finding.next_step
    )


def test_the_fault_that_is_shown_needs_no_next_step(judge: Judge, tiny: Path) -> None:
    shows = engine("sibling_visible", stages=["positions", "mask"])

    assert "" == first(judge, shows, tiny, "y-tree").next_step
    assert "" == first(judge, planted_faults.make_engine("root_low"), tiny, "y-tree").next_step


def test_a_wrong_walk_over_right_targets_is_no_fault_of_the_layout(
    judge: Judge, tiny: Path
) -> None:
    finding = first(judge, engine("first_child_only", [*MINIMAL, "accept"]), tiny, "y-tree")

    assert ("path", "") == (finding.stage, finding.next_step)


def test_of_the_fused_path_the_targets_are_asked_for_too(judge: Judge, tiny: Path) -> None:
    shows = engine("visibility_transposed", ["prefill", "round"])

    finding = first(judge, shows, tiny, "y-tree", "round")

    assert ("round0", "path") == (finding.place.point, finding.stage)
    assert (
        "show the stages positions, mask and targets to learn which: a wrong position, mask or "
        "walk is first seen there"
    ) == finding.next_step


def test_decisions_alone_accuse_no_cache(judge: Judge, tiny: Path) -> None:
    """A wrong bonus in round1, and the cache is right."""
    finding = first(
        judge, engine("bonus_of_last_row", ["prefill", "round"]), tiny, "y-tree", "round"
    )

    assert ("round1", "bonus") == (finding.place.point, finding.stage)
    assert "cache" not in finding.next_step


def test_targets_may_be_wrong_over_right_logits(judge: Judge, small: Path) -> None:
    def wrong(verified: Verified) -> Verified:
        assert verified.logits is not None
        worst = np.asarray(verified.logits).argmin(axis=-1)
        return Verified(verified.logits, tuple(worst.tolist()))

    def info(honest: Any) -> Any:
        return replace(honest, verbs=frozenset(MINIMAL), stages=frozenset())

    finding = first(judge, Hostile({"verify": changing(wrong)}, info=info), small, "y")

    assert ("round0", "targets") == (finding.place.point, finding.stage)
    assert (
        "if verify() returned logits they were right, and the argmax is wrong; if not, return "
        "them, and show the stages positions and mask"
    ) == finding.next_step


def suspect(path: str, slots: str, would_tell: str) -> str:
    return (
        f"suspect the cache that round0 left: it kept path {path}, which belongs in {slots} "
        f"(COMMIT-1 and COMMIT-3); {would_tell} would tell"
    )


@pytest.mark.parametrize("stages", [(), ("positions", "mask")])
@pytest.mark.parametrize("fault", ["no_compaction", "last_move_skipped"])
def test_a_cache_that_is_not_shown(
    judge: Judge, tiny: Path, fault: str, stages: tuple[str, ...]
) -> None:
    """The round after is the first to read what commit left: its row 0 sees nothing else."""
    finding = first(judge, engine(fault, stages=stages), tiny, "y-tree")

    assert ("round1", "logits") == (finding.place.point, finding.stage)
    assert finding.where.startswith("row 0 ")
    assert suspect("0-2-3", "slots 13..15", "snapshot()") == finding.next_step
    assert {"COMMIT-1", "COMMIT-3"} <= set(finding.rules)


def test_scores_of_row_0_suspect_the_cache_too(judge: Judge, tiny: Path) -> None:
    finding = first(judge, engine("no_compaction", stages=TRACED, verbs=MINIMAL), tiny, "y-tree")

    assert "scores" == finding.stage
    assert suspect("0-2-3", "slots 13..15", "snapshot()") == finding.next_step


def test_a_cache_that_is_shown_is_no_suspect(judge: Judge, tiny: Path) -> None:
    finding = first(judge, engine("no_compaction", [*MINIMAL, "snapshot"]), tiny, "y-tree")

    assert ("cache_c_kv", "") == (finding.stage, finding.next_step)


def test_a_finding_tells_how_many_rows_lead_to_it(judge: Judge, tiny: Path) -> None:
    bundle = GoldenBundle.open(tiny)
    y_tree = next(case.inputs for case in bundle.cases if case.inputs.alias == "y-tree")
    bundle.close()

    assert 13 + 4 == first(judge, engine("root_low"), tiny, "y-tree").n_rows
    assert 13 + 4 + 4 == first(judge, engine("no_compaction"), tiny, "y-tree").n_rows
    assert 13 == first(judge, engine("softmax_router"), tiny, "y-tree").n_rows
    assert 13 == len(y_tree.chunks[0])
