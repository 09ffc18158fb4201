"""Engines that offer and show no more than they are told to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import planted_faults

MINIMAL = ("prefill", "verify", "commit")


def engine(fault: str, verbs: Iterable[str] = MINIMAL, stages: Iterable[str] = ()) -> Any:
    """The engine with this planted fault, of which no more is offered and shown than this."""
    return less_of(planted_faults.make_engine(fault), verbs, stages)


def less_of(whole: Any, verbs: Iterable[str] = MINIMAL, stages: Iterable[str] = ()) -> Any:
    info = replace(whole.info, verbs=frozenset(verbs), stages=frozenset(stages))

    def load(source: Any) -> Any:
        model = whole.load(source)
        return SimpleNamespace(
            open=lambda max_len: Showing(model.open(max_len=max_len), info.stages),
            close=model.close,
        )

    return SimpleNamespace(info=info, load=load)


class Showing:
    """A session that traces these stages alone."""

    def __init__(self, session: Any, stages: frozenset[str]) -> None:
        self._session = session
        self._stages = stages

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session, name)
        if not callable(value):
            return value

        def verb(*args: Any, trace: Any = None, **kwargs: Any) -> Any:
            if trace is not None:
                kwargs["trace"] = lambda stage, layer, array: (
                    trace(stage, layer, array) if stage in self._stages else None
                )
            return value(*args, **kwargs)

        return verb
