"""A verdict as user properties of a test: what JUnit files show, and all that workers pass on."""

from __future__ import annotations

from collections.abc import Iterable

from kdtr.conformance.finding import CaseResult, Verdict

CLOSE = "close"  # the mode of what closing a model did
_CLOSED = "kdtr_close_expected_by"
NO_ENGINE = ("kdtr_engine", "none")  # of a test that found that the engine cannot be made
NOT_ASKED = "not asked"  # the one word that is no verdict of the gate
Properties = list[tuple[str, object]]


def properties(bundle: str, result: CaseResult) -> Properties:
    """By names that begin with kdtr_; `bundle` is what the test's id begins with."""
    rules = dict.fromkeys(rule for finding in result.findings for rule in finding.rules)
    stages = dict.fromkeys(finding.stage for finding in result.findings)
    return [
        ("kdtr_bundle", bundle),
        ("kdtr_case", result.case),
        ("kdtr_mode", result.mode),
        ("kdtr_verdict", result.verdict.value),
        ("kdtr_comparisons", result.comparisons),
        ("kdtr_rows", result.rows),
        ("kdtr_error_per_bound", "" if result.headroom is None else f"{result.headroom:.3g}"),
        ("kdtr_points_blocked", result.blocked),
        ("kdtr_not_checked", result.not_checked),
        ("kdtr_stages", " ".join(stages)),
        ("kdtr_rules", " ".join(rules)),
        ("kdtr_expected_by", " ".join(sorted(result.expected))),
        ("kdtr_counted", int(result.counted)),
    ]


def result_of(told: Iterable[tuple[str, object]]) -> CaseResult | None:
    """The result again, without its findings; None where the properties are not of a verdict."""
    found = {name: str(value) for name, value in told}
    if found.get("kdtr_verdict", NOT_ASKED) == NOT_ASKED:
        return None
    error = found["kdtr_error_per_bound"]
    return CaseResult(
        found["kdtr_bundle"],
        found["kdtr_case"],
        found["kdtr_mode"],
        Verdict(found["kdtr_verdict"]),
        comparisons=int(found["kdtr_comparisons"]),
        rows=int(found["kdtr_rows"]),
        headroom=float(error) if error else None,
        blocked=int(found["kdtr_points_blocked"]),
        not_checked=int(found["kdtr_not_checked"]),
        expected=set(found["kdtr_expected_by"].split()),
        counted=bool(int(found["kdtr_counted"])),
    )


def excused_close(result: CaseResult) -> tuple[str, object]:
    """What closing a bundle's model did wrong and may, as a property of the last item's end."""
    return (_CLOSED, " ".join(sorted(result.expected)))


def closed(bundle: str, told: Iterable[tuple[str, object]]) -> CaseResult | None:
    """The result again, without its findings."""
    found = {name: str(value) for name, value in told}
    if _CLOSED not in found:
        return None
    expected = set(found[_CLOSED].split())
    return CaseResult(bundle, "all", CLOSE, Verdict.EXCUSED, expected=expected)


def is_ours(told: Iterable[tuple[str, object]]) -> bool:
    return any(name == "kdtr_bundle" for name, _ in told)
