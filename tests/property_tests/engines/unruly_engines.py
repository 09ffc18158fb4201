"""The reference with what a campaign must survive: an end of the process, a long wait, a fault."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdtr.conformance import load_engine
from kdtr.contract import Acceptance


def make_engine(does: str = "", at_load: int = 3, once: str = "") -> Any:
    """An engine that loses itself at its so manyth load of a model (0: when it is made).

    does  "exit", "hang", or a signal's name; "wrong": the root after a commit is another one;
          "bare": it offers only what every engine must; "nothing": not even that
          "half a pair": it raises a text that UTF-8 does not hold; "base": a BaseException
    once  a file that says that it has happened: not again
    """
    engine = _Unruly(does, at_load, once)
    if at_load == 0:
        engine.lose()
    return engine


class _Unruly:
    loads = 0

    def __init__(self, does: str, at_load: int, once: str) -> None:
        self._engine = load_engine("kdtr.reference:make_engine")
        self.info = self._engine.info
        if does == "nothing":
            self.info = replace(self.info, verbs=frozenset())
        if does == "bare":
            bare = frozenset({"prefill", "verify", "commit"})
            self.info = replace(self.info, verbs=bare)
        self._does, self._at_load, self._once = does, at_load, once

    def load(self, source: Any) -> Any:
        self.loads += 1
        if self.loads == self._at_load:
            self.lose()
        model = self._engine.load(source)
        return _WrongModel(model) if self._does == "wrong" else model

    def lose(self) -> None:
        if self._once and Path(self._once).exists():
            return
        if self._once:
            Path(self._once).touch()
        if self._does == "exit":
            os._exit(7)
        if self._does == "half a pair":
            raise RuntimeError("boom \ud800")
        if self._does == "base":
            raise BaseException("no Exception")
        if self._does == "hang":
            time.sleep(600)
        if self._does.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self._does])


class _WrongModel:
    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open(self, *, max_len: int) -> Any:
        return _WrongSession(self._model.open(max_len=max_len))


class _WrongSession:
    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def commit(self, acceptance: Acceptance) -> None:
        self._session.commit(Acceptance(acceptance.path, acceptance.bonus + 1))
