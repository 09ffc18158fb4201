"""Which choices of experts can have moved a row: earlier layers, and what it sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kdtr.conformance.alternatives_fit import Misfit
from kdtr.conformance.alternatives_reach import Reach
from kdtr.conformance.bundle import GoldenBundle
from kdtr.contract import STAGE, stage_order

LAYERS = 2
ORDER = [(stage.name, layer) for stage, layer in stage_order(LAYERS)]


@pytest.fixture(scope="module")
def reach(small: Path) -> Iterator[Reach]:
    """Case y: a prompt of 6 tokens, 1 and 2 under the root and 3 under 2, of which 0-2-3 stays."""
    bundle = GoldenBundle.open(small)
    case = next(case for case in bundle.cases if case.inputs.alias == "y")
    yield Reach(case, LAYERS)
    bundle.close()


def misfit(point: str, stage: str, layer: int | None, *index: int) -> Misfit:
    return Misfit(point, ORDER.index((stage, layer)), STAGE[stage], layer, index, 2.0)


@pytest.mark.parametrize(
    ("place", "at", "reached"),
    [
        (("round0", 1, 2), misfit("round0", "expert_weights", 1, 2), True),
        (("round0", 1, 2), misfit("round0", "expert_ids", 1, 2), False),
        (("round0", 1, 2), misfit("round0", "logits", None, 2), True),
        (("round0", 1, 2), misfit("round0", "logits", None, 3), False),  # no layer to read it in
        (("round0", 0, 2), misfit("round0", "scores", 1, 3), True),
        (("round0", 0, 2), misfit("round0", "k_pe", 1, 3), False),
        (("round0", 0, 2), misfit("round0", "logits", None, 1), False),  # siblings
        (("round0", 0, 3), misfit("round0", "logits", None, 2), False),  # above
        (("chunk0", 0, 1), misfit("round0", "logits", None, 0), True),
        (("chunk0", 1, 1), misfit("round0", "logits", None, 0), False),
        (("chunk0", 0, 5), misfit("chunk0", "logits", None, 4), False),  # later in the prompt
        (("round0", 0, 1), misfit("round1", "logits", None, 0), False),  # rejected
        (("round0", 0, 3), misfit("round1", "logits", None, 0), True),
        (("round1", 0, 0), misfit("round0", "logits", None, 3), False),  # later
        (("round0", 0, 2), misfit("round0", "cache_c_kv", None, 1, 7), True),  # slot 7: row 2
        (("round0", 0, 2), misfit("round0", "cache_c_kv", None, 0, 7), False),
        (("round0", 0, 2), misfit("round0", "cache_c_kv", None, 1, 8), False),
        (("round0", 1, 3), misfit("round0", "bonus", None), True),  # of no row: of any
    ],
)
def test_a_choice_reaches(
    reach: Reach, place: tuple[str, int, int], at: Misfit, reached: bool
) -> None:
    assert reached == reach.reaches(place, at)
