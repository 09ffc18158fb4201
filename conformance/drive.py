"""Driving a session through a case, in each of the ways in which an engine can be used.

A driver knows the questions and, in the pinned modes, what is committed after the engine has
given its own answer; it compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kdtr.conformance.case import CaseInput, RoundInput
from kdtr.conformance.observe import Observation, as_round, copied_rows, host_cache, unchanged_rows
from kdtr.contract import (
    NO_LIMIT,
    Acceptance,
    EngineError,
    EngineInfo,
    LogicalCache,
    ModelConfig,
    Session,
    Source,
    Stage,
)


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """Golden history for one point: what to commit, and for `forward` what to feed."""

    acceptance: Acceptance
    positions: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of using an engine.

    verbs    without these the mode is unsupported
    pinned   golden history is committed in each round: a near tie does not end the case
    applies  whether the mode asks a case's questions at all
    hides    stages that this way of use cannot show
    traces   whether the engine is asked for its stages; without, it runs as it ships
    """

    name: str
    verbs: frozenset[str]
    pinned: bool
    drive_chunk: Callable[[Driver, tuple[int, ...], Pin, Observation], None]
    drive_round: Callable[[Driver, RoundInput, Pin, Observation], None]
    hides: Callable[[Stage], bool]
    applies: Callable[[CaseInput], bool] = lambda case: True
    traces: bool = True


class Driver:
    """A session, and what its engine declares."""

    def __init__(
        self, session: Session, info: EngineInfo, config: ModelConfig, *, traces: bool
    ) -> None:
        self.session = session
        self.info = info
        self.config = config
        self._traces = traces and bool(info.stages)
        self._last: LogicalCache | None = None  # the snapshot after the point before

    def offers(self, verb: str) -> bool:
        return verb in self.info.verbs

    def tracing(self, seen: Observation) -> dict[str, Any]:
        """The keyword that asks for a trace, for engines that show any stage."""
        return {"trace": seen} if self._traces else {}

    def look_untouched(self, seen: Observation) -> None:
        """The committed rows after a verify, against those before it (SLOT-2)."""
        if self._last is not None and self.offers("snapshot"):
            seen.put("untouched", unchanged_rows(self._last, host_cache(self.session.snapshot())))

    def look(self, seen: Observation, path: Sequence[int]) -> None:
        """The session after a commit of the forward's rows `path`."""
        seen.put_token("committed_len", "committed_len", self.session.committed_len)
        if self.session.root is None:
            raise EngineError("root is None after a commit; expected the bonus")
        seen.put_token("root", "root", self.session.root)
        if self.offers("snapshot"):
            self._look_cache(seen, path)

    def _look_cache(self, seen: Observation, path: Sequence[int]) -> None:
        cache = host_cache(self.session.snapshot())
        seen.put_cache(cache)
        if self._last is not None:
            still = unchanged_rows(self._last, cache)
            after_verify = seen.arrays.get(("untouched", None), still)
            seen.put("untouched", still & after_verify)
        committed = 0 if self._last is None else len(self._last.tokens)
        copied = copied_rows(seen, path, cache, committed, self.info.profile.latents)
        if copied is not None:
            seen.put("copied", copied)
        self._last = cache


def _prefill(driver: Driver, tokens: tuple[int, ...], _: Pin, seen: Observation) -> None:
    root = driver.session.prefill(list(tokens), **driver.tracing(seen))
    driver.look(seen, range(len(tokens)))
    kept = seen.arrays["root", None]
    seen.put_token("root", "prefill()", root)
    if kept != seen.arrays["root", None]:
        raise EngineError(f"prefill() returned {root}, the session's root is {kept}; expected one")


def _prefill_pinned(driver: Driver, tokens: tuple[int, ...], pin: Pin, seen: Observation) -> None:
    """The golden root takes the place of the engine's, which may differ by a near tie."""
    _prefill(driver, tokens, pin, seen)
    if driver.offers("set_root") and driver.session.root != pin.acceptance.bonus:
        driver.session.set_root(pin.acceptance.bonus)


def _forward_chunk(driver: Driver, tokens: tuple[int, ...], pin: Pin, seen: Observation) -> None:
    _forward(driver, tokens, pin, seen)


