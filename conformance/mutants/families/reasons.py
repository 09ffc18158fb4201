"""Why a variant lives: what shows it is no case of the corpus, or it is no fault.

A reason holds for the labels that it matches. `tests/conformance/test_families.py` compares them
with docs/mutant-families.md: one that explains nothing is removed.
"""

from __future__ import annotations

import re

_ASKED = "no recorded case shows it: "
_NO_FAULT = "no fault: "

# Patterns of "family: label", the first that matches counts.
REASONS: tuple[tuple[str, str], ...] = (
    (
        r"limits: .* in the first round alone",
        _ASKED + "limits come in one case, a length at first and stop tokens after it",
    ),
    (
        r"limits: (token 0|even tokens) stops? too",
        _ASKED + "no round with stop tokens emits another one that this would stop at",
    ),
    (r"limits: either limit alone", _ASKED + "no round has a length limit and stop tokens"),
    (
        r"limits: (one|two|twice|no limit)",
        _ASKED + "the one round with a length limit is the first of its case",
    ),
    (
        r"argmax: of logits in (bfloat16|float16)",
        _ASKED + "decisions are kept clear of bfloat16's noise, or thinner than float32's; a top "
        "gap between the two is wanted",
    ),
    (r"argmax: of the row before, in prefill", _NO_FAULT + "a prefill takes the argmax of one row"),
    (
        r"argmax: without (the last id|token 0), in prefill",
        _ASKED + "no prompt is followed by that token",
    ),
    (
        r"precision: embed in (bfloat16|float16|float8)",
        _NO_FAULT + "the seed model's embeddings are codes of 4 bits, which these dtypes hold",
    ),
    (
        r"tree arrays: build: (scores rounded to float32|logits rounded to float16)",
        _ASKED + "no drafts of the corpus have scores that lie so near",
    ),
    (
        r"tree arrays: build: logits (halved|doubled)|a temperature of 0\.9",
        _ASKED + "no build's order hangs on the temperature",
    ),
    (r"tree arrays: build: ", _ASKED + "no build of that budget has such a node"),
    (
        r"positions: modulo 128|rotation: positions (modulo 128|in bfloat16)",
        _ASKED + "the roots and prompts of the corpus are at positions below 128",
    ),
    (r"positions: modulo .* in trees of a root alone", _ASKED + "lone roots are at low positions"),
    (
        r"slots and pages: .* in prefill",
        _ASKED + "no chunk is as long, or ends as far from the begin",
    ),
    (
        r"determinism: .* by lot",
        "either choice is right, and near ties are no failure; it shows where a tie is asked twice",
    ),
    (
        r"sessions: reset leaves the pages",
        _NO_FAULT + "what they hold lies behind L, and nobody may read it",
    ),
    (r"masks: ", _ASKED + "on this occasion no tree is so deep or so wide"),
    (r"split merges: ", _ASKED + "no forward on this occasion has as many splits"),
    (r"tree arrays: ", _ASKED + "on this occasion no such token is fed"),
)


def reason(name: str) -> str:
    """Why this variant lives; "" where nobody has said."""
    return next((why for pattern, why in REASONS if re.match(pattern, name)), "")
