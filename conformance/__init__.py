"""The judge: records golden bundles with the reference, and holds engines against them.

The names are imported when they are first used: the `kdtr` command forks (command.py) before
anything heavy is loaded, and its module lies in this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_FILES = {
    "bundle": ("GoldenBundle",),
    "engine_loader": ("load_engine",),
    "expectations": ("Expectations",),
    "expectations_file": ("read_expectations",),
    "finding": ("CaseResult", "Compared", "Finding", "Verdict"),
    "gate": ("GateResult", "Selection", "run_gate"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
