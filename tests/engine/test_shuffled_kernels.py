from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdtr.contract import DraftTree, ModelConfig
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.shuffled_kernels import ShuffledKernels

U = 2.0**-24
TREE = DraftTree(tokens=(4, 5, 6, 7), parents=(-1, 0, 0, 2))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


PRODUCTS: dict[str, tuple[Any, ...]] = {
    "linear": (numbers(4, 200), numbers(9, 200)),
    "absorb_query": (numbers(4, 3, 200), numbers(3, 7, 200)),
    "unabsorb_value": (numbers(4, 3, 200), numbers(3, 7, 200)),
    "router_scores": (numbers(4, 200) / 8, numbers(9, 200) / 8, "sigmoid"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_differ_in_bits_and_by_rounding_only(name: str) -> None:
    plain, shuffled = (
        getattr(kernels, name)(*PRODUCTS[name]) for kernels in (HostKernels(), ShuffledKernels(0))
    )

    assert plain.shape == shuffled.shape
    assert not np.array_equal(plain, shuffled)
    # 200 terms, each at most the product of the largest magnitudes, in two orders. A sigmoid's
    # slope is below 1.
    terms = 200 * np.prod([np.abs(x).max() for x in PRODUCTS[name][:2]])
    assert np.abs(plain - shuffled).max() <= 2 * 200 * U * terms


def logits(load: Callable[..., Any], **options: Any) -> np.ndarray:
    session = load(split_size=3, **options).open(max_len=40)
    session.prefill([1, 2, 3, 30, 31])
    session.set_root(TREE.tokens[0])
    found: np.ndarray = session.verify(TREE).logits
    return found


def test_a_seed_is_one_order(load: Callable[..., Any]) -> None:
    once, again, other = (logits(load, summation="shuffled", summation_seed=s) for s in (0, 0, 1))

    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)


def test_a_forward_stays_within_the_bound_of_float32(
    load: Callable[..., Any],
    small: ModelConfig,
    float32_bound: Callable[[np.ndarray, ModelConfig], float],
) -> None:
    plain = logits(load)
    bound = float32_bound(plain, small)

    for seed in range(4):
        shuffled = logits(load, summation="shuffled", summation_seed=seed)

        assert not np.array_equal(plain, shuffled)
        assert np.abs(plain - shuffled).max() <= 2 * bound  # each within one of the truth


def test_a_low_precision_sums_in_the_seeds_order_too(load: Callable[..., Any]) -> None:
    """Seen where float32 is kept; what is stored rarely lies so near a tie that it tells."""
    scores = []
    for summation in ("blas", "shuffled"):
        session = load(dtype="bfloat16", summation=summation).open(max_len=40)
        stages: dict[tuple[str, int | None], np.ndarray] = {}
        session.prefill(range(9), trace=lambda s, i, a, to=stages: to.update({(s, i): a.copy()}))
        scores.append(stages["router_scores", 1])

    assert not np.array_equal(*scores)


def test_splits_merge_in_the_seeds_order(load: Callable[..., Any]) -> None:
    """Twenty splits of one slot: their merge is the attention's only sum over slots."""
    session = load().open(max_len=20)
    session.prefill(range(20))
    cache, visibility = session._cache, Visibility(19, np.ones((1, 1), bool))
    q_latent, q_pe = numbers(1, 3, 10), numbers(1, 3, 6)

    plain, shuffled = (
        kernels.verify_attn(cache, 1, q_latent, q_pe, visibility, 0.3, split_size=1)
        for kernels in (HostKernels(), ShuffledKernels(0))
    )

    assert not np.array_equal(plain, shuffled)
    latents = HostKernels.read_rows(cache, 20)[1, :, :10]
    # An average of 20 latents: numerator and denominator take 20 roundings each, in two orders.
    assert np.abs(plain - shuffled).max() <= 2 * 2 * 20 * U * np.abs(latents).max()
