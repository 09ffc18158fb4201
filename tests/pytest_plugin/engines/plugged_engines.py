"""Engines for runs of the plugin, by name."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

from kdtr.conformance import load_engine


def _wrapped(verb: str, does: Any) -> Any:
    engine = load_engine("host")
    load = engine.load

    def loaded(source: Any) -> Any:
        model = load(source)
        open_session = model.open

        def opened(*, max_len: int) -> Any:
            session = open_session(max_len=max_len)
            setattr(session, verb, does)
            return session

        model.open = opened
        return model

    engine.load = loaded  # type: ignore[method-assign]
    return engine


def make_counted(log: str) -> Any:
    """The host engine; each one that is made leaves a line in the file `log`."""
    with open(log, "a") as file:
        print(os.getpid(), file=file)
    return load_engine("host")


def make_none() -> Any:
    raise RuntimeError("no device")


def make_dying() -> Any:
    """Its process ends in verify."""
    return _wrapped("verify", lambda *_, **__: os._exit(11))


def make_unclosable() -> Any:
    """A model that raises when it is closed."""

    class Model:
        def __init__(self, model: Any) -> None:
            self.open = model.open

        def close(self) -> None:
            raise OSError("device lost")

    engine = load_engine("host")
    load = engine.load
    engine.load = lambda source: Model(load(source))  # type: ignore[assignment, method-assign]
    return engine


def make_bare() -> Any:
    """prefill, verify and commit, and no stage."""
    engine = load_engine("host")

    class Engine:
        info = replace(
            engine.info, verbs=frozenset({"prefill", "verify", "commit"}), stages=frozenset()
        )
        load = staticmethod(engine.load)

    return Engine()


def make_fatal(how: str = "_exit") -> Any:
    """The host engine, whose verify() ends the process."""

    def verify(*_: Any, **__: Any) -> Any:
        if how == "_exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    return _wrapped("verify", verify)
