"""The seed model's cases: the same 24 tokens by plain decoding and by many draft trees.

Every case after the first rejects nodes in its first round, and no accepted path of more than
one node is always a prefix of the node list: compaction has something to do.
"""

from __future__ import annotations

from kdtr.conformance.case import CasePlan, Drafted, Planted, RoundPlan
from kdtr.conformance.seed_model import hash_below
from kdtr.contract import ModelConfig

TINY_SEED = 20260412  # DDTree's arXiv number is 2604.12989
GOLDEN_TOKENS = 24  # emitted by each case that starts from PROMPT, prefill's root included

PROMPT = tuple(hash_below(TINY_SEED, "prompt", 13, ModelConfig.tiny().vocab_size).tolist())

_Y = (-1, 0, 0, 2)  # 1 and 2 under the root, 3 under 2
_CHAIN = (-1, 0, 1, 2, 3)
_STAR = (-1, 0, 0, 0, 0, 0)
_ROOT = Planted((-1,))

# Twelve nodes in no particular topological order; 3, 7 and 10 lie under 1, 8 and 11 under 5.
_SCATTERED = (-1, 0, 0, 1, 0, 2, 4, 3, 5, 1, 7, 8)
_DEPTH_FIRST = (-1, 0, 1, 2, 1, 0, 5, 6, 5, 0)
_BREADTH_FIRST = (-1, 0, 0, 0, 1, 1, 2, 3, 3, 4, 7)
# Forty nodes: more than one 32-bit word of ancestors. Node i hangs under (i - 1) // 2 or its like.
_WIDE = (-1, *((i - 1) // 2 for i in range(1, 40)))


def tiny_plans() -> tuple[CasePlan, ...]:
    """The cases of the tiny bundle, plain decoding first."""
    return (
        _case(
            "ar",
            "plain decoding: what every other case must equal",
            ("FWD-1", "FWD-2", "COMMIT-2"),
            [_ROOT] * (GOLDEN_TOKENS - 1),
        ),
        _case(
            "y-tree",
            "the accepted sibling is not the first, so slots must move; hit, miss, first, second",
            ("POS-1", "MASK-2", "COMMIT-1", "COMMIT-3"),
            [
                Planted(_Y, (0, 2, 3)),
                Planted(_Y, (0,)),
                Planted(_Y, (0, 1)),
                Planted(_Y, (0, 2, 3)),
                Planted(_Y, (0, 2)),
                Planted(_Y, (0, 2, 3)),
                Planted(_Y, (0, 2, 3)),
                Planted(_Y, (0, 2, 3)),
                Planted(_Y, (0, 2, 3)),
            ],
        ),
        _case(
            "chain",
            "chains accepted in part, not at all, and whole: causal verification",
            ("FWD-5", "ACC-2", "COMMIT-2"),
            [
                Planted(_CHAIN, (0, 1, 2)),
                Planted(_CHAIN, (0,)),
                Planted(_CHAIN, (0, 1, 2, 3, 4)),
                Planted(_CHAIN, (0, 1)),
                Planted(_CHAIN, (0, 1, 2, 3, 4)),
                Planted(_CHAIN, (0, 1, 2, 3)),
                Planted((-1, 0, 1), (0, 1, 2)),
            ],
        ),
        _case(
            "star",
            "five siblings: the last, the first, none and the middle one is right",
            ("MASK-2", "ACC-1", "COMMIT-4"),
            [
                Planted(_STAR, (0, 5)),
                Planted(_STAR, (0, 1)),
                Planted(_STAR, (0,)),
                Planted(_STAR, (0, 3)),
                *[Planted(_STAR, (0, k)) for k in (5, 2, 4, 1, 3, 5, 2, 4)],
            ],
        ),
        _case(
            "scattered",
            "random topological order, the path skips most nodes",
            ("TREE-1", "POS-1", "MASK-2", "COMMIT-1"),
            [
                Planted(_SCATTERED, (0, 1, 3, 7, 10)),
                Planted(_SCATTERED, (0, 2, 5, 8, 11)),
                Planted(_SCATTERED, (0,)),
                Planted(_SCATTERED, (0, 4, 6)),
                Planted(_SCATTERED, (0, 1, 9)),
                Planted(_SCATTERED, (0, 2, 5, 8)),
                Planted(_Y, (0, 1)),
            ],
        ),
        _case(
            "orders",
            "depth-first and breadth-first node orders by turns",
            ("TREE-1", "POS-1", "MASK-2", "LOSSLESS"),
            [
                Planted(_DEPTH_FIRST, (0, 5, 6, 7)),
                Planted(_BREADTH_FIRST, (0, 3, 7, 10)),
                Planted(_DEPTH_FIRST, (0, 1, 4)),
                Planted(_BREADTH_FIRST, (0, 1, 4, 9)),
                Planted(_DEPTH_FIRST, (0, 9)),
                Planted(_BREADTH_FIRST, (0, 2, 6)),
                Planted(_DEPTH_FIRST, (0, 5, 8)),
            ],
        ),
        _case(
            "wide",
            "forty nodes: ancestors of more than one 32-bit word",
            ("MASK-2", "ACC-1", "COMMIT-1"),
            [
                Planted(_WIDE, (0, 2, 6, 14, 30)),
                Planted(_WIDE, (0, 2, 5, 11, 24)),
                Planted(_WIDE, (0, 1, 4, 9, 19, 39)),
                Planted(_WIDE, (0, 2, 6, 13, 27)),
                Planted(_WIDE, (0, 1)),
            ],
        ),
        _case(
            "best-first",
            "trees built from draft logits: hits at several ranks, misses, a tie",
            ("TREE-3", "TREE-4", "ACC-1"),
            [
                Drafted((0, 1, None), budget=8),
                Drafted((1, 0, 0), budget=10),
                Drafted((None, 0), budget=4),
                Drafted((0, 0, 0, 0), budget=12),
                Drafted((0, 2, 0), budget=16),
                Drafted((), budget=3),
                Drafted((1, 0, 0), budget=12),
                Drafted((0,), budget=0),
                Drafted((0, 0, 1), budget=12),
            ],
            tokens=None,
        ),
        _case(
            "chunks",
            "the prompt in pieces of 1, 5 and 7 tokens, then trees",
            ("FWD-1", "FWD-6", "LOSSLESS"),
            [Planted(_Y, (0, 2, 3)), Planted(_STAR, (0, 4)), Planted(_CHAIN, (0, 1))],
            chunks=(PROMPT[:1], PROMPT[1:6], PROMPT[6:]),
            tokens=None,
        ),
        CasePlan(
            "from-root",
            "an empty cache and a root set by hand: trees at L = 0",
            ("FWD-3", "MASK-1", "POS-1"),
            (Planted(_Y, (0, 2, 3)), _ROOT, Planted(_Y, (0, 2))),
            root=PROMPT[0],
        ),
    )


def _case(
    alias: str,
    why: str,
    rules: tuple[str, ...],
    rounds: list[RoundPlan],
    *,
    chunks: tuple[tuple[int, ...], ...] = (PROMPT,),
    tokens: int | None = GOLDEN_TOKENS,
) -> CasePlan:
    emitted = 1 + sum(len(plan.path) for plan in rounds if isinstance(plan, Planted))
    assert tokens in (None, emitted), f"{alias} emits {emitted} tokens, expected {tokens}"
    return CasePlan(alias, why, rules, tuple(rounds), chunks)
