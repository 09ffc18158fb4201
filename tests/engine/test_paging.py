from __future__ import annotations

import numpy as np
import pytest

from kdtr.contract import CacheError, ModelConfig
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.paging import PagedCache, physical_rows


@pytest.fixture
def cache(small: ModelConfig) -> PagedCache:
    return PagedCache(HostKernels(), small, capacity=10, page_size=4)


def test_neighbouring_pages_are_not_neighbours(cache: PagedCache) -> None:
    cache.map_slots(10)

    rows = physical_rows(cache.page_table, 4, np.arange(10))

    assert [8, 9, 10, 11, 4, 5, 6, 7, 0, 1] == rows.tolist()


def test_a_page_is_nan_when_it_is_handed_out(cache: PagedCache) -> None:
    cache.rows[:] = 7.0  # what an earlier user left

    cache.map_slots(5)

    assert np.isnan(cache.rows[:, 4:]).all()
    assert (cache.rows[:, :4] == 7.0).all()  # not handed out yet


def test_mapped_pages_keep_place_and_content(cache: PagedCache) -> None:
    cache.map_slots(3)
    cache.rows[:, 8:12] = 1.0

    cache.map_slots(4)
    cache.map_slots(9)

    assert [8, 4, 0] == physical_rows(cache.page_table, 4, np.array([0, 4, 8])).tolist()
    assert (cache.rows[:, 8:12] == 1.0).all()


def test_a_slot_without_a_page_cannot_be_addressed(cache: PagedCache) -> None:
    cache.map_slots(4)

    with pytest.raises(AssertionError, match="without a page"):
        physical_rows(cache.page_table, 4, np.array([3, 4]))


def test_pages_taken_back_are_nan_again(cache: PagedCache) -> None:
    cache.map_slots(10)
    cache.rows[:] = 1.0

    cache.unmap_all()
    cache.map_slots(1)

    assert np.isnan(cache.rows[:, 8:12]).all()


def test_room_is_legal_up_to_equality(cache: PagedCache) -> None:
    """Ten slots, although the third page has two more rows (SLOT-3)."""
    cache.check_room("verify", 6, 4)

    with pytest.raises(CacheError) as refusal:
        cache.check_room("verify", 7, 4)

    assert str(refusal.value) == (
        "verify of 4 rows at committed_len 7 needs 11 slots, the session has 10; "
        "open it with max_len >= 11"
    )


def test_a_page_is_never_larger_than_the_session(small: ModelConfig) -> None:
    cache = PagedCache(HostKernels(), small, capacity=5, page_size=10**12)

    cache.map_slots(5)

    assert 5 == cache.rows.shape[1]


def test_an_interrupt_before_the_table_is_on_the_device_is_made_good(
    small: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is mapped when kernels can find it."""
    kernels = HostKernels()
    cache = PagedCache(kernels, small, capacity=10, page_size=4)
    cache.map_slots(4)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "overwrite", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            cache.map_slots(8)
    cache.map_slots(8)

    assert [8, 4] == physical_rows(cache.page_table, 4, np.array([0, 4])).tolist()
