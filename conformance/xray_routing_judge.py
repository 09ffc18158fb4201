"""From the logits of a router's x-ray to a finding: the rules, every known fault, then words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from kdtr.conformance.finding import Finding, Verdict
from kdtr.conformance.xray_drive import Answer
from kdtr.conformance.xray_fit import Precision
from kdtr.conformance.xray_judge import Judgement
from kdtr.conformance.xray_places import place
from kdtr.conformance.xray_routing import FIRST, START, Route, RoutingXray, routed, rule_route
from kdtr.conformance.xray_words import row_name
from kdtr.contract import SIGMOID, SOFTMAX, ModelConfig


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which routers are wrong; `change` gives None where the model cannot show it."""

    says: str
    stage: str
    rules: tuple[str, ...]
    changes: dict[str, Any]


def _faults(config: ModelConfig) -> Iterator[Fault]:
    other = SOFTMAX if config.scoring_func == SIGMOID else SIGMOID
    weights, ids, factor = "expert_weights", "expert_ids", config.routed_scaling_factor
    yield Fault(
        f"router scores are the {other} of the logits, should be the {config.scoring_func}",
        "router_scores",
        ("MOE-1",),
        {"scoring_func": other},
    )
    yield Fault(
        "the correction bias is inside the expert weights",
        weights,
        ("MOE-3", "MOE-1"),
        {"biased_weights": True},
    )
    yield Fault(
        "the correction bias is not used for choosing",
        ids,
        ("MOE-1", "MOE-2"),
        {"biased_choice": False, "biased_groups": False},
    )
    yield Fault(
        "the correction bias is not in the groups' scores",
        ids,
        ("MOE-2",),
        {"biased_groups": False},
    )
    yield Fault(
        "experts of dropped groups compete with 0, should be excluded with -inf",
        ids,
        ("MOE-2",),
        {"mask": 0.0},
    )
    yield Fault("all groups stay eligible", ids, ("MOE-2",), {"groups": False})
    yield Fault(
        "a group's score is its best expert, should be the sum of its two best",
        ids,
        ("MOE-2",),
        {"group_best": 1},
    )
    yield Fault(
        "a group's score is the sum of all its experts, should be that of its two best",
        ids,
        ("MOE-2",),
        {"group_best": config.n_routed_experts},
    )
    yield Fault("ties go to the highest id", ids, ("MOE-2",), {"lowest_tie": False})
    yield Fault(
        "expert weights are not normalised"
        if config.norm_topk_prob
        else "expert weights are normalised, although norm_topk_prob is false",
        weights,
        ("MOE-3",),
        {"norm": not config.norm_topk_prob},
    )
    for power, words in ((0, "is not applied"), (2, "is applied twice")):
        yield Fault(
            f"routed_scaling_factor = {factor:g} {words}", weights, ("MOE-3",), {"power": power}
        )
    yield Fault(
        "every chosen expert gets the first one's weight",
        weights,
        ("MOE-3",),
        {"first_for_all": True},
    )
    n = config.n_shared_experts
    yield Fault(
        "one expert too many is chosen, and the shared ones are missing",
        ids,
        ("MOE-2", "MOE-4"),
        {"extra": 1, "shared": 0.0},
    )
    yield Fault("one expert too many is chosen", ids, ("MOE-2",), {"extra": 1})
    yield Fault("one expert too few is chosen", ids, ("MOE-2",), {"extra": -1})
    if n:
        yield Fault("the shared experts are missing", "mlp_out", ("MOE-4",), {"shared": 0.0})
        yield Fault(
            f"the shared experts are multiplied by routed_scaling_factor = {factor:g}",
            "mlp_out",
            ("MOE-4", "MOE-3"),
            {"shared": factor},
        )
    if n > 1:
        yield Fault(
            f"of {n} shared experts' width only the first is used",
            "mlp_out",
            ("MOE-4",),
            {"shared": 1 / n},
        )


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRow:
    """What a row showed: the weight of every expert [e], and of the shared ones."""

    token: int
    weights: np.ndarray
    shared: float


def read_routing(model: RoutingXray, token: int, logits: np.ndarray) -> RoutedRow | None:
    """None where the constant of the model is no number."""
    row = np.asarray(logits, dtype=np.float64)
    if not np.isfinite(row).all() or row[START] <= 0:
        return None
    shown = row[FIRST : FIRST + model.config.n_routed_experts + 1]
    weights = shown / (row[START] * model.one_expert())
    return RoutedRow(token, weights[:-1], float(weights[-1]))


