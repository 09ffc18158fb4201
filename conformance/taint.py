"""Which rows an unseen thin choice of experts may have moved, and which are held to the record.

Where a router's choice hangs on less than rounding moves it, an engine may choose otherwise
(NUM-2), and what follows is honestly different. A choice in layer l moves its own row from the
MLP of layer l on, and with it the row's latents of layers l+1 and on: those of the layers up to l
stay as they were. A row that sees a moved latent in layer m moves from the scores of layer m on.
Everything else is firm: no choice excuses it. What is not firm is judged too, and a difference
there is looked up among the outcomes of such choices (alternatives.py).
"""

from __future__ import annotations

import numpy as np

from kdtr.contract import Source, Stage


class _Spread:
    """Rows of one forward that differ, and from which layer on.

    since  [n] the first layer whose input may differ; n_layers: only the logits; beyond: never
    now    [n] bool: at the stage that is looked at
    """

    def __init__(self, n: int, n_layers: int) -> None:
        self.since: np.ndarray = np.full(n, n_layers + 1)
        self.now: np.ndarray = np.zeros(n, dtype=bool)

    def enter(self, layer: int) -> None:
        self.now = self.since <= layer

    def attend(self, layer: int, sees: np.ndarray, committed_since: int) -> None:
        """The scores of a layer: what is read moves who reads it."""
        read = np.asarray((sees & (self.since <= layer)).any(axis=1))
        self.start(read | (committed_since <= layer), layer)

    def start(self, rows: np.ndarray, layer: int) -> None:
        """These rows [n] bool differ from here on."""
        self.now = np.asarray(self.now | rows)
        self.since = np.where(rows, np.minimum(self.since, layer + 1), self.since)


class Taint:
    """At one point of a case: the suspects, rows that may have moved, and those given up.

    Rows that are given up are not judged any more: a difference was seen that some choices may
    explain, and they were too many to try.
    """

    def __init__(
        self,
        n_layers: int,
        mask: np.ndarray,
        path: np.ndarray | None,
        committed_suspect_since: int | None = None,
    ) -> None:
        """mask [n, L+n] of the golden forward; path: the nodes committed, None for all.

        committed_suspect_since  the first layer whose cached latents are suspects, from before
        """
        n, slots = mask.shape
        self._n_layers = n_layers
        self._sees = mask[:, slots - n :]  # [n, n]
        self._committed = slots - n
        self._path = np.arange(n) if path is None else path
        self._moved, self._may = _Spread(n, n_layers), _Spread(n, n_layers)
        never = n_layers + 1
        self._suspect_cache = never if committed_suspect_since is None else committed_suspect_since
        self._layer: int | None = None

    def enter(self, stage: Stage, layer: int | None) -> None:
        """The comparison goes on to this stage."""
        if layer != self._layer:
            at = self._n_layers if layer is None else layer  # None: behind the last layer
            self._moved.enter(at)
            self._may.enter(at)
            self._layer = layer
        if stage.name == "scores" and layer is not None:
            self._moved.attend(layer, self._sees, self._n_layers + 1)
            self._may.attend(layer, self._sees, self._suspect_cache)

    def suspect(self, rows: np.ndarray, layer: int) -> None:
        """These rows [n] bool may have chosen other experts in this layer, unseen."""
        self._may.start(rows, layer)

    def give_up(self) -> None:
        """What explains a difference of the suspects is not known: they are judged no more."""
        self._moved.since = np.minimum(self._moved.since, self._may.since)
        self._moved.now = self._moved.now | self._may.now

    def judged(
        self, stage: Stage, expected: np.ndarray, actual: np.ndarray, *, suspects: bool
    ) -> np.ndarray | None:
        """What is shown of a stage, with the truth in place of what is not judged; None: nothing.

        suspects  judge the suspects alone, or else what is firm alone
        """
        if stage.axes.startswith("n"):
            taken = _taken(self._moved.now, self._may.now, suspects)
            taken = taken.reshape(-1, *(1 for _ in stage.axes[1:]))
        elif stage.axes.startswith("lt"):
            taken = self._cached(expected.shape[1], suspects)[:, :, None]
        elif stage.source is Source.WALK or stage.name == "root":
            # What the rows of the path decide, all of them decide.
            moved, may = (
                (spread.since[self._path] <= self._n_layers).any()
                for spread in (self._moved, self._may)
            )
            taken = _taken(np.asarray(moved), np.asarray(may), suspects)
            return actual if taken.all() else None
        else:
            return None if suspects else actual
        if taken.all():
            return actual
        return np.where(taken, actual.astype(expected.dtype), expected) if taken.any() else None

    def _cached(self, n_slots: int, suspects: bool) -> np.ndarray:
        """Which latents [l, t] of a cache are judged."""
        layers = np.arange(self._n_layers)[:, None]
        of_path = slice(self._committed, self._committed + len(self._path))
        moved = np.zeros((self._n_layers, n_slots), dtype=bool)
        may = np.broadcast_to(self._suspect_cache <= layers, moved.shape).copy()
        n = max(0, min(n_slots, of_path.stop) - of_path.start)
        moved[:, of_path] = (self._moved.since[self._path] <= layers)[:, :n]
        may[:, of_path] = (self._may.since[self._path] <= layers)[:, :n]
        return _taken(moved, may, suspects)

    @property
    def n_moved(self) -> int:
        """Rows of which some stage was not judged."""
        return int((self._moved.since <= self._n_layers).sum())

    @property
    def decides_moved(self) -> bool:
        """Whether a moved row is on the path: an engine that lives with its choices goes on
        elsewhere."""
        return bool((self._moved.since[self._path] <= self._n_layers).any())

    @property
    def commits_moved(self) -> bool:
        """Whether a moved latent is committed: then every later row may differ."""
        return bool((self._moved.since[self._path] < self._n_layers).any())

    @property
    def commits_suspect_since(self) -> int | None:
        """The first layer whose committed latents are suspects; None: of no layer."""
        since = min(int(self._may.since[self._path].min()), self._suspect_cache)
        return since if since < self._n_layers else None


def _taken(moved: np.ndarray, may: np.ndarray, suspects: bool) -> np.ndarray:
    return may & ~moved if suspects else ~(moved | may)
