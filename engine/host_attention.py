"""Host kernels of absorb-form attention over the paged latent cache (MLA-2, MLA-3, MASK-3).

Split-KV, as on a device: each split of split_size slots leaves a maximum, a sum and an
accumulator per row and head, and one merge in ascending order of the splits joins them. Masked
slots are cut, never multiplied by zero: 0 * NaN is NaN.
"""

# NumPy types the operators of a plain ndarray as Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kdtr.engine.kernel_set import Visibility
from kdtr.engine.paging import PagedCache, physical_rows


class Partial(NamedTuple):
    """What one split contributes; a row that sees nothing of it keeps (-inf, 0, 0).

    top   [n, h]     largest score
    norm  [n, h]     sum of exp(score - top)
    acc   [n, h, c]  sum of exp(score - top) c_kv
    """

    top: np.ndarray
    norm: np.ndarray
    acc: np.ndarray


def rotary_angles(
    positions: np.ndarray, inverse_frequencies: np.ndarray, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """positions [n], inverse_frequencies [r/2] -> cos, sin [n, r/2] float32 (MLA-5)."""
    angles = positions.astype(np.float64)[:, None] * inverse_frequencies  # [n, r/2]
    return (
        (np.cos(angles) * factor).astype(np.float32),
        (np.sin(angles) * factor).astype(np.float32),
    )


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [n, h, r], cos and sin [n, r/2] -> [n, h, r], half-split (MLA-7)."""
    first, second = np.split(x, 2, axis=-1)  # [n, h, r/2] each
    cos, sin = cos[:, None, :], sin[:, None, :]  # [n, 1, r/2]: every head turns alike
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def append_latents(
    cache: PagedCache, layer: int, slots: np.ndarray, c_kv: np.ndarray, k_pe: np.ndarray
) -> None:
    """slots [n], c_kv [n, c], k_pe [n, r]: row i to slot slots[i] of the layer (SLOT-1)."""
    rows = physical_rows(cache.page_table, cache.page_size, slots)  # [n]
    cache.rows[layer, rows] = np.concatenate([c_kv, k_pe], axis=-1)  # [n, c + r]


def absorb_query(q_nope: np.ndarray, w_kc: np.ndarray) -> np.ndarray:
    """q_nope [n, h, d], w_kc [h, c, d] -> [n, h, c]."""
    return (q_nope.transpose(1, 0, 2) @ w_kc.transpose(0, 2, 1)).transpose(1, 0, 2)


def unabsorb_value(out_latent: np.ndarray, w_vc: np.ndarray) -> np.ndarray:
    """out_latent [n, h, c], w_vc [h, v, c] -> [n, h v]."""
    per_head = out_latent.transpose(1, 0, 2) @ w_vc.transpose(0, 2, 1)  # [h, n, v]
    return per_head.transpose(1, 0, 2).reshape(len(out_latent), -1)


def verify_attn(
    cache: PagedCache,
    layer: int,
    q_latent: np.ndarray,
    q_pe: np.ndarray,
    visibility: Visibility,
    scale: float,
    split_size: int,
    scores: np.ndarray | None = None,
) -> np.ndarray:
    """q_latent [n, h, c], q_pe [n, h, r] -> out_latent [n, h, c]; scores [n, h, s] or None."""
    return merge_splits(
        attend_splits(cache, layer, q_latent, q_pe, visibility, scale, split_size, scores)
    )


def new_scores(n: int, n_heads: int, visibility: Visibility) -> np.ndarray:
    """[n, h, s] float32, all -inf."""
    return np.full((n, n_heads, visibility.n_slots), -np.inf, np.float32)


def full_mask(visibility: Visibility) -> np.ndarray:
    """[n, s] bool: the open prefix beside the block that the attention consults."""
    block = visibility.block
    return np.concatenate([np.ones((len(block), visibility.open_len), bool), block], axis=1)


def attend_splits(
    cache: PagedCache,
    layer: int,
    q_latent: np.ndarray,
    q_pe: np.ndarray,
    visibility: Visibility,
    scale: float,
    split_size: int,
    scores: np.ndarray | None,
) -> list[Partial]:
    """q_latent [n, h, c], q_pe [n, h, r] -> every split's contribution, in ascending order."""
    query = np.concatenate([q_latent, q_pe], axis=-1)  # [n, h, c + r], as the cached rows
    return [
        attend_split(cache, layer, query, visibility, first, end, scale, scores)
        for first, end in splits(visibility.n_slots, split_size)
    ]


def splits(n_slots: int, split_size: int) -> Iterator[tuple[int, int]]:
    """(first, end) of every split of slots 0..n_slots-1; the last may be short."""
    for first in range(0, n_slots, split_size):
        yield first, min(first + split_size, n_slots)


def attend_split(
    cache: PagedCache,
    layer: int,
    query: np.ndarray,
    visibility: Visibility,
    first: int,
    end: int,
    scale: float,
    scores: np.ndarray | None,
) -> Partial:
    """Slots first..end-1 for query [n, h, c + r]; rows that see the same slots share a product."""
    n, h, row_len = query.shape
    c = cache.latent_len
    partial = Partial(
        np.full((n, h), -np.inf, np.float32),
        np.zeros((n, h), np.float32),
        np.zeros((n, h, c), np.float32),
    )
    for group, slots in _groups(visibility, n, first, end):  # below, n and s are the group's own
        rows = physical_rows(cache.page_table, cache.page_size, slots)  # [s]
        keys = cache.rows[layer, rows]  # [s, c + r]   a gather: nothing else is read
        raw = query[group].reshape(-1, row_len) @ keys.T  # [n h, s]
        scaled = (raw * np.float32(scale)).reshape(len(group), h, len(slots))  # [n, h, s]
        top = scaled.max(axis=-1)  # [n, h]
        p = np.exp(scaled - top[..., None])  # [n, h, s]
        partial.top[group] = top
        partial.norm[group] = p.sum(axis=-1)
        partial.acc[group] = (p.reshape(-1, len(slots)) @ keys[:, :c]).reshape(-1, h, c)
        if scores is not None:
            scores[np.ix_(group, np.arange(h), slots)] = scaled
    return partial


def merge_splits(partials: list[Partial]) -> np.ndarray:
    """The splits' softmax as one, summed in the order of the list (NUM-4) -> [n, h, c].

    Every row sees itself (MASK-1), so the overall maximum is finite and an empty split's weight
    is exp(-inf) = 0.
    """
    top = np.maximum.reduce([partial.top for partial in partials])  # [n, h]
    norm = np.zeros_like(top)
    acc = np.zeros_like(partials[0].acc)  # [n, h, c]
    for partial in partials:
        weight = np.exp(partial.top - top)  # [n, h]
        norm += weight * partial.norm
        acc += weight[..., None] * partial.acc
    return acc / norm[..., None]


def _groups(
    visibility: Visibility, n: int, first: int, end: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows, slots) for the rows that see the same, nonempty choice of slots first..end-1."""
    slots = np.arange(first, end)
    if end <= visibility.open_len:
        yield np.arange(n), slots
        return
    seen = np.ones((n, len(slots)), bool)
    masked = max(first, visibility.open_len)  # the first slot that the block decides
    columns = slice(masked - visibility.open_len, end - visibility.open_len)
    seen[:, masked - first :] = visibility.block[:, columns]
    alike: dict[bytes, list[int]] = {}  # rows by what they see
    for i, row in enumerate(seen):
        alike.setdefault(row.tobytes(), []).append(i)
    for rows in alike.values():
        if seen[rows[0]].any():
            yield np.array(rows), slots[seen[rows[0]]]