def judge_routing(model: RoutingXray, answers: Sequence[Answer], precision: Precision) -> Judgement:
    """The rules, then every known fault, then words."""
    rows: list[RoutedRow] = []
    places: list[tuple[Answer, int]] = []
    for answer in answers:
        for i, token in enumerate(answer.step.tree.tokens):
            read = read_routing(model, token, answer.logits[i])
            if read is None:
                finding = Finding(
                    Verdict.FAIL,
                    place(model.name, answer),
                    "logits",
                    f"row {i} cannot be read: logit {START}, a constant, is "
                    f"{answer.logits[i][START]}",
                    rules=("MASK-3", "FWD-4"),
                )
                return Judgement([finding], [True], len(rows))
            rows.append(read)
            places.append((answer, i))
    table = model.logits() * (1 + model.config.rms_norm_eps) ** -0.5
    bias, right = model.biases(), rule_route(model.config)
    # An expert's output is stored at most nine times on its way, with what feeds it; so is START.
    bound = 16 * precision.u

    def errors(route: Route, *, ids_only: bool = False) -> Iterator[float]:
        """Of every row but those that an engine like this may decide either way."""
        for row in rows:
            wanted, gap = routed(route, model.config, table[row.token], bias)
            if route is not right and 0 < gap <= 4 * precision.u:
                continue
            if ids_only:
                yield _misfit(row.weights != 0, wanted != 0)
                continue
            shared = route.shared * model.config.n_shared_experts
            yield (
                max(
                    _misfit(row.weights, wanted),
                    _misfit(np.array([row.shared]), np.array([shared])),
                )
                / bound
            )

    of_rules = np.array([*errors(right)])
    headroom = float(of_rules[np.isfinite(of_rules)].max(initial=0.0))
    result = Judgement([], [], len(rows), len(rows) * model.config.vocab_size, headroom)
    if not (of_rules > 1).any():
        return result
    first = int(np.argmax(of_rules > 1))
    answer, i = places[first]
    wanted, _ = routed(right, model.config, table[rows[first].token], bias)
    found = next(
        (
            fault
            for ids_only in (False, True)
            for fault in _faults(model.config)
            if (fault.stage == "expert_ids" or not ids_only)
            and max(errors(replace(right, **fault.changes), ids_only=ids_only), default=inf) <= 1
        ),
        None,
    )
    if found is not None and not np.isinf(of_rules).any() and found.stage == "expert_ids":
        found = None  # by the experts alone it looks right: the weights are wrong
    where = row_name(i, answer.step.tree.parents)
    if found is None:
        found = _in_words(rows[first], wanted, int((of_rules > 1).sum()) - 1)
        result.known.append(False)
    else:
        result.known.append(True)
    result.findings.append(
        Finding(
            Verdict.FAIL,
            place(model.name, answer),
            found.stage,
            found.says,
            f"{where}, token {rows[first].token}",
            _weights(wanted, float(model.config.n_shared_experts)),
            _weights(rows[first].weights, rows[first].shared),
            found.rules,
        )
    )
    return result


def _misfit(seen: np.ndarray, wanted: np.ndarray) -> float:
    """The largest relative error; inf where one is zero and the other is not."""
    if ((seen != 0) != (wanted != 0)).any():
        return inf
    both = wanted != 0
    return float(abs(seen[both] / wanted[both] - 1).max(initial=0.0))


def _in_words(row: RoutedRow, wanted: np.ndarray, more: int) -> Fault:
    likewise = f"; {more} more row{'s' * (more > 1)} differ" if more else ""
    seen, expected = np.flatnonzero(row.weights).tolist(), np.flatnonzero(wanted).tolist()
    if seen != expected:
        says = f"experts {seen} were chosen, should be {expected}{likewise}"
        return Fault(says, "expert_ids", ("MOE-2",), {})
    ratio = row.weights[expected] / wanted[expected]
    says = "expert weights are " + ", ".join(f"{r:.4g}" for r in ratio)
    says += f" times what they should be{likewise}"
    if abs(ratio - 1).max() < 0.05:
        says = f"the shared experts differ{likewise}"
    return Fault(says, "expert_weights", ("MOE-3", "MOE-4"), {})


def _weights(weights: np.ndarray, shared: float) -> str:
    chosen = [f"{e}: {weights[e]:.4g}" for e in np.flatnonzero(weights)]
    return f"{', '.join(chosen)}; shared: {shared:.4g}"
