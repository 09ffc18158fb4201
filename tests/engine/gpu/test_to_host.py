"""What comes to the host: alone, or with others for one wait."""

from __future__ import annotations

import numpy as np
from cuda_pair import Pair


def test_together_is_as_alone(pair: Pair) -> None:
    """Integers, numbers of the storage dtype, a strided view, one element, and none."""
    numbers, on_device = pair.numbers(5, 7)
    ids = pair.cuda.upload(np.arange(40) - 1)
    arrays = ids, on_device, ids[1::3], on_device[:, 2:4], ids[:1], ids[:0]
    expected = [pair.cuda.to_host(array) for array in arrays]

    found = pair.cuda.all_to_host(*arrays)

    assert len(arrays) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(numbers, found[1])


def test_each_copy_is_the_callers_own(pair: Pair) -> None:
    """What the device and later copies do does not change it."""
    ids = pair.cuda.upload(np.arange(4))

    one, other = pair.cuda.all_to_host(ids, ids)
    one[0] = 9
    pair.cuda.overwrite(ids, np.full(4, 7))
    later = [pair.cuda.all_to_host(ids) for _ in range(50)]

    assert ([9, 1, 2, 3], [0, 1, 2, 3]) == (one.tolist(), other.tolist())
    assert all([7] * 4 == copy.tolist() for (copy,) in later)


def test_it_waits_for_what_computes_it(pair: Pair) -> None:
    """Work of some milliseconds ahead of it on the stream."""
    rows, on_device = pair.numbers(64, 2048, scale=0.01)
    weight, weight_on_device = pair.numbers(2048, 2048, scale=0.01)
    for _ in range(200):
        product = pair.cuda.linear(on_device, weight_on_device)

    (found,) = pair.cuda.all_to_host(product)

    np.testing.assert_array_equal(pair.cuda.to_host(product), found)
    pair.close(
        pair.host.linear(rows, weight), product, float((abs(rows) @ abs(weight).T).max()), 2048
    )
