"""The judge: records golden bundles with the reference, and holds engines against them."""

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.engine_loader import load_engine
from kdtr.conformance.finding import CaseResult, Compared, Finding, Verdict
from kdtr.conformance.gate import GateResult, Selection, run_gate

__all__ = [
    "CaseResult",
    "Compared",
    "Finding",
    "GateResult",
    "GoldenBundle",
    "Selection",
    "Verdict",
    "load_engine",
    "run_gate",
]
