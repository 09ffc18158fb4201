"""What the laws compare by: storing alone is part of a bound, and near ties are excused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.conformance.tolerance import UNIT_ROUNDOFF, row_bound
from kdtr.contract import STAGE, NumericProfile
from kdtr.property_tests.judge import Judge
from kdtr.property_tests.rounding import stored_once
from kdtr.property_tests.strategies import Scene, SmallModel, scenes
from kdtr.property_tests.subject import HOST, Answer, load_subject
from kdtr.property_tests.test_poison_laws import below_the_root


@pytest.mark.parametrize("bounds", [1, 2])
def test_storing_once_is_never_more_than_the_bounds(bounds: int) -> None:
    stage, row = STAGE["logits"], np.array([[3.0, -5.0, 0.5]])
    silent = row_bound(row, np.zeros((1, 1)), stage.row_axes, UNIT_ROUNDOFF["float32"])

    once = stored_once(NumericProfile(), stage, row, bounds)

    assert (once <= bounds * silent).all()


NAN = Answer(np.full(37, np.nan, np.float32), 0)


COMPARISONS: dict[str, Callable[[Judge], None]] = {
    "answer": lambda judge: judge.answer("row", NAN, NAN, history=[0]),
    "same_answers": lambda judge: judge.same_answers("verify", [NAN], [NAN]),
}


@pytest.mark.parametrize("way", COMPARISONS)
def test_nan_on_both_sides_is_not_the_same(way: str) -> None:
    judge = Judge(load_subject("host", HOST), SmallModel())

    with pytest.raises(AssertionError, match="numbers expected to be NaN: expected 0, got 37"):
        COMPARISONS[way](judge)


@settings(max_examples=200)
@given(scene=scenes(), data=st.data())
def test_the_poison_is_never_the_root(scene: Scene, data: st.DataObject) -> None:
    assert scene.tree.tokens[0] != data.draw(below_the_root(scene))
