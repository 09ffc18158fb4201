"""Which rows a thin choice of experts may have moved, and which are still held to the truth.

Where a router's choice hangs on less than rounding moves it, an engine may choose otherwise
(NUM-2), and what follows is honestly different: the row from that layer on, every row that sees
it from the next layer on, and its latents in the cache from the next layer on. All other rows are
judged as before.
"""

from __future__ import annotations

import numpy as np

from kdtr.contract import Source, Stage


class Taint:
    """At one point of a case.

    moved  [n] bool: another choice was shown, or a difference seen
    may    [n] bool: a thin choice that the engine does not show; judged, but excused
    """

    def __init__(self, mask: np.ndarray, path: np.ndarray | None) -> None:
        """mask [n, L+n] of the golden forward; path: the nodes committed, None for all."""
        n, slots = mask.shape
        self._sees = mask[:, slots - n :]  # [n, n]
        self._committed = slots - n
        self._path = np.arange(n) if path is None else path
        self.moved: np.ndarray = np.zeros(n, dtype=bool)
        self.may: np.ndarray = np.zeros(n, dtype=bool)
        self._layer: int | None = None

    def enter(self, layer: int | None) -> None:
        """The comparison goes on to this layer's stages: what attention reads spreads."""
        if layer is not None and layer != self._layer:
            self.moved = (self._sees & self.moved).any(axis=1)
            self.may = (self._sees & self.may).any(axis=1) & ~self.moved
        self._layer = layer

    def choose(self, rows: np.ndarray) -> None:
        """These rows [n] bool chose other experts, as they may."""
        self.moved = self.moved | rows
        self.may = self.may & ~rows

    def suspect(self, rows: np.ndarray) -> None:
        """These rows [n] bool may have chosen other experts, unseen."""
        self.may = self.may | (rows & ~self.moved)

    def give_up(self) -> None:
        """A difference was seen where one may be: the suspects are not judged any more."""
        self.choose(self.may)

    def judged(
        self, stage: Stage, expected: np.ndarray, actual: np.ndarray, *, suspects: bool
    ) -> np.ndarray | None:
        """What is shown of a stage, with the truth in place of what is not judged; None: nothing.

        suspects  judge the suspects alone, or everything but what is moved or suspected
        """
        if not (self.moved.any() or self.may.any()):
            return None if suspects else actual
        rows = self.may if suspects else ~(self.moved | self.may)
        if stage.axes.startswith("n"):
            taken = rows.reshape(-1, *(1 for _ in stage.axes[1:]))
        elif stage.axes.startswith("lt"):
            taken = self._slots(rows, expected.shape[1], suspects)[None, :, None]
        elif stage.source is Source.WALK or stage.name == "root":
            # What the rows of the path decide is decided by the last of them, and by all.
            moved, may = self.moved[self._path].any(), self.may[self._path].any()
            return actual if (may and not moved if suspects else not (may or moved)) else None
        else:
            return None if suspects else actual
        if not taken.any():
            return None
        return np.where(taken, actual.astype(expected.dtype), expected)

    def _slots(self, rows: np.ndarray, n_slots: int, suspects: bool) -> np.ndarray:
        """Which slots [t] of a cache are judged: those of before, and of the path's judged rows."""
        slots = np.full(n_slots, not suspects)
        behind = slots[self._committed :]
        behind[:] = rows[self._path][: len(behind)]
        return slots

    @property
    def commits_moved(self) -> bool:
        """Whether a moved row is committed: then every later row may differ."""
        return bool(self.moved[self._path].any())

    @property
    def commits_suspect(self) -> bool:
        """Whether a suspect is committed: then every later row is one."""
        return bool(self.may[self._path].any())
