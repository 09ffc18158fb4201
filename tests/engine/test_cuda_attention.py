"""How launches of the general attention are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kdtr.engine.cuda_attention import plain_rows_at_once, plain_split_size


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


@given(split_size=st.integers(1, 1 << 40), max_slots=st.integers(1, 1 << 28))
def test_the_plain_kernels_splits_fit_a_grid(split_size: int, max_slots: int) -> None:
    found = plain_split_size(split_size, max_slots)

    assert 1 <= found <= max_slots
    assert -(-max_slots // found) <= 65_535
    assert found in (split_size, max_slots) or found == -(-max_slots // 65_535) > split_size
