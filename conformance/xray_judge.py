"""From the logits of an attention model's sessions to findings: one for each fault.

First the rules are tried, layer by layer; then every known way of being wrong, alone and two
together, until one explains every row; then the difference is told in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from kdtr.conformance.finding import Finding, Verdict
from kdtr.conformance.xray_drive import Answer
from kdtr.conformance.xray_evidence import Evidence, as_shown
from kdtr.conformance.xray_explain import Explanation, explanation, wider_dtype
from kdtr.conformance.xray_fit import Precision
from kdtr.conformance.xray_models import RESERVED, AttentionXray
from kdtr.conformance.xray_optics import OtherOptics
from kdtr.conformance.xray_places import described, from_length, known_cells, length_at, place
from kdtr.conformance.xray_reading import Reading, read_logits
from kdtr.conformance.xray_replay import RULES, Pattern
from kdtr.conformance.xray_words import position_words, row_name, visibility_words


@dataclass(slots=True)
class Judgement:
    """Findings of one model, and how much was compared: rows, and numbers.

    known  of each finding whether it is a known way of being wrong, not a difference in words
    """

    findings: list[Finding] = field(default_factory=list)
    known: list[bool] = field(default_factory=list)
    rows: int = 0
    compared: int = 0
    headroom: float = 0.0


def judge_attention(
    model: AttentionXray,
    answers: Sequence[Answer],
    precision: Precision,
    readings: Sequence[Sequence[Reading]] | None = None,
) -> Judgement:
    """`readings` per answer and row, where they do not come from logits."""
    if readings is None:
        readings = [[read_logits(row) for row in answer.logits] for answer in answers]
    judge = _Judge(Evidence(model, answers, readings, precision))
    told = [(finding, True) for finding in (*judge.unreadable(), *judge.offset())][:1]
    if not told:
        told = [*judge.findings()]
    n_rows = sum(map(len, readings))
    return Judgement(
        [finding for finding, _ in told],
        [known for _, known in told],
        n_rows,
        n_rows * model.config.vocab_size,
        judge.headroom,
    )


class _Told(NamedTuple):
    """A difference of one row in words; differences of a kind become one finding."""

    kind: str
    stage: str
    text: str
    rules: tuple[str, ...]


class _Judge:
    """Findings from the evidence of one model."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.model = evidence.model
        self.headroom = 0.0

    def unreadable(self) -> Iterator[Finding]:
        """One for all rows whose logits are no numbers."""
        readings = self.evidence.readings
        for (answer, row), reading in zip(self.evidence.places(), readings, strict=True):
            if reading.unreadable:
                n = sum(bool(one.unreadable) for one in readings)
                text = f"{n} of {len(readings)} rows cannot be read: {reading.unreadable}"
                edge, rules = self._lost_from(), ("MASK-3", "FWD-4")
                if edge:
                    text += f"; they are those that see slot {edge} or a later one, and no others: "
                    text += "the rows of these slots are not where attention reads them"
                    rules = ("SLOT-1", "MASK-3")
                yield Finding(
                    Verdict.FAIL,
                    place(self.model.name, answer),
                    "logits",
                    text,
                    row_name(row, answer.step.tree.parents),
                    rules=rules,
                )
                return

    def _lost_from(self) -> int:
        """The slot such that exactly the rows that see it, or a later one, are unreadable; 0: none.

        The last slot that a row sees is its own. Of one tree at least some rows must be readable
        and others not: what every row of a forward reads alike may lie behind them all.
        """
        slots, lost, mixed = [], [], False
        readings = iter(self.evidence.readings)
        for answer in self.evidence.answers:
            first, n = length_at(answer), len(answer.step.tree)
            unreadable = [bool(next(readings).unreadable) for _ in range(n)]
            slots += [*range(first, first + n)]
            lost += unreadable
            mixed |= any(unreadable) and not all(unreadable)
        edge = min(slot for slot, is_lost in zip(slots, lost, strict=True) if is_lost)
        fits = all((slot >= edge) == is_lost for slot, is_lost in zip(slots, lost, strict=True))
        return edge if fits and mixed else 0

    def offset(self) -> Iterator[Finding]:
        """One where the reserved token, that nobody feeds, is shown by every row."""
        readings = self.evidence.readings
        if readings and all(reading.weights[0, RESERVED] != 0 for reading in readings):
            answer, row = next(self.evidence.places())
            yield self._finding(
                answer,
                row,
                "logits",
                f"logit {RESERVED}, of a token that nobody feeds, is never zero: the "
                "logits have an offset, or noise",
                "0",
                f"{readings[0].weights[0, RESERVED]:.3g} of the weight of all",
                ("FWD-4",),
            )

    def findings(self) -> Iterator[tuple[Finding, bool]]:
        """Layer by layer, and whether it is a known fault; one of all layers is told once.

        What can be told in words alone is told of the first layer that shows it: what is read of
        later ones takes the layers before them for right.
        """
        n_layers = self.model.config.num_hidden_layers
        layer_of = np.array([lens.layer for lens in self.model.lenses])
        told: dict[tuple[str, str], list[int]] = {}
        first: dict[tuple[str, str], tuple[Finding, bool]] = {}
        for layer in range(n_layers):
            in_words = any(not known for _, known in first.values())
            for finding, known in self._layer(layer, np.flatnonzero(layer_of == layer)):
                if in_words and not known and (finding.stage, finding.summary) not in told:
                    continue
                key = (finding.stage, finding.summary)
                told.setdefault(key, []).append(layer)
                first.setdefault(key, (finding, known))
        for key, layers in told.items():
            finding, known = first[key]
            if len(layers) < n_layers:
                names = ", ".join(map(str, layers))
                summary = f"in layer {names} only: {finding.summary}"
                finding = replace(finding, summary=summary)
            yield finding, known

    def _layer(self, layer: int, of: np.ndarray) -> Iterator[tuple[Finding, bool]]:
        misfits = self.evidence.misfits(of)
        finite = misfits[np.isfinite(misfits)]
        self.headroom = max(self.headroom, float(finite.max(initial=0.0)))
        if not (misfits > 1).any():
            return
        self.evidence.worst_row = int(np.argmax(misfits))
        found = explanation(self.evidence, of)
        if found is not None:
            for finding in self._explained(found, misfits, layer):
                yield finding, True
        elif (wider := wider_dtype(self.evidence, of)) is not None:
            yield self._imprecise(wider, misfits), False
        else:
            for finding in self._in_words(layer, misfits):
                yield finding, False

    def _explained(self, found: Explanation, misfits: np.ndarray, layer: int) -> Iterator[Finding]:
        for pattern in (found.pattern, found.second):
            if pattern is not RULES:
                yield self._of_pattern(pattern, layer)
        if found.optics is not None:
            yield self._of_optics(found.optics, misfits)

    def _of_pattern(self, pattern: Pattern, layer: int) -> Finding:
        """At the first row that the pattern changes."""
        changed = zip(self.evidence.rows(RULES), self.evidence.rows(pattern), strict=True)
        index, right, wrong = next(
            (index, *both)
            for index, both in enumerate(changed)
            if as_shown(both[0]) != as_shown(both[1])
        )
        answer, row = [*self.evidence.places()][index]
        if pattern.stage == "positions" and right.own.position != wrong.own.position:
            length = length_at(answer)
            expected = f"row {row} at {from_length(right.own.position, length)}"
            actual = f"at {from_length(wrong.own.position, length)}"
        else:
            seen = self.evidence.decoded(index, answer, row, layer)
            also, not_seen = visibility_words(seen, right, known_cells(answer))
            expected = f"sees {described(right)}"
            words = [f"also {also}"] if also else []
            words += [f"not {not_seen}"] if not_seen else []
            words += position_words(seen, right, length_at(answer))[:3] if not words else []
            actual = "; ".join(words)
        return self._finding(
            answer, row, pattern.stage, pattern.says, expected, actual, pattern.rules
        )

    def _of_optics(self, optics: OtherOptics, misfits: np.ndarray) -> Finding:
        answer, row = self.evidence.first(misfits > 1)
        expected = actual = ""
        wrong = optics.change(self.model, self.evidence.right_optics)
        if wrong is not None:
            for name in ("amplitude", "scale"):
                right_value, wrong_value = (
                    getattr(self.evidence.right_optics, name),
                    getattr(wrong, name),
                )
                if abs(wrong_value / right_value - 1) > 0.005:
                    expected, actual = f"{name} {right_value:.6g}", f"{wrong_value:.6g}"
        return self._finding(
            answer, row, optics.stage, optics.says(self.model), expected, actual, optics.rules
        )

    def _imprecise(self, dtype: str, misfits: np.ndarray) -> Finding:
        declared = self.evidence.precision.dtype
        answer, row = self.evidence.first(misfits > 1)
        return self._finding(
            answer,
            row,
            "scores",
            f"right, but only to the rounding of {dtype}: the declared {declared} is exceeded",
            "error/bound at most 1",
            f"{misfits[np.isfinite(misfits)].max(initial=0.0):.3g}",
            ("NUM-3",),
        )

    def _in_words(self, layer: int, misfits: np.ndarray) -> Iterator[Finding]:
        """One finding for what is seen, one for what is turned, or one for the weights."""
        by_kind: dict[str, list[tuple[Answer, int, _Told, str]]] = {}
        rows = zip(self.evidence.places(), self.evidence.rows(RULES), strict=True)
        for index, ((answer, row), wanted) in enumerate(rows):
            if misfits[index] <= 1:
                continue
            seen = self.evidence.decoded(index, answer, row, layer)
            name, known = row_name(row, answer.step.tree.parents), known_cells(answer)
            also, not_seen = visibility_words(seen, wanted, known)
            turned = position_words(seen, wanted, length_at(answer))
            entries: list[_Told] = []
            if also:
                kind, stage, rules = _extra(also)
                entries.append(_Told(kind, stage, f"{name} also saw {also}", rules))
            if not_seen:
                accepted = "slot" in not_seen
                rules = ("COMMIT-3", "MASK-1") if accepted else ("MASK-2", "MASK-1")
                stage = "cache_c_kv" if accepted else "mask"
                text = f"{name} did not see {not_seen}"
                entries.append(_Told(f"not {stage}", stage, text, rules))
            if turned and not also and not not_seen:
                nodes = [words for words in turned if words.startswith("node")]
                stage = "positions" if nodes else "cache_k_pe"
                rules = ("POS-1",) if nodes else ("COMMIT-1", "COMMIT-3")
                text = f"{name}: {'; '.join(turned[:4])}"
                entries.append(_Told(stage, stage, text, rules))
            if not entries:
                text = self._weight_words(index, name)
                entries.append(_Told("scores", "scores", text, ("MLA-3",)))
            for told in entries:
                by_kind.setdefault(told.kind, []).append((answer, row, told, described(wanted)))
        if "foreign" in by_kind:  # latents are no tokens any more: all else follows
            by_kind = {"foreign": by_kind["foreign"]}
        if len(by_kind) > 1:
            by_kind.pop("scores", None)
        for (answer, row, told, wanted_text), *more in by_kind.values():
            text = told.text
            if more:
                text += f"; {len(more)} more row{'s' * (len(more) > 1)} likewise"
            yield self._finding(
                answer, row, told.stage, text, f"sees {wanted_text}", "", told.rules
            )

    def _weight_words(self, index: int, name: str) -> str:
        """The weight that is farthest from what it should be, and by what factor."""
        reading, row = self.evidence.readings[index], self.evidence.rows(RULES)[index]
        lenses = self.evidence.right
        tokens = np.array([cell.token for cell in row.visible])
        distances = np.array([row.own.position - cell.position for cell in row.visible])
        wanted = lenses.weights(tokens, distances)
        own = row.own.token
        both = (wanted > 0) & (reading.weights > 0)
        both &= (wanted[:, [own]] > 0) & (reading.weights[:, [own]] > 0)
        relative = np.zeros_like(wanted)
        unit = np.where(reading.weights[:, [own]] > 0, reading.weights[:, [own]], 1)
        relative[both] = np.log((reading.weights / unit)[both])
        relative[both] -= np.log((wanted / wanted[:, [own]])[both])
        b, token = np.unravel_index(np.argmax(abs(relative)), relative.shape)
        cell = next((cell for cell in row.visible if cell.token == token), row.own)
        return (
            f"{name}: {self.model.lenses[b]}: the weight of {cell.name} against the row itself is "
            f"{np.exp(relative[b, token]):.4g} times what it should be"
        )

    def _finding(
        self,
        answer: Answer,
        row: int,
        stage: str,
        summary: str,
        expected: str,
        actual: str,
        rules: tuple[str, ...],
    ) -> Finding:
        return Finding(
            Verdict.FAIL,
            place(self.model.name, answer),
            stage,
            summary,
            row_name(row, answer.step.tree.parents),
            expected,
            actual,
            rules,
            n_rows=row,
        )


def _extra(also: str) -> tuple[str, str, tuple[str, ...]]:
    """Kind, stage and rules of what was seen besides."""
    if "never fed" in also:
        return "foreign", "c_kv", ("MLA-2", "SLOT-1")
    if "without a token" in also:
        return "unwritten", "mask", ("MASK-3", "SLOT-1")
    if "rejected" in also:
        return "rejected", "mask", ("COMMIT-4", "MASK-3")
    if "again" in also:
        return "again", "cache_c_kv", ("COMMIT-3", "SLOT-2")
    return "also", "mask", ("MASK-2",)
