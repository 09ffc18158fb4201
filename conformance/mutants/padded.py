"""The host engine with trees padded to a bucket of rows, as an engine with captured graphs has it.

Honest as it is: rows of padding have no slot and no parent, nothing of them is written, walked or
shown, and nobody sees them (PAD-1). Their faults are planted into what is staged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.conformance.mutants.planting import wrap
from kdtr.contract import SILENT, STAGE

_FILLER = 0  # the token of padding

# What is staged, made otherwise: of the forward under way, with what the session keeps between two.
Change = Callable[["Padded", dict[Any, Any], Any], Any]


class Padded:
    """How the trees of an engine are staged; what is told here holds for the forward under way.

    rows     of the tree, without padding; 0 where the forward is none of a tree
    n        with padding: the next multiple of the bucket
    length   L
    counted  rows that are taken for the tree's
    """

    def __init__(
        self,
        engine: Any,
        change: Change = lambda padded, kept, rows: rows,
        *,
        bucket: int = 8,
    ) -> None:
        self.rows = self.n = self.length = self.counted = 0
        self._change = change
        self._bucket = bucket
        launcher = engine.kernels.launcher
        engine.kernels.launcher = lambda *of: _Launcher(self, launcher(*of))
        wrap(engine, append_latents=self._append_latents, tree_layout=self._tree_layout)

    def staged(self, rows: Any, kept: dict[Any, Any]) -> Any:
        """The rows with padding behind them."""
        self.rows = self.counted = rows.n
        self.length = rows.committed_len
        self.n = -(-rows.n // self._bucket) * self._bucket
        none = np.full(self.n - rows.n, -1, np.int64)
        padded = rows._replace(
            n=self.n,
            tokens=np.concatenate([rows.tokens, np.full_like(none, _FILLER)]),
            slots=np.concatenate([rows.slots, none]),
            parents=np.concatenate([rows.parents, none]),
        )
        return self._change(self, kept, padded)

    def shown(self, trace: Any) -> Any:
        """The trace, without rows of padding."""
        if trace is SILENT or not self.rows:
            return trace
        sizes = {"n": self.rows, "s": self.length + self.rows}

        def cut(stage: str, layer: int | None, array: Any) -> None:
            trace(stage, layer, array[tuple(slice(sizes.get(x)) for x in STAGE[stage].axes)])

        return cut

    def _append_latents(
        self, original: Any, cache: Any, layer: int, slots: Any, c_kv: Any, k_pe: Any
    ) -> None:
        """Rows without a slot are not written, nor those that are taken for padding."""
        has = slots >= 0
        if self.rows:
            has[min(self.counted, self.rows) : self.rows] = False
        original(cache, layer, slots[has], c_kv[has], k_pe[has])

    def _tree_layout(self, original: Any, parents: Any, committed_len: int) -> Any:
        """No column is a row of padding; such a row sees the root, so that it sees something."""
        positions, ancestors = original(parents, committed_len)
        ancestors[self.rows :, 0] = True
        return positions, ancestors[:, : self.rows]


class _Launcher:
    """A session's own, which pads."""

    def __init__(self, padded: Padded, launcher: Any) -> None:
        self._padded = padded
        self._launcher = launcher
        self._kept: dict[Any, Any] = {}

    def stage(self, committed_len: int, tokens: Any, parents: Any = None, **limits: Any) -> Any:
        rows = self._launcher.stage(committed_len, tokens, parents, **limits)
        if parents is None:
            self._padded.rows = 0
            return rows
        return self._padded.staged(rows, self._kept)

    def run(self, name: str, rows: Any, program: Any, trace: Any) -> Any:
        return self._launcher.run(name, rows, program, self._padded.shown(trace))

    def close(self) -> None:
        self._launcher.close()
