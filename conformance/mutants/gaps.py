"""What the judge does not name yet: the mutant is killed, and the first finding says another thing.

A reason is removed with the gap; `tests/conformance/test_mutants.py` compares both with the matrix.
"""

from __future__ import annotations

_DECISIONS = "the corpus records no stage ahead of router_scores for models with YaRN"
_PREFILL = (
    "the first fault is in the prefill, of which the root alone is seen: too little to tell them "
    "apart"
)
_NUMBERS = "no diagnosis knows a forward that is wrong in this way: it sees numbers that differ"

# By number. With all stages shown, and with logits alone.
SHOWN: dict[str, str] = {"M075": _DECISIONS, "M079": _DECISIONS}
LOGITS_ONLY: dict[str, str] = {
    "M049": "no diagnosis knows a forward in which two rows of a tree lie in one slot",
    "M051": _PREFILL,
    "M072": "an answer of four rows for one is refused for its form, without a rule",
    "M073": _NUMBERS,
    "M082": _NUMBERS,
    "M083": _NUMBERS,
    "M093": _NUMBERS,
    "M100": _NUMBERS,
    "M152": "trees of 65 nodes are too large for the forwards that a diagnosis does again",
}
