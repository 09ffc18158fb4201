"""Recording a golden bundle again from itself: its model, its questions, the truth of today.

So a bundle that no generated model of the corpus makes, an adopted one, is held to the same check
as the others: the same bytes from every machine.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.case import CaseInput, CasePlan
from kdtr.conformance.golden import record_bundle
from kdtr.contract import BundleError
from kdtr.kdtr_format import Bundle

ADOPTED = "adopted-"  # the file names of bundles that hold their own questions
_ALIGNMENT = 64  # bytes, as in the rest of the corpus


def adopted_bundles(directory: Path) -> list[Path]:
    """Those of a corpus, in the order of their names."""
    return sorted(directory.glob(f"{ADOPTED}*.kdtr"))


def record_again(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    without: Collection[str] = (),
) -> str:
    """Ask the truth the bundle's questions once more; returns the SHA-256 of the file written.

    without  ids of cases to leave out
    Raises BundleError for what is no golden bundle, CaseError for a case that cannot be recorded:
    both before anything is written.
    """
    bundle = GoldenBundle.open(path)
    try:
        plans = [_plan(c.inputs) for c in bundle.cases if c.inputs.case_id not in without]
        weights = {name: bundle.weights[name] for name in bundle.weights}
        about = _about(Path(path))
        return record_bundle(out, about, bundle.config, weights, plans, alignment=_ALIGNMENT)
    finally:
        bundle.close()


def _plan(case: CaseInput) -> CasePlan:
    return CasePlan(
        case.alias, case.why, case.rules, case.rounds, case.chunks, case.root, case.level
    )


def _about(path: Path) -> dict[str, object]:
    """What the metadata say of the model, but for what the recording adds."""
    with Bundle.open(path) as bundle:
        model = bundle.metadata.get("model")
    if not isinstance(model, dict):
        raise BundleError(f"{path}: model = {model!r}; expected what the bundle's model is")
    return {key: value for key, value in model.items() if key != "weights_sha256"}
