"""What was not shown, grouped by what would show it."""

from __future__ import annotations

import pytest

from kdtr.conformance.unshown import unshown_lines
from kdtr.contract import STAGES

EVERYTHING = {stage.name for stage in STAGES}


def test_everything_in_a_few_lines_the_most_telling_first() -> None:
    lines = unshown_lines(EVERYTHING)

    assert [
        "  positions, mask and 3 more    trace       a wrong layout of the tree",
        "  scores and 13 more            trace       the layer, and what in it",
        "  the cache                     snapshot()  what commit left there",
        "  logits                        trace       where no verb returns them",
        "  path, bonus                   accept()    a wrong walk",
        "  targets and 2 more            trace       round()'s decisions and moves",
        "  best-first trees              build()     TREE-3 and TREE-4",
    ] == lines


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_every_stage_is_in_one_group(name: str) -> None:
    (line,) = unshown_lines([name])

    assert len(line) <= 80


def test_nothing_missing_is_no_line() -> None:
    assert [] == unshown_lines([])


def test_of_a_group_that_is_shown_in_part_the_rest_is_named() -> None:
    assert ["  mask                          trace       a wrong layout of the tree"] == (
        unshown_lines(["mask"])
    )
    assert ["  parents, slots and 1 more     trace       a wrong layout of the tree"] == (
        unshown_lines(["parents", "slots", "tokens"])
    )
