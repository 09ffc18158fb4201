"""What the judge does not name yet: the mutant is killed, and the first finding says another thing.

A reason is removed with the gap; `tests/conformance/test_mutants.py` compares both with the matrix.
"""

from __future__ import annotations

# By number. With all stages shown, and with logits alone.
SHOWN: dict[str, str] = {}
LOGITS_ONLY: dict[str, str] = {
    "M141": (
        "a row of padding lies where one of the tree should: which token it had, and at which "
        "slot, is the engine's own, so no forward that is done again has its latents"
    ),
}
