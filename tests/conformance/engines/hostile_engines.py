"""The host engine behind a wrapper that changes what it answers, shows, or does with its inputs.

`hostile_engines:make_engine` returns the engine that a test has put into `NEXT`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

from kdtr.conformance import load_engine

NEXT: list[Any] = []

# answer(original, *args, **kwargs) in place of original(*args, **kwargs)
Answer = Callable[..., Any]
# show(trace, stage, layer, array) in place of trace(stage, layer, array)
Show = Callable[[Any, str, "int | None", Any], None]


def make_engine() -> Any:
    return NEXT[-1]


def raising(error: BaseException) -> Answer:
    """An answer that raises here, in the engine's file."""

    def answer(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    return answer


def pressing_ctrl_c() -> Answer:
    """As the user does it while the engine runs."""
    return lambda original, *args, **kwargs: signal.raise_signal(signal.SIGINT)


def returning(value: Any) -> Answer:
    return lambda original, *args, **kwargs: value


def changing(change: Callable[[Any], Any]) -> Answer:
    """The honest answer, changed."""
    return lambda original, *args, **kwargs: change(original(*args, **kwargs))


class Hostile:
    """An engine; `answers` by verb, with open, load, close, model_close, committed_len and root.

    info  maps the honest info to another
    show  what becomes of each trace
    """

    def __init__(
        self,
        answers: Mapping[str, Answer] | None = None,
        *,
        info: Callable[[Any], Any] = lambda honest: honest,
        show: Show | None = None,
    ) -> None:
        self._engine = load_engine("host")
        self._answers = dict(answers or {})
        self._info = info
        self._show = show

    @property
    def info(self) -> Any:
        return self._info(self._engine.info)

    def load(self, source: Any) -> Any:
        return self.answered("load", self._load, source)

    def _load(self, source: Any) -> Any:
        return _Model(self, self._engine.load(source))

    def answered(self, verb: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._show is not None and "trace" in kwargs:
            show, trace = self._show, kwargs["trace"]
            kwargs["trace"] = lambda stage, layer, array: show(trace, stage, layer, array)
        if verb in self._answers:
            return self._answers[verb](original, *args, **kwargs)
        return original(*args, **kwargs)


class _Model:
    def __init__(self, engine: Hostile, model: Any) -> None:
        self._engine = engine
        self._model = model

    def open(self, *, max_len: int) -> Any:
        return self._engine.answered("open", self._open, max_len=max_len)

    def _open(self, *, max_len: int) -> Any:
        return _Session(self._engine, self._model.open(max_len=max_len))

    def close(self) -> None:
        return self._engine.answered("model_close", self._model.close)


class _Session:
    def __init__(self, engine: Hostile, session: Any) -> None:
        self._engine = engine
        self._session = session

    @property
    def committed_len(self) -> Any:
        return self._engine.answered("committed_len", lambda: self._session.committed_len)

    @property
    def root(self) -> Any:
        return self._engine.answered("root", lambda: self._session.root)

    def __getattr__(self, verb: str) -> Any:
        original = getattr(self._session, verb)
        return lambda *args, **kwargs: self._engine.answered(verb, original, *args, **kwargs)
