"""Which known way of being wrong, or which two together, explain every row of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.xray_evidence import Evidence
from kdtr.conformance.xray_fit import Precision
from kdtr.conformance.xray_models import LAYER_STEP, N_TOKENS, AttentionXray
from kdtr.conformance.xray_optics import OTHER_OPTICS, OtherOptics, measured_optics
from kdtr.conformance.xray_patterns import PATTERNS
from kdtr.conformance.xray_replay import RULES, Pattern, SeenRow, SeesOtherwise, together


@dataclass(frozen=True, slots=True)
class Explanation:
    """What explains all rows of a layer: patterns of rows, and optics; none of both: the rules."""

    pattern: Pattern = RULES
    second: Pattern = RULES
    optics: OtherOptics | None = None


def explanation(evidence: Evidence, of: np.ndarray) -> Explanation | None:
    """The first that explains every row."""
    for pattern in _of_other_layers(evidence.model, of):
        if evidence.explains(pattern, None, of):
            return Explanation(pattern)
    for optics in (*OTHER_OPTICS, *_measured(evidence, of)):
        if evidence.explains(RULES, optics, of):
            return Explanation(optics=optics)
    for pattern in PATTERNS:
        if evidence.explains(pattern, None, of):
            return Explanation(pattern)
    # Two at once: what is visible does not depend on optics or positions.
    plain = np.array(
        [
            b
            for b in of
            if evidence.model.lenses[b].pair is None and evidence.model.lenses[b].mark is None
        ]
    )
    visible = [one for one in (RULES, *PATTERNS) if evidence.explains(one, None, plain)]
    first, second = visible, [*PATTERNS]
    if RULES in visible:  # all that is wrong are distances
        first = [one for one in visible if one.stage == "positions"]
        second = [one for one in visible if one.stage != "positions"]
    for pattern in first:
        for other in second:
            both = together(pattern, other)
            if both is not None and evidence.explains(both, None, of):
                return Explanation(pattern, other)
    for pattern in visible:
        for optics in OTHER_OPTICS:
            if evidence.explains(pattern, optics, of):
                return Explanation(pattern, optics=optics)
    return None


def _of_other_layers(model: AttentionXray, of: np.ndarray) -> Iterator[Pattern]:
    """Latents of another layer are rolled: which layer's rows this one reads."""
    layer = model.lenses[of[0]].layer
    for other in range(model.config.num_hidden_layers):
        if other == layer:
            continue
        roll = LAYER_STEP * (other - layer)

        def columns_of(committed_only: bool, roll: int = roll) -> SeesOtherwise:
            def seen(row: SeenRow) -> SeenRow:
                return SeenRow(
                    row.own,
                    tuple(
                        cell
                        if committed_only and not cell.name.startswith("slot")
                        else cell._replace(token=(cell.token + roll) % N_TOKENS)
                        for cell in row.visible
                    ),
                )

            return seen

        for committed_only in (True, False):
            which = "committed rows" if committed_only else "all rows"
            yield Pattern(
                f"{which} are read as layer {other} wrote them",
                "cache_c_kv",
                ("COMMIT-1", "COMMIT-3", "SLOT-1") if committed_only else ("MLA-3", "SLOT-1"),
                otherwise=columns_of(committed_only),
            )


def _measured(evidence: Evidence, of: np.ndarray) -> Iterator[OtherOptics]:
    """Any other softmax scale, or factor of the rotary part: from the weights themselves."""
    factors: dict[str, list[float]] = {"mark": [], "turn": []}
    for reading, row in zip(evidence.readings, evidence.rows(RULES), strict=True):
        tokens = np.array([cell.token for cell in row.visible])
        distances = np.array([row.own.position - cell.position for cell in row.visible])
        scores = evidence.right.scores(tokens, distances)
        own = int(np.argmax(tokens == row.own.token))
        for b in of:
            relative = scores[b] - scores[b, own]
            far = int(np.argmax(abs(relative)))
            seen = reading.weights[b, [tokens[far], row.own.token]]
            alone = (tokens == tokens[far]).sum() == 1
            if abs(relative[far]) > 1 and (seen > evidence.precision.smallest).all() and alone:
                kind = "turn" if evidence.model.lenses[b].mark is None else "mark"
                factors[kind].append(float(np.log(seen[0] / seen[1]) / relative[far]))
    turn = float(np.median(factors["turn"])) if factors["turn"] else 1.0
    mark = float(np.median(factors["mark"])) if factors["mark"] else turn
    if mark > 0 and turn > 0:
        yield measured_optics(mark, (turn / mark) ** 0.5)


def wider_dtype(evidence: Evidence, of: np.ndarray) -> str | None:
    """The dtype whose rounding would explain what the declared one does not."""
    for dtype in ("float16", "bfloat16"):
        precision = Precision(dtype, evidence.precision.sums)
        if precision.u > evidence.precision.u and evidence.explains(RULES, None, of, precision):
            return dtype
    return None
