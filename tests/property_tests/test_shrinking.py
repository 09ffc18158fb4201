"""Eight planted faults: what Hypothesis shrinks to is as small as what brute force finds first."""

from __future__ import annotations

import pytest
from played_size import Size
from shrinking_faults import FAULTS
from shrinking_page import PAGE, SEEDS, find, page

# nodes, path, prompt, chunks
MINIMA = {
    "causal_by_index": Size(3, 0, 0, 0),
    "position_by_index": Size(3, 0, 0, 0),
    "descending_compaction": Size(4, 3, 0, 0),
    "missing_root_row": Size(2, 2, 0, 0),
    "stale_row_visible": Size(3, 0, 0, 0),
    "wrong_sibling_taken": Size(3, 2, 0, 0),
    "chunk_edge_low": Size(0, 0, 2, 2),
    "page_edge_low": Size(0, 0, 4, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_hypothesis_shrinks_to_the_first_size_at_which_the_fault_shows(fault: str) -> None:
    found = find(fault)

    assert MINIMA[fault] == found.enumerated.minimum, found.enumerated.raised
    assert [MINIMA[fault]] * SEEDS == found.sizes, [
        failed and failed[1] for failed in found.failures
    ]


def test_descending_compaction_needs_one_tree() -> None:
    """Of the trees of four nodes, in any order and with any path: (-1, 0, 0, 2) and 0, 2, 3."""
    found = find("descending_compaction")

    shown = [found.enumerated.smallest, *found.shrunk]

    for example in shown:
        assert example is not None
        played = [dict(session.events) for session in example.played]
        (asked,) = [events for events in played if "verify" in events]
        assert (-1, 0, 0, 2) == asked["verify"].parents
        assert (0, 2, 3) == asked["commit"].path


def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page([find(fault) for fault in FAULTS])
