"""An engine that was asked before: verbs are answered from its file of answers (docs/offline.md).

It stands behind the contract's interface, so that the judge is the gate's own: a replay compares
nothing, and holds to their form only the answers that the interface wants as numbers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.case import CaseInput
from kdtr.conformance.offline_answers import Answers, PointAnswers, missing
from kdtr.contract import (
    NO_LIMIT,
    SILENT,
    Acceptance,
    DraftTree,
    EmitLimit,
    EngineError,
    KdtrError,
    LogicalCache,
    ModelConfig,
    ModelSource,
    Round,
    Trace,
)

_ANSWERABLE = frozenset({"build", "snapshot"})  # what more of the verbs a file can show


class ReplayEngine:
    """Answers `path` holds, to be judged against `golden`.

    Raises BundleError or EngineError for a file that holds none (cut, of other questions, with
    names that answer nothing): there is nothing to judge then.
    """

    def __init__(self, path: str | os.PathLike[str], golden: GoldenBundle) -> None:
        self._golden = golden
        self._answers = Answers(path, golden)
        info = self._answers.info
        verbs = frozenset({"set_root", "prefill", "round"}) | (info.verbs & _ANSWERABLE)
        self.info = replace(info, verbs=verbs)

    def load(self, source: ModelSource) -> Any:
        """A `ReplayModel`; its sessions have the verbs of `info` and no others."""
        return ReplayModel(self._golden.config, self._answers)


class ReplayModel:
    """Opens no session by itself: each is of a case, `of(case)`."""

    def __init__(self, config: ModelConfig, answers: Answers, case: CaseInput | None = None):
        self.config = config
        self._answers = answers
        self._case = case

    def of(self, case: CaseInput) -> ReplayModel | None:
        """The model as it was asked for this case; None where the file holds nothing of it."""
        if case.alias not in self._answers.cases:
            return None
        return ReplayModel(self.config, self._answers, case)

    def open(self, *, max_len: int) -> ReplaySession:
        assert self._case is not None
        return ReplaySession(self._case, self._answers.cases[self._case.alias])

    def close(self) -> None:
        """Nothing is held."""


class ReplaySession:
    """One case, point after point; what is asked is what the file was asked, by its id."""

    def __init__(self, case: CaseInput, answers: dict[str, PointAnswers]) -> None:
        self._points = case.points()
        self._answers = answers
        self._done = 0  # points answered
        self._root = case.root

    @property
    def committed_len(self) -> int:
        return _integer("committed_len", self._now()) if self._done else 0

    @property
    def root(self) -> int | None:
        return _integer("root", self._now()) if self._done else self._root

    def set_root(self, token: int) -> None:
        """The root of a case without a prompt: the engine set it itself."""

    def prefill(self, tokens: Sequence[int], *, trace: Trace = SILENT) -> int:
        return _integer("root", self._next(trace))

    def build(self, draft_logits: Any, budget: int) -> DraftTree:
        at = self._coming()
        if at.error is not None and "build_tokens" not in at.values:
            raise EngineError(f"the engine stopped at {self._points[self._done]}: {at.error}")
        tokens, parents = (
            tuple(_integers(name, at, 1)) for name in ("build_tokens", "build_parents")
        )
        try:
            return DraftTree(tokens, parents)
        except KdtrError as error:
            raise EngineError(f"build_tokens and build_parents are no tree: {error}") from None

    def round(
        self, tree: DraftTree, *, limit: EmitLimit = NO_LIMIT, trace: Trace = SILENT
    ) -> Round:
        at = self._next(trace)
        try:
            acceptance = Acceptance(tuple(_integers("path", at, 1)), _integer("bonus", at))
        except EngineError:
            raise
        except KdtrError as error:
            raise EngineError(f"path and bonus are no acceptance: {error}") from None
        return Round(tree, acceptance, tuple(_integers("emitted", at, 1)))

    def snapshot(self) -> LogicalCache:
        names = ("tokens", "positions", "c_kv", "k_pe")
        at = self._now()
        return LogicalCache(**{name: _value(f"cache_{name}", at) for name in names})

    def close(self) -> None:
        """Nothing is held."""

    def _now(self) -> PointAnswers:
        return self._answers[self._points[self._done - 1]]

    def _coming(self) -> PointAnswers:
        point = self._points[self._done]
        found = self._answers.get(point)
        if found is None:
            raise EngineError(
                f"the answers hold nothing of {point}, and no `error` that says why; expected "
                "every point up to the engine's first decision that differs"
            )
        return found

    def _next(self, trace: Trace) -> PointAnswers:
        """The next point, after its stages have been shown: they may tell why it stopped."""
        at, point = self._coming(), self._points[self._done]
        for (stage, layer), array in at.stages.items():
            trace(stage, layer, array)
        if at.error is not None:
            raise EngineError(f"the engine stopped at {point}: {at.error}")
        lacks = missing(point, at)
        if lacks:
            raise EngineError(f"the answers of {point} lack {lacks}; expected them at every point")
        self._done += 1
        return at


def _value(name: str, at: PointAnswers) -> np.ndarray:
    if name not in at.values:
        raise EngineError(f"the answers lack {name}; expected it where its verb is declared")
    return at.values[name]


def _integers(name: str, at: PointAnswers, ndim: int) -> list[int]:
    array = _value(name, at)
    if array.dtype.kind not in "iu" or array.ndim != ndim:
        expected = "integers [n]" if ndim else "one integer, []"
        raise EngineError(f"{name} is {array.dtype} {list(array.shape)}; expected {expected}")
    return [int(value) for value in array.reshape(-1)]


def _integer(name: str, at: PointAnswers) -> int:
    return _integers(name, at, 0)[0]
