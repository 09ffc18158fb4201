"""The questions of a golden bundle as a file of their own: what an engine may see, and no answer.

`kdtr questions` writes it (docs/offline.md): the model, the cases' inputs, and the id that a file
of answers repeats. The other side is offline_answers.py.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from kdtr.conformance.bundle import GoldenBundle
from kdtr.contract import BundleError
from kdtr.kdtr_format import config_tensors, write_bundle

QUESTIONS = "questions"  # the kind in the metadata
ID = "questions/id"  # the tensor that says what is asked: u8 [32]


def write_questions(golden: GoldenBundle, out: str | os.PathLike[str]) -> None:
    """Write the questions of an open golden bundle.

    Raises BundleError where `out` is the golden bundle itself.
    """
    if Path(out).exists() and Path(out).samefile(golden.path):
        raise BundleError(f"{out} is the golden bundle; give --out another name")
    inputs = {
        f"input/{case.inputs.alias}/{name}": array
        for case in golden.cases
        for name, array in case.inputs.tensors().items()
    }
    weights = {f"weights/{name}": array for name, array in golden.weights.items()}
    model = {"name": golden.model_name, "weights_sha256": golden.weights_sha256}
    cases = [{"alias": case.inputs.alias, "id": case.inputs.case_id} for case in golden.cases]
    write_bundle(
        Path(out),
        {**config_tensors(golden.config), **weights, **inputs, ID: questions_id(golden)},
        {"kind": QUESTIONS, "model": model, "cases": cases},
    )


def questions_id(golden: GoldenBundle) -> np.ndarray:
    """u8 [32], a SHA-256 that changes with the model and with anything that a case asks."""
    digest = hashlib.sha256()
    for name, array in sorted(config_tensors(golden.config).items()):
        digest.update(f"{name} {array.dtype.name} ".encode() + array.tobytes() + b"\n")
    for case in sorted(golden.cases, key=lambda case: case.inputs.alias):
        digest.update(f"{case.inputs.alias} {case.inputs.case_id}\n".encode())
    return np.frombuffer(digest.digest(), np.uint8)