def _stepwise(driver: Driver, entry: RoundInput, pin: Pin, seen: Observation) -> None:
    """build, verify, accept, commit, one by one; the golden path is committed."""
    session = driver.session
    _build(driver, entry, seen)
    verified = session.verify(entry.tree, **driver.tracing(seen))
    seen.put_verified(verified, len(entry.tree), driver.config.vocab_size)
    driver.look_untouched(seen)
    if driver.offers("accept"):
        seen.put_acceptance("accept()", session.accept(entry.tree, **_limited(entry)))
    session.commit(pin.acceptance)
    driver.look(seen, pin.acceptance.path)


def _fused(driver: Driver, entry: RoundInput, _: Pin, seen: Observation) -> None:
    """round(): verify, accept and commit as shipped; the engine lives with its own decisions."""
    done = as_round(driver.session.round(entry.tree, **_limited(entry), **driver.tracing(seen)))
    seen.put_tree(done.tree, entry.tree)
    seen.put_acceptance("round()", done.acceptance)
    seen.put_emitted(done.emitted)
    driver.look(seen, done.acceptance.path)


def _played(driver: Driver, entry: RoundInput, pin: Pin, seen: Observation) -> None:
    """build, then round(): all that a file of answers can hold, in one pass."""
    _build(driver, entry, seen)
    _fused(driver, entry, pin, seen)


def _build(driver: Driver, entry: RoundInput, seen: Observation) -> None:
    if entry.draft_logits is not None and driver.offers("build"):
        seen.put_build(driver.session.build(entry.draft_logits, entry.budget or 0))


def _decode(driver: Driver, _: RoundInput, __: Pin, seen: Observation) -> None:
    """decode(): autoregressive rounds."""
    token = driver.session.decode(**driver.tracing(seen))
    driver.look(seen, (0,))
    seen.put_token("bonus", "decode()", token)


def _forward_round(driver: Driver, entry: RoundInput, pin: Pin, seen: Observation) -> None:
    _forward(driver, entry.tree.tokens, pin, seen)


def _forward(driver: Driver, tokens: tuple[int, ...], pin: Pin, seen: Observation) -> None:
    """forward_tokens() under golden positions and mask; the golden path is committed."""
    logits = driver.session.forward_tokens(
        list(tokens), pin.positions.copy(), pin.mask.copy(), **driver.tracing(seen)
    )
    seen.put_logits("forward_tokens()", logits, len(tokens), driver.config.vocab_size)
    driver.session.commit(pin.acceptance)
    driver.look(seen, pin.acceptance.path)


def _limited(entry: RoundInput) -> dict[str, Any]:
    """The keyword for a limit, in the rounds that have one (ACC-4)."""
    return {} if entry.limit == NO_LIMIT else {"limit": entry.limit}


def _hides_forward(stage: Stage) -> bool:
    forward = stage.source in (Source.FORWARD, Source.LAYER, Source.BUILD)
    return forward or stage.name in ("targets", "moves", "copied")


def _hides(names: frozenset[str], stage: Stage) -> bool:
    return stage.name in names


def _hides_walk(stage: Stage) -> bool:
    return stage.source in (Source.BUILD, Source.WALK) or stage.name == "parents"


def _hides_all_but_bonus(stage: Stage) -> bool:
    return _hides_walk(stage) and stage.name != "bonus"


MODES: tuple[Mode, ...] = (
    Mode(
        "stepwise",
        frozenset({"prefill", "verify", "commit"}),
        True,
        _prefill_pinned,
        _stepwise,
        partial(_hides, frozenset({"emitted", "moves"})),
    ),
    Mode(
        "round",
        frozenset({"prefill", "round"}),
        False,
        _prefill,
        _fused,
        partial(_hides, frozenset({"build_parents", "build_tokens"})),
    ),
    Mode(
        "shipped",
        frozenset({"prefill", "round"}),
        False,
        _prefill,
        _fused,
        _hides_forward,
        traces=False,
    ),
    Mode(
        "decode",
        frozenset({"prefill", "decode"}),
        False,
        _prefill,
        _decode,
        _hides_all_but_bonus,
        lambda case: all(len(entry.tree) == 1 for entry in case.rounds),
    ),
    Mode(
        "forward",
        frozenset({"forward_tokens", "commit"}),
        True,
        _forward_chunk,
        _forward_round,
        _hides_walk,
    ),
)
# Of engines that were asked by a file (offline_engine.py): they live with their own decisions.
OFFLINE = Mode(
    "offline",
    frozenset({"prefill", "round"}),
    False,
    _prefill,
    _played,
    partial(_hides, frozenset()),
)
MODE = {mode.name: mode for mode in (*MODES, OFFLINE)}
