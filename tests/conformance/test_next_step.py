"""What a finding says to do next, of real faults in engines that show little."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import planted_faults
import pytest

from kdtr.conformance import Finding, GateResult, GoldenBundle
from kdtr.contract import TRACED

Judge = Callable[..., GateResult]

MINIMAL = ("prefill", "verify", "commit")
LAYOUT = "show the stages positions and mask to learn which: a wrong position or mask is first seen"


def engine(fault: str, verbs: Iterable[str] = MINIMAL, stages: Iterable[str] = ()) -> Any:
    """The faulty engine, of which no more is offered and shown than this."""
    faulty = planted_faults.make_engine(fault)
    info = replace(faulty.info, verbs=frozenset(verbs), stages=frozenset(stages))

    def load(source: Any) -> Any:
        model = faulty.load(source)
        return SimpleNamespace(
            open=lambda max_len: Showing(model.open(max_len=max_len), info.stages),
            close=model.close,
        )

    return SimpleNamespace(info=info, load=load)


class Showing:
    """A session that traces these stages alone."""

    def __init__(self, session: Any, stages: frozenset[str]) -> None:
        self._session = session
        self._stages = stages

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session, name)
        if not callable(value):
            return value

        def verb(*args: Any, trace: Any = None, **kwargs: Any) -> Any:
            if trace is not None:
                kwargs["trace"] = lambda stage, layer, array: (
                    trace(stage, layer, array) if stage in self._stages else None
                )
            return value(*args, **kwargs)

        return verb


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


def test_scores_come_after_the_layout(judge: Judge, tiny: Path) -> None:
    shows = engine("scale_from_latent", stages=["positions", "mask"])

    finding = first(judge, shows, tiny, "y-tree")

    assert ("chunk0", "root") == (finding.place.point, finding.stage)
    assert "show the stage scores of prefill to learn in which layer it begins" == finding.next_step


def test_the_fault_that_is_shown_needs_no_next_step(judge: Judge, tiny: Path) -> None:
    shows = engine("sibling_visible", stages=["positions", "mask"])

    assert "" == first(judge, shows, tiny, "y-tree").next_step
    assert "" == first(judge, planted_faults.make_engine("root_low"), tiny, "y-tree").next_step


def test_a_wrong_walk_over_right_targets_is_no_fault_of_the_layout(
    judge: Judge, tiny: Path
) -> None:
    finding = first(judge, engine("first_child_only", [*MINIMAL, "accept"]), tiny, "y-tree")

    assert ("path", "") == (finding.stage, finding.next_step)


def test_the_fused_path_shows_its_targets_to_no_one(judge: Judge, tiny: Path) -> None:
    shows = engine("position_by_index", ["prefill", "round"])

    finding = first(judge, shows, tiny, "y-tree", "round")

    assert finding.stage in ("path", "bonus")
    assert finding.next_step == f"{LAYOUT} there"


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


def test_a_cache_of_one_row(judge: Judge, tiny: Path) -> None:
    shows = engine("lone_root_not_written", ["prefill", "decode"])

    # The row that is missing is the root's own: in round0 already nothing is right.
    finding = first(judge, shows, tiny, "ar", "decode")

    assert "round0" != finding.place.point or LAYOUT in finding.next_step


def test_a_cache_that_is_shown_is_no_suspect(judge: Judge, tiny: Path) -> None:
    finding = first(judge, engine("no_compaction", [*MINIMAL, "snapshot"]), tiny, "y-tree")

    assert ("cache_c_kv", "") == (finding.stage, finding.next_step)


def test_a_finding_tells_how_many_rows_lead_to_it(judge: Judge, tiny: Path) -> None:
    bundle = GoldenBundle.open(tiny)
    y_tree = next(case.inputs for case in bundle.cases if case.inputs.alias == "y-tree")
    bundle.close()

    assert 13 + 4 == first(judge, engine("root_low"), tiny, "y-tree").n_rows
    assert 13 + 4 + 4 == first(judge, engine("no_compaction"), tiny, "y-tree").n_rows
    assert 13 == first(judge, engine("scale_from_latent"), tiny, "y-tree").n_rows
    assert 13 == len(y_tree.chunks[0])
