"""LSE: the merge of splits, rows that see nothing, numbers that nobody may read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import e, log2
from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import physical, wrap

SPLIT_MERGES = MutantClass("split merges")


@SPLIT_MERGES.mutant("M093", "LSE-1", breaks="MLA-3", first_seen_at="out_latent", needs="split")
def weights_in_the_wrong_base(engine: Any) -> None:
    """The logarithm of a split's sum is multiplied by log2(e) before the merge."""

    def change(partials: list[Any]) -> list[Any]:
        out = []
        for one in partials:
            with np.errstate(divide="ignore", invalid="ignore"):
                lse = np.float32(log2(e)) * (one.top + np.log(one.norm))
                mean = np.where(one.norm[..., None] > 0, one.acc / one.norm[..., None], 0)
            seen = (one.norm > 0).astype(np.float32)
            out.append(one._replace(top=lse, norm=seen, acc=mean))
        return out

    with_splits(engine, change)


@SPLIT_MERGES.mutant("M095", "LSE-3", breaks="MASK-3", first_seen_at="out_latent", needs="split")
def empty_split_is_infinite(engine: Any) -> None:
    """A split of which a row sees nothing counts with +inf, not with -inf."""

    def change(partials: list[Any]) -> list[Any]:
        return [one._replace(top=np.where(one.norm > 0, one.top, np.inf)) for one in partials]

    with_splits(engine, change)


@SPLIT_MERGES.mutant("M097", "LSE-5", breaks="MASK-3", first_seen_at="out_latent", needs="paged")
def stale_times_zero(engine: Any) -> None:
    """All slots of the pages are read, those behind L + M weighed with 0."""

    def verify_attn(
        original: Any, cache: Any, layer: int, q: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        out = original(cache, layer, q, q_pe, seen, *rest)
        last = (seen.n_slots - 1) // cache.page_size * cache.page_size + cache.page_size
        slots = [physical(cache, slot) for slot in range(seen.n_slots, last)]
        return out + 0 * cache.rows[layer, slots, : out.shape[-1]].sum(axis=0)

    wrap(engine, verify_attn=verify_attn)


# On the host a partial is a new array: none can be left from before.
SPLIT_MERGES.in_cuda(
    "M099", "LSE-7", "empty_split_is_not_written", "the partial of an empty split is not written"
)


@SPLIT_MERGES.mutant("M100", "LSE-8", breaks="MLA-3", first_seen_at="out_latent", needs="split")
def lone_split_without_sum(engine: Any) -> None:
    """The sum of a split is written only where there are several: a lone one finds a 1."""

    def change(partials: list[Any]) -> list[Any]:
        if len(partials) > 1:
            return partials
        return [one._replace(norm=np.ones_like(one.norm)) for one in partials]

    with_splits(engine, change)


def with_splits(engine: Any, change: Callable[[list[Any]], list[Any]]) -> None:
    """The engine's own splits are merged by its own merge, as change(partials)."""

    def verify_attn(original: Any, *args: Any) -> Any:
        steps: Any = inspect.getmodule(original)
        with np.errstate(invalid="ignore"):
            return steps.merge_splits(change(steps.attend_splits(*args)))

    wrap(engine, verify_attn=verify_attn)
