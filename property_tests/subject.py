"""An engine under a law: what it declares, and the plainest questions to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis.vendor.pretty import RepresentationPrinter

from kdtr.conformance.engine_loader import importable_here, load_engine
from kdtr.contract import Engine, EngineError, NumericProfile, Session
from kdtr.property_tests.strategies import MAX_LEN, SmallModel
from kdtr.property_tests.watch import current
from kdtr.property_tests.watched import WatchedModel, WatchedSession

REFERENCE = "kdtr.reference:make_engine"
HOST = "kdtr.engine:make_engine"


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine by name and options, loaded; its sessions are watched (`watch.py`)."""

    label: str
    engine: Engine
    name: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(self.label)

    @property
    def profile(self) -> NumericProfile:
        return self.engine.info.profile

    @property
    def deterministic(self) -> bool:
        """Whether the same calls in another session give the same bits (NUM-4)."""
        return self.profile.deterministic

    @property
    def exact(self) -> bool:
        """Whether laws between different calls hold bit for bit."""
        return self.profile.deterministic and self.profile.batch_invariant

    def as_declared(self, model: SmallModel) -> SmallModel:
        """The model under the engine's conventions: what the truth is asked about (NORM-1)."""
        declared = self.engine.info.conventions.get("latent_norm_eps")
        if declared is None:
            return model
        return replace(model, config=model.config.replace(latent_norm_eps=float(declared)))

    def offers(self, *verbs: str) -> bool:
        """Whether it has these verbs: for laws that can do without them."""
        return self.engine.info.verbs.issuperset(verbs)

    def load(self, model: SmallModel) -> WatchedModel:
        """Loaded once in an example: its sessions live in one model, as in production."""
        example = current()
        if example is None:
            loaded = self.engine.load((model.config, model.tensors()))
        else:
            loaded = example.model(self.engine, model)
        return WatchedModel(self.label, self.engine.info.verbs, loaded, model)

    def open(self, model: SmallModel, *, max_len: int = MAX_LEN) -> WatchedSession:
        return self.load(model).open(max_len=max_len)

    def committed(
        self, model: SmallModel, tokens: Sequence[int], *, max_len: int = MAX_LEN
    ) -> WatchedSession:
        """A session with these tokens in its cache; none is a session as it opens."""
        session = self.open(model, max_len=max_len)
        if tokens:
            session.prefill(tokens)
        return session


def other_options(options: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a twin. Raises EngineError where they are the first's: nothing is compared."""
    merged = {**options, **changed}
    if merged == dict(options):
        raise EngineError(
            f"the twin's options {dict(changed)} change nothing; expected a second configuration, "
            "such as another page size"
        )
    return merged


def load_subject(label: str, name: str, options: Mapping[str, Any] | None = None) -> Subject:
    options = dict(options or {})
    with importable_here():
        engine = load_engine(name, options)
    return Subject(label, engine, name, tuple(options.items()))


def causal_rows(session: Session, tokens: Sequence[int]) -> np.ndarray:
    """Logits [n, w] of these tokens behind the committed ones, by the plain causal forward."""
    n, committed_len = len(tokens), session.committed_len
    positions = committed_len + np.arange(n)
    mask = np.tri(n, committed_len + n, committed_len, dtype=bool)
    return np.array(session.forward_tokens(tokens, positions, mask))


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What an engine shows of one row.

    logits  [w], or None where it shows the token alone
    """

    logits: np.ndarray | None
    target: int
