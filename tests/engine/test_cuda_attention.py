"""How launches of the general attention are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kdtr.engine.cuda_attention import plain_rows_at_once


@given(
    n=st.integers(1, 10_000_000),
    splits=st.integers(1, 100_000),
    h=st.integers(1, 256),
    c=st.integers(1, 1024),
)
def test_the_plain_kernel_is_cut_to_a_grid_and_to_its_memory(
    n: int, splits: int, h: int, c: int
) -> None:
    rows = plain_rows_at_once(n, splits, h, c)

    assert 1 <= rows <= min(n, 65_535)
    assert rows == 1 or 4 * rows * splits * h * c <= 1 << 28
