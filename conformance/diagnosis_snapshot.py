"""What the snapshot before a point tells of a difference at it.

A case of level `decisions` records the cache after its last point alone. A snapshot from before was
then compared with nothing; it is held here against the rows that the points before should leave,
which the past computes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kdtr.conformance.diagnosis_past import Past, WrongCommit, wrong_commits
from kdtr.conformance.diagnosis_scene import FITS, Hint, Scene
from kdtr.conformance.diagnosis_twist import Twist

_CACHE = ("cache_c_kv", "cache_k_pe")
_LAXER = 4.0  # than the stage that differs, of which alone a bound is known
_ROUGH = 2.0**-4  # of the largest number, beside a decision: rows of another node differ by more
_MOST = 6  # slots that are named
_AFTER = "the snapshot() after"
_LEFT = "by its snapshot()"


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """A snapshot [l, t, c + r], the rows that it should have, and which differ [l, t] bool."""

    shown: np.ndarray
    right: np.ndarray
    wrong: np.ndarray


def informed(hint: Hint, scene: Scene, past: Past) -> Hint:
    """The hint, where a snapshot would tell and there was one, with what that told."""
    if not hint.seen_in.startswith("cache_") or not scene.cache_was_shown:
        return hint
    return replace(hint, says=f"{hint.says}; {_told(scene, past)}", seen_in="")


def knows_the_cache(hint: Hint) -> bool:
    """Whether it says what a snapshot was found to hold: then nothing need be shown to learn it."""
    return _AFTER in hint.says or _LEFT in hint.says


def convicts_the_cache(hint: Hint) -> bool:
    """Whether rows that a snapshot showed explain every element."""
    return _LEFT in hint.says and hint.fit >= 1


def snapshot_twists(scene: Scene, past: Past) -> Iterator[Twist]:
    """The forward over the rows that the snapshot showed, where those are not as they should be."""
    compared = _compare(scene, past)
    if compared is None or not compared.wrong.any():
        return
    rows = past.setting.rows.copy()
    rows[:, : scene.committed_len] = compared.shown
    wrong = _wrong_commit(compared, scene, past)
    what = f"{_where(compared)} are not as they should be" if wrong is None else wrong.says
    yield Twist(
        f"the cache that {scene.point_before} left, {_LEFT}: {what}",
        ("COMMIT-3",) if wrong is None else wrong.rules,
        "cache_c_kv",
        replace(past.setting, rows=rows),
        2 if wrong is None else wrong.specific,
    )


def _wrong_commit(compared: _Compared, scene: Scene, past: Past) -> WrongCommit | None:
    """The one that leaves what was shown, of several the nearest: in all commits, or rounds'."""
    found: list[tuple[float, float, WrongCommit]] = []
    for wrong in wrong_commits():
        for chunks in (True, False):
            left = past.wrongly_kept(wrong.keep, chunks=chunks).rows[:, : scene.committed_len]
            concerned = compared.wrong | ~_close(compared.right, left, scene).all(axis=-1)
            fit = _close(left, compared.shown, scene)[concerned].mean()
            error = np.abs(left - compared.shown)
            most = error.max(initial=0.0, where=np.isfinite(error))
            if fit >= FITS:  # a number in a few is rounded the other way
                found.append((-float(fit), float(most), wrong))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _told(scene: Scene, past: Past) -> str:
    before = scene.point_before
    right = f"{_AFTER} {before} has the right rows: this forward read others, or wrote over them"
    if scene.cache_was_right:
        return right
    compared = _compare(scene, past) if past.is_small else None
    if compared is None:
        return (
            f"what snapshot() showed after {before} was compared with nothing, as the case does "
            "not record the cache there (level decisions); the same case in a bundle that `kdtr "
            "golden` records, which keeps every stage, would tell"
        )
    if not compared.wrong.any():
        return right
    return f"in {_AFTER} {before} {_where(compared)} are wrong"


def _compare(scene: Scene, past: Past) -> _Compared | None:
    """None where the snapshot has another form."""
    right = past.setting.rows[:, : scene.committed_len]
    halves = [scene.seen_before.get((name, None)) for name in _CACHE]
    shown = [one.astype(np.float64) for one in halves if one is not None and one.ndim == right.ndim]
    if len(shown) < len(_CACHE) or len({one.shape[:2] for one in shown}) > 1:
        return None
    rows = np.concatenate(shown, axis=-1)
    if rows.shape != right.shape:
        return None
    return _Compared(rows, right, np.asarray(~_close(right, rows, scene).all(axis=-1)))


def _close(right: np.ndarray, shown: np.ndarray, scene: Scene) -> np.ndarray:
    """Which numbers are the same, but for rounding."""
    finite = np.isfinite(right)
    scale = float(np.abs(right).max(initial=0.0, where=finite))
    tolerance = min(_ROUGH, _LAXER * scene.relative_bound) * scale
    error = np.zeros(right.shape)
    both = finite & np.isfinite(shown)
    np.subtract(right, shown, out=error, where=both)
    nowhere = np.isnan(right) & np.isnan(shown)
    return np.asarray(np.where(both, np.abs(error) <= tolerance, nowhere))


def _where(compared: _Compared) -> str:
    layers, slots = (np.flatnonzero(compared.wrong.any(axis=axis)) for axis in (1, 0))
    n_layers = len(compared.wrong)
    which = "all layers" if len(layers) == n_layers else f"layer {_span(layers)}"
    return f"slot{'s' if len(slots) > 1 else ''} {_span(slots)} in {which}"


def _span(numbers: np.ndarray) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"{numbers[0]}..{numbers[-1]}"
    more = f" and {len(numbers) - _MOST} more" if len(numbers) > _MOST else ""
    return ", ".join(str(i) for i in numbers[:_MOST]) + more
