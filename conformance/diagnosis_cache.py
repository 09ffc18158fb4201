"""Wrong rows in the cache: what commits leave, what they round, and what is written over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kdtr.conformance.diagnosis_past import Past, wrong_commits
from kdtr.conformance.diagnosis_scene import FITS, Guess, Hint, Ranked, Scene, weigh

_SAME = 1e-6  # of the largest number: copies are exact, keys that are turned once more are not
_CACHE = ("cache_c_kv", "cache_k_pe")


def hints(scene: Scene, past: Past) -> Iterator[Ranked | None]:
    """Recognisers of the stages that show the cache."""
    name = scene.stage.name
    if name in _CACHE and past.is_small and scene.same_form:
        yield from (weigh(scene, guess) for guess in cache_guesses(scene, past))
        yield _where_in_the_cache(scene)
    if name == "copied" and past.is_small:
        yield from _wrong_copies(scene, past)
    if name == "untouched":
        yield _touched(scene)


def cache_guesses(scene: Scene, past: Past) -> Iterator[Guess]:
    """What wrong commits leave in the cache [l, t, c] or [l, t, r]."""
    commit = past.commit(past.rows_after(past.fresh()))
    c, t = scene.config.kv_lora_rank, scene.expected.shape[1]
    columns = slice(None, c) if scene.stage.name == "cache_c_kv" else slice(c, None)
    told = _told_of(scene)
    for wrong in wrong_commits():
        rows = wrong.keep(commit)[:, :t]
        if _agrees_with_the_other(scene, rows):
            yield Guess(wrong.says + told, wrong.rules, rows[..., columns], wrong.specific)


def _agrees_with_the_other(scene: Scene, rows: np.ndarray) -> bool:
    """Whether the guess holds for the other half of the rows too, where that was shown."""
    c = scene.config.kv_lora_rank
    is_latent = scene.stage.name == "cache_c_kv"
    name, columns = ("cache_k_pe", slice(c, None)) if is_latent else ("cache_c_kv", slice(c))
    other, guessed = scene.seen.get((name, None)), rows[..., columns]
    if other is None or other.shape != guessed.shape or scene.bound is None:
        return True
    scale = np.abs(scene.expected).max(initial=0.0, where=np.isfinite(scene.expected))
    relative = float(scene.bound.max(initial=0.0)) / scale if scale > 0 else 0.0
    numbers = other.astype(np.float64)
    finite = np.isfinite(guessed)
    tolerance = 4 * relative * np.abs(guessed).max(initial=0.0, where=finite)
    error = np.abs(np.where(finite, numbers, 0.0) - np.where(finite, guessed, 0.0))
    right = np.where(finite, error <= tolerance, ~np.isfinite(numbers))
    return float(right.mean()) >= FITS


def _told_of(scene: Scene) -> str:
    if scene.is_chunk:
        return ""
    path = "-".join(str(node) for node in scene.path)
    return f"; L = {scene.committed_len}, path {path}"


def _where_in_the_cache(scene: Scene) -> Ranked | None:
    """Layers and slots of what is wrong."""
    layers, slots = (np.flatnonzero(scene.differs.any(axis=axis)) for axis in ((1, 2), (0, 2)))
    if not len(slots):
        return None
    length, n_layers = scene.committed_len, scene.expected.shape[0]
    which = "all layers" if len(layers) == n_layers else f"layers {_span(layers)}"
    if slots[0] < length:
        says = f"rows of earlier rounds are wrong: slots {_span(slots)} in {which}, L = {length}"
        return Ranked(Hint(says, ("COMMIT-3", "SLOT-2"), 0.5), 0)
    says = f"of the rows kept, slots {_span(slots)} are wrong in {which}"
    return Ranked(Hint(says, ("COMMIT-1",), 0.5), 0)


def _span(numbers: np.ndarray) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    whole = len(numbers) == numbers[-1] - numbers[0] + 1
    return f"{numbers[0]}..{numbers[-1]}" if whole else ", ".join(str(i) for i in numbers[:6])


def _wrong_copies(scene: Scene, past: Past) -> Iterator[Ranked | None]:
    """What the cache holds of the rows that the forward showed: a wrong commit of just these."""
    c, length, a = scene.config.kv_lora_rank, scene.committed_len, len(scene.path)
    fresh = past.shown_rows()
    cached = [scene.seen.get((name, None)) for name in _CACHE]
    if fresh is None or cached[0] is None or cached[1] is None:
        return
    shapes = ((*fresh.shape[:1], length + a, c), (*fresh.shape[:1], length + a, fresh.shape[2] - c))
    if (cached[0].shape, cached[1].shape) != shapes:
        return
    held = np.concatenate([one.astype(np.float64) for one in cached if one is not None], axis=-1)
    held = held[:, length:]
    scale = float(np.abs(held).max(initial=0.0, where=np.isfinite(held)))
    commit = past.commit(past.rows_after(fresh))
    for wrong in wrong_commits():
        rows = wrong.keep(commit)[:, length : length + a]
        same = np.abs(rows - held) <= _SAME * scale
        same |= np.isnan(rows) & np.isnan(held)
        if same.all():
            yield Ranked(Hint(wrong.says + _told_of(scene), wrong.rules), wrong.specific)


def _touched(scene: Scene) -> Ranked | None:
    """Which numbers of a committed row were changed, and by how much."""
    slots = np.flatnonzero(~scene.actual.astype(bool))
    if not len(slots):
        return None
    count, worst, where = 0, 0.0, ""
    in_last_bit = True
    for name in _CACHE:
        old, new = scene.seen_before.get((name, None)), scene.seen.get((name, None))
        if old is None or new is None or old.shape[1] > new.shape[1]:
            return None
        changed = new[:, : old.shape[1]] != old
        count += int(changed.sum())
        if not changed.any():
            continue
        layer, slot, channel = (int(x) for x in np.argwhere(changed)[0])
        where = where or f"{name} of layer {layer}, slot {slot}, channel {channel}"
        a, b = old[changed], new[:, : old.shape[1]][changed]
        worst = max(worst, float(np.abs(b.astype(np.float64) - a).max()))
        if a.dtype.kind == "f":
            in_last_bit &= bool((np.nextafter(a, b) == b).all())
    if not count:
        return None
    by = "by one unit of the last place" if in_last_bit else f"by up to {worst:.3g}"
    numbers = "1 number" if count == 1 else f"{count} numbers"
    says = f"{numbers} of committed rows (slots {_span(slots)}) changed {by}, the first in {where}"
    return Ranked(Hint(says, ("SLOT-2",)), 2)
