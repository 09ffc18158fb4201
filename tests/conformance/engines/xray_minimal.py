"""An engine that shows no more than it must: prefill, verify, commit, and the logits of verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planted_faults import FAULTS
from xray_faults import XRAY_FAULTS

from kdtr.conformance import load_engine
from kdtr.contract import Acceptance, DraftTree, Verified


class Session:
    """No snapshot, no trace, no set_root, no targets worth looking at."""

    def __init__(self, session: Any) -> None:
        self._session = session

    @property
    def committed_len(self) -> int:
        return self._session.committed_len

    @property
    def root(self) -> int | None:
        return self._session.root

    def prefill(self, tokens: Sequence[int]) -> int:
        return self._session.prefill(tokens)

    def verify(self, tree: DraftTree) -> Verified:
        verified = self._session.verify(tree)
        return Verified(verified.logits, (0,) * len(tree))

    def commit(self, acceptance: Acceptance) -> None:
        self._session.commit(acceptance)

    def close(self) -> None:
        self._session.close()


class Model:
    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config

    def open(self, *, max_len: int) -> Session:
        return Session(self._model.open(max_len=max_len))

    def close(self) -> None:
        self._model.close()


class Minimal:
    """Any engine of this repository, behind the least that the interface asks for."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def info(self) -> Any:
        least = frozenset({"prefill", "verify", "commit"})
        return replace(self._engine.info, verbs=least, stages=frozenset())

    def load(self, source: Any) -> Model:
        return Model(self._engine.load(source))


def make_engine(
    name: str = "host", fault: str = "", page_size: int = 4, split_size: int = 5, **options: Any
) -> Minimal:
    """The engine `name`; with `fault`, one of planted_faults or of xray_faults."""
    if name != "host":
        return Minimal(load_engine(name, options))
    engine: Any = load_engine("host", {"page_size": page_size, "split_size": split_size, **options})
    if fault:
        plant = XRAY_FAULTS[fault] if fault in XRAY_FAULTS else FAULTS[fault].plant
        plant(engine)
    return Minimal(engine)
