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
    (r"argmax: of the row before, in prefill", _NO_FAULT + "a prefill takes the argmax of one row"),
    (
        r"compaction: books: at most three, in the second round",
        _ASKED + "no second round keeps more than three nodes",
    ),
    (
        r"determinism: .* by lot",
        "either choice is right, and near ties are no failure; it shows where a tie is asked twice",
    ),
    (
        r"masks: columns from 32 on are lost",
        _ASKED + "no node lies under one of index 32 or more",
    ),
    (
        r"masks: .* in forward_tokens\(\) alone",
        _NO_FAULT + "forward_tokens() is given its mask, and knows of no tree",
    ),
    (
        r"positions: .* after a round that kept every node of several",
        _ASKED + "no tree with drafts follows a round that kept every node of several",
    ),
    (
        r"precision: embed in (bfloat16|float16)",
        _NO_FAULT + "both hold the embeddings of every seed model",
    ),
    (
        r"sessions: reset leaves the pages",
        _NO_FAULT + "what they hold lies behind L, and nobody may read it",
    ),
    (
        r"split merges: sums of empty splits .* in trees of a root alone",
        _NO_FAULT + "a root alone sees every slot, so no split is empty",
    ),
    (
        r"tree arrays: build: (logits doubled|a temperature of 0\.9)",
        _ASKED + "no build's order hangs on the temperature",
    ),
    (
        r"tree arrays: build: scores rounded to float32",
        _ASKED + "no drafts of the corpus have scores that lie so near",
    ),
    (
        r"tree arrays: build: at most 8 nodes, of a budget up to 5",
        _NO_FAULT + "no tree of that budget has as many",
    ),
    (r"tree arrays: build: ", _ASKED + "no build of that budget has such a node"),
    (r"tree arrays: leaves .* in prefill", _NO_FAULT + "a prompt has no leaves"),
)


def reason(name: str) -> str:
    """Why this variant lives; "" where nobody has said."""
    return next((why for pattern, why in REASONS if re.match(pattern, name)), "")
