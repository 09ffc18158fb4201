"""ACC: the walk, the argmax, the bonus and the next root."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import on_open, wrap

ACCEPT_WALK = MutantClass("accept walk")


@ACCEPT_WALK.mutant("M025", "ACC-1", breaks="ACC-1", first_seen_at="path", needs="core")
def first_child_accepted(engine: Any) -> None:
    """The first child of the root is always accepted."""

    def accept_walk(original: Any, tokens: Any, parents: Any, targets: Any, *rest: Any) -> Any:
        targets = targets.copy()
        targets[0] = tokens[1] if len(tokens) > 1 else targets[0]
        return original(tokens, parents, targets, *rest)

    wrap(engine, accept_walk=accept_walk)


@ACCEPT_WALK.mutant("M027", "ACC-3", breaks="COMMIT-2", first_seen_at="root", needs="core")
def root_from_path(engine: Any) -> None:
    """The next root is the last accepted draft, not the bonus."""

    def change(session: Any) -> None:
        advance = session._advance

        def faulty(tokens: Any, positions: Any, root: int) -> None:
            in_round = len(session._tokens) > 0  # not the prompt
            advance(tokens, positions, tokens[-1] if in_round else root)

        session._advance = faulty

    on_open(engine, change)


@ACCEPT_WALK.mutant(
    "M029", "ACC-5", breaks="ACC-1", also=("FWD-1",), first_seen_at="root", needs="core"
)
def last_maximum(engine: Any) -> None:
    """Of equal top logits the highest id wins. Only an exact tie shows it."""

    def argmax(original: Any, logits: Any) -> Any:
        return logits.shape[-1] - 1 - original(logits[..., ::-1])

    wrap(engine, argmax=argmax)


@ACCEPT_WALK.mutant("M031", "ACC-7", breaks="ACC-1", first_seen_at="path", needs="core")
def first_child_only(engine: Any) -> None:
    """Of each node's children only the first can be accepted."""

    def accept_walk(original: Any, tokens: Any, parents: Any, *rest: Any) -> Any:
        first = np.array([p == -1 or p not in parents[:i] for i, p in enumerate(parents)])
        return original(np.where(first, tokens, -1), parents, *rest)

    wrap(engine, accept_walk=accept_walk)


@ACCEPT_WALK.mutant("M033", "ACC-9", breaks="FWD-1", first_seen_at="root", needs="core")
def argmax_over_padding(engine: Any) -> None:
    """The argmax reads eight columns of zeros behind the vocabulary. Only a row without a positive
    logit shows it."""

    def argmax(original: Any, logits: Any) -> Any:
        zeros = np.zeros((*logits.shape[:-1], 8), logits.dtype)
        return original(np.concatenate([logits, zeros], axis=-1))

    wrap(engine, argmax=argmax)


@ACCEPT_WALK.mutant("M034", "ACC-10", breaks="ACC-1", first_seen_at="targets", needs="core")
def repetition_penalty(engine: Any) -> None:
    """In a verify the logits of tokens that were there before lose 1.5 ahead of the argmax."""
    history: list[int] = []

    def change(session: Any) -> None:
        staged = session._staged

        def watched(tokens: Any, parents: Any = None, *limits: Any) -> Any:
            history[:] = [] if parents is None else session._tokens
            return staged(tokens, parents, *limits)

        session._staged = watched

    def argmax(original: Any, logits: Any) -> Any:
        penalised = logits.copy()
        penalised[:, np.unique(np.array(history, int))] -= np.float32(1.5)
        return original(penalised)

    on_open(engine, change)
    wrap(engine, argmax=argmax)
