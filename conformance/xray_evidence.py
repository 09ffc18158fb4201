"""What an attention model showed, beside what the rules or any pattern would show of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kdtr.conformance.xray_drive import Answer
from kdtr.conformance.xray_fit import Precision, log_bound, misfit, worst
from kdtr.conformance.xray_models import AttentionXray
from kdtr.conformance.xray_optics import Lenses, Optics, OtherOptics, rule_optics
from kdtr.conformance.xray_reading import Reading
from kdtr.conformance.xray_replay import RULES, Pattern, Replay, SeenRow
from kdtr.conformance.xray_sessions import Script
from kdtr.conformance.xray_words import Seen, decode


class Evidence:
    """The rows of all sessions of a model, in order; what is derived is kept.

    worst_row  where to look first: the row that is farthest from the rules
    """

    def __init__(
        self,
        model: AttentionXray,
        answers: Sequence[Answer],
        readings: Sequence[Sequence[Reading]],
        precision: Precision,
    ) -> None:
        self.model = model
        self.answers = answers
        self.readings = [reading for one in readings for reading in one]
        self.precision = precision
        self.highest = max((answer.script.max_len for answer in answers), default=1)
        self.right_optics = rule_optics(model.config)
        self.worst_row = 0
        self._lenses: dict[OtherOptics | None, Lenses] = {}
        self._rows: dict[Pattern, list[SeenRow]] = {}

    def lenses(self, optics: OtherOptics | None) -> Lenses | None:
        """Under these optics; None where the model cannot show them."""
        if optics not in self._lenses:
            right: Optics | None = self.right_optics
            if optics is not None:
                right = optics.change(self.model, self.right_optics)
            if right is None:
                return None
            self._lenses[optics] = Lenses(self.model, right)
        return self._lenses[optics]

    @property
    def right(self) -> Lenses:
        lenses = self.lenses(None)
        assert lenses is not None
        return lenses

    def rows(self, pattern: Pattern) -> list[SeenRow]:
        """What every row of every answer sees under the pattern, in order."""
        if pattern not in self._rows:
            self._rows[pattern] = [*replayed(self.answers, pattern)]
        return self._rows[pattern]

    def bound(self, lenses: Lenses, precision: Precision | None = None) -> np.ndarray:
        return log_bound(self.model, lenses, precision or self.precision, self.highest)

    def explains(
        self,
        pattern: Pattern,
        optics: OtherOptics | None,
        of: np.ndarray,
        precision: Precision | None = None,
    ) -> bool:
        lenses = self.lenses(optics)
        if lenses is None:
            return False
        bound, smallest = self.bound(lenses, precision), (precision or self.precision).smallest
        if pattern.otherwise is not RULES.otherwise:  # rows of a later layer are off as it is
            bound = bound + (1 + lenses.largest) * len(self.model.lenses) / 512
        readings, rows = self.readings, self.rows(pattern)
        first = self.worst_row  # tells most patterns apart at once
        if worst(readings[first:][:1], rows[first:][:1], lenses, bound, smallest, of) > 1:
            return False
        return worst(readings, rows, lenses, bound, smallest, of) <= 1

    def places(self) -> Iterator[tuple[Answer, int]]:
        """Answer and row of every reading."""
        for answer in self.answers:
            for row in range(len(answer.step.tree)):
                yield answer, row

    def misfits(self, of: np.ndarray) -> np.ndarray:
        """Of every row under the rules: its worst lens."""
        lenses = self.right
        bound, smallest = self.bound(lenses), self.precision.smallest
        return np.array(
            [
                misfit(reading, row, lenses, bound, smallest)[of].max()
                for reading, row in zip(self.readings, self.rows(RULES), strict=True)
            ]
        )

    def decoded(self, index: int, answer: Answer, row: int, layer: int) -> Seen:
        return decode(
            self.readings[index],
            answer.step.tree.tokens[row],
            self.model,
            self.right,
            self.precision,
            self.highest,
            layer,
        )

    def first(self, where: np.ndarray) -> tuple[Answer, int]:
        return [*self.places()][int(np.argmax(where))]


def replayed(answers: Sequence[Answer], pattern: Pattern) -> Iterator[SeenRow]:
    """Every verify of every session, as the pattern has it."""
    sizes: dict[int, tuple[int, ...]] = {}
    script: Script | None = None
    replay = Replay(pattern, sizes)
    for answer in answers:
        if answer.script is not script:
            script, replay = answer.script, Replay(pattern, sizes)
            for chunk in script.chunks:
                replay.prefill(chunk)
        yield from replay.verify(answer.step.tree)
        replay.commit(answer.step.path)


def as_shown(row: SeenRow) -> tuple[object, ...]:
    """A row without the names: tokens and distances are what logits show."""
    distances = sorted((cell.token, row.own.position - cell.position) for cell in row.visible)
    return (row.own.token, *distances)
