"""Smoke: plain decoding and chains, before all other cases of a bundle.

No branch is involved in them. Where they fail, every other case would fail for the same reason, and
say it less plainly: those are blocked, mode by mode, as another mode may use other verbs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kdtr.conformance.bundle import GoldenCase
from kdtr.conformance.case import CaseInput
from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.state_script import CASE, SCRIPT

ROOTS = "the adapter or the plain forward is wrong: trees were not yet involved"
CHAIN = (
    "the adapter, or how it verifies and commits several rows, is wrong: trees with branches were "
    "not yet involved"
)


def is_roots(case: CaseInput) -> bool:
    """Whether every tree is the root alone: plain decoding (FWD-2)."""
    return all(len(entry.tree) == 1 for entry in case.rounds)


def is_chain(case: CaseInput) -> bool:
    """Whether no tree has a branch: causal verification (FWD-5)."""
    trees = [entry.tree for entry in case.rounds]
    return all(tree.parents == tuple(range(-1, len(tree) - 1)) for tree in trees)


def smoke_first(cases: Iterable[GoldenCase]) -> list[GoldenCase]:
    """Lone roots, then chains, then all others; else in their order."""
    return sorted(cases, key=lambda case: (not is_chain(case.inputs), not is_roots(case.inputs)))


@dataclass(slots=True)
class Smoke:
    """Which modes of one bundle's model have failed without a branch."""

    bundle: str
    _failed: dict[str, CaseResult] = field(default_factory=dict)  # the first failure, by mode

    def blocked(self, case: CaseInput, mode: str) -> CaseResult | None:
        """The result of a case that need not be driven; None where nothing blocks it."""
        result = self._blocked(case.alias, mode, self._failed.get(mode), len(case.points()))
        if result is not None:
            result.branched = not is_chain(case)
        return result

    def blocked_script(self) -> CaseResult | None:
        """The same of the script, which looks at no numbers: what raises in plain decoding does
        so in each of its checks."""
        failed = self._failed.get("stepwise")
        raised = failed is not None and failed.verdict is Verdict.ERROR
        return self._blocked(CASE, SCRIPT, failed if raised else None, 1)

    def saw(self, case: CaseInput, result: CaseResult) -> None:
        """Keep the failure of a smoke case, and put the blame into its findings."""
        if not is_chain(case) or not result.verdict.is_bad:
            return
        blame = ROOTS if is_roots(case) else CHAIN
        result.findings = [
            replace(finding, blame=blame) if finding.verdict.is_bad else finding
            for finding in result.findings
        ]
        self._failed.setdefault(result.mode, result)

    def _blocked(
        self, case: str, mode: str, by: CaseResult | None, points: int
    ) -> CaseResult | None:
        if by is None:
            return None
        return CaseResult(
            self.bundle,
            case,
            mode,
            Verdict.BLOCKED,
            blocked=points,
            blocked_by=f"{by.case} / {by.mode}",
        )
