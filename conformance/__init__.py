"""The judge: records golden bundles with the reference, and holds engines against them."""

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.engine_loader import load_engine
from kdtr.conformance.expectations import Expectations
from kdtr.conformance.expectations_file import read_expectations
from kdtr.conformance.finding import CaseResult, Compared, Finding, Verdict
from kdtr.conformance.gate import GateResult, Selection, run_gate

__all__ = [
    "CaseResult",
    "Compared",
    "Expectations",
    "Finding",
    "GateResult",
    "GoldenBundle",
    "Selection",
    "Verdict",
    "load_engine",
    "read_expectations",
    "run_gate",
]
