"""Asking an engine: a session by prefill, verify and commit, logits only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kdtr.conformance.host_array import Numbers, host_copy, host_integer
from kdtr.conformance.observe import as_verified
from kdtr.conformance.raised import RAISED, told, words
from kdtr.conformance.xray_sessions import Script, Step
from kdtr.contract import Acceptance, EngineError, EngineInfo, Model


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The logits [n, w] of one verify."""

    script: Script
    step: Step
    logits: np.ndarray


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that no logit shows: what was raised, or an integer of the session.

    ended  whether the session ended there
    """

    script: Script
    point: str
    stage: str
    text: str
    rules: tuple[str, ...] = ()
    ended: bool = True


@dataclass(slots=True)
class Answers:
    """What a model's sessions showed."""

    verified: list[Answer] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)


def ask(model: Model, info: EngineInfo, scripts: Iterable[Script], vocab_size: int) -> Answers:
    """Every session in turn; one that raises ends, and the next begins."""
    answers = Answers()
    for script in scripts:
        run = _Run(model, info, script, answers, vocab_size)
        try:
            run.all()
        except EngineError as error:
            run.remark(run.stage or run.verb, words(error), run.rules)
        except RAISED as error:
            run.remark(run.verb, f"{run.verb}() raised {told(error)}")
    return answers


class _Run:
    """One session; `stage` and `rules` are those of what is being checked."""

    def __init__(
        self,
        model: Model,
        info: EngineInfo,
        script: Script,
        answers: Answers,
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._model, self._info, self._script, self._answers = model, info, script, answers
        self._session: Any = None
        self._told: set[str] = set()
        self.point = self.verb = "open"
        self.stage = ""
        self.rules: tuple[str, ...] = ()

    def remark(
        self, stage: str, text: str, rules: tuple[str, ...] = (), *, ended: bool = True
    ) -> None:
        self._answers.remarks.append(Remark(self._script, self.point, stage, text, rules, ended))

    def all(self) -> None:
        script = self._script
        self._session = self._model.open(max_len=script.max_len)
        for number, chunk in enumerate(script.chunks):
            self.point = f"chunk{number}"
            self._prefill(list(chunk))
        length = sum(map(len, script.chunks))
        first = script.steps[0].tree.tokens[0]
        self._root(first, "whose logit is twice any other's")
        for step in script.steps:
            self.point = f"round{step.number}"
            self._answers.verified.append(Answer(script, step, self._logits(step)))
            self._call("commit", Acceptance(step.path, step.bonus))
            length += len(step.path)
            self._length(length)
            self._root(step.bonus, "the bonus that was committed")
        self.point = "close"
        self._call("close")

    def _call(self, verb: str, *arguments: Any) -> Any:
        self.verb, self.stage, self.rules = verb, "", ()
        method: Callable[..., Any] = getattr(self._session, verb)
        return method(*arguments)

    def _prefill(self, chunk: list[int]) -> None:
        """It returns the root that the session then has (FWD-1)."""
        returned, self.stage = self._call("prefill", chunk), "root"
        token, root = host_integer("prefill()", returned), self._session.root
        if root is not None and token != host_integer("root", root):
            self.rules = ("FWD-1",)
            raise EngineError(
                f"prefill() returned {token}, the session's root is {root}; expected one"
            )

    def _logits(self, step: Step) -> np.ndarray:
        verified = as_verified(self._call("verify", step.tree))
        if verified.logits is None:
            raise EngineError("verify() shows no logits; an x-ray reads nothing else")
        logits = host_copy("verify() logits", verified.logits, Numbers.FLOATING)
        wanted = (len(step.tree), self._vocab_size)
        if logits.shape != wanted:
            raise EngineError(f"verify() returned logits {logits.shape}; expected {wanted}")
        return logits

    def _root(self, token: int, why: str) -> None:
        """The root is replaced where that is offered; a session under another one ends."""
        found, self.stage = self._session.root, "root"
        root = None if found is None else host_integer("root", found)
        if root == token:
            return
        has = "there is no root (None)" if root is None else f"the root is {root}"
        text = f"after {self.verb}() {has}; expected {token}, {why}"
        self.rules = ("FWD-1",) if self.verb == "prefill" else ("COMMIT-2",)
        if "set_root" not in self._info.verbs:
            raise EngineError(text)
        self.remark(self.stage, text, self.rules, ended=False)
        self._call("set_root", token)

    def _length(self, wanted: int) -> None:
        self.stage = "committed_len"
        length = host_integer("committed_len", self._session.committed_len)
        if length != wanted and "committed_len" not in self._told:
            self._told.add("committed_len")
            text = f"committed_len is {length} after the commit; expected {wanted}"
            self.remark("committed_len", text, ("COMMIT-2",), ended=False)
