"""The corpus' cases: shapes of trees, limits and prompts, before their prompts are searched for."""

from __future__ import annotations

from dataclasses import dataclass

from kdtr.conformance.case import CasePlan, Drafted, Planted, RoundPlan

_ROOT = Planted((-1,))
_Y = (-1, 0, 0, 2)
_STAR = (-1, 0, 0, 0)
_CHAIN = (-1, 0, 1, 2)
_SCATTERED = (-1, 0, 0, 1, 0, 2, 5)
# 65 and 129 nodes: more ancestors than one and two 64-bit words; 40 siblings, then 24 and more.
_NODES_65 = (-1, *((i - 1) // 40 for i in range(1, 65)))
_NODES_129 = (-1, *((i - 1) // 40 for i in range(1, 129)))
_NINE = (-1, *(0,) * 8)
# A spine of even nodes, a leaf beside each: depth 8.
_COMB = (-1, 0, 0, *(i - 2 + i % 2 for i in range(3, 17)))
_TWELVE = (-1, 0, 0, 1, 0, 2, 4, 3, 5, 1, 7, 8)
_FORTY = (-1, *((i - 1) // 2 for i in range(1, 40)))

_TREES: tuple[RoundPlan, ...] = (
    Planted(_Y, (0, 2, 3)),
    Planted(_STAR, (0,)),
    Drafted((1, None), budget=5),
    Planted(_SCATTERED, (0, 2, 5, 6)),
)


TWIN = 30  # ids between two tokens with equal rows in the head


@dataclass(frozen=True, slots=True)
class Template:
    """A case whose prompt is searched for.

    chunks    sizes of the pieces in which the prompt is prefilled
    level     how much of the truth is recorded: case.STAGES or case.DECISIONS
    ends      tokens that the prompt ends with
    emits     (place after the prompt, token): (1, 0) where token 0 is to follow the root
    is_root   the prompt is one token, and set as a root over an empty cache
    """

    alias: str
    why: str
    rules: tuple[str, ...]
    chunks: tuple[int, ...]
    rounds: tuple[RoundPlan, ...]
    level: str = "decisions"
    ends: tuple[int, ...] = ()
    emits: tuple[tuple[int, int], ...] = ()
    is_root: bool = False

    @property
    def accepted(self) -> int:
        """The most rows that may be accepted over all rounds."""
        return sum(_most_accepted(plan) for plan in self.rounds)


def _most_accepted(plan: RoundPlan) -> int:
    if isinstance(plan, Drafted):
        return len(plan.ranks) + 1
    assert isinstance(plan, Planted)
    by_stop = len(plan.path) if plan.stop_at is None else plan.stop_at + 1
    return min(len(plan.path), by_stop, plan.max_emitted or by_stop)


def with_prompt(template: Template, prompt: list[int]) -> CasePlan:
    """The template with this prompt, cut into its chunks."""
    chunks, start = [], 0
    for size in template.chunks:
        chunks.append(tuple(prompt[start : start + size]))
        start += size
    assert start == len(prompt), f"{template.alias}: {len(prompt)} tokens for {template.chunks}"
    return CasePlan(
        template.alias,
        template.why,
        template.rules,
        template.rounds,
        () if template.is_root else tuple(chunks),
        root=prompt[0] if template.is_root else None,
        level=template.level,
    )


def trees(prompt: int, *, rounds: int = 4, level: str = "decisions") -> Template:
    return Template(
        "trees",
        "a sibling that is not the first, a miss, a best-first tree",
        ("POS-1", "MASK-2", "ACC-1", "COMMIT-1", "TREE-3"),
        (prompt,),
        _TREES[:rounds],
        level,
    )


def plain(prompt: int) -> Template:
    return Template("ar", "plain decoding", ("FWD-1", "FWD-2", "COMMIT-2"), (prompt,), (_ROOT,) * 6)


def stages() -> Template:
    """Plain decoding once more, short, so that every stage can be recorded: where a variant goes
    wrong is seen at the stage at which it does, and judged before the cases that decide alone."""
    return Template(
        "stages",
        "every stage of plain decoding",
        ("FWD-1", "FWD-2", "MLA-3", "NORM-1"),
        (4,),
        (_ROOT,) * 2,
        "stages",
    )


EDGES = (
    stages(),
    trees(7, level="stages"),
    plain(7),
    Template(
        "one-token",
        "a prompt of one token: L = 1 at the first tree",
        ("FWD-1", "MASK-1"),
        (1,),
        (Planted(_Y, (0, 2, 3)), Planted(_STAR, (0, 3))),
    ),
    Template(
        "chunk-edges",
        "prefill in pieces of 1, 6 and 1: a piece of one row, and a last piece of one row",
        ("FWD-1", "FWD-6"),
        (1, 6, 1),
        (Planted(_CHAIN, (0, 1)), Planted(_Y, (0, 1))),
    ),
    Template(
        "page-end",
        "15 tokens, so that the tree's second row opens a page of 16",
        ("SLOT-1", "COMMIT-1"),
        (15,),
        (Planted(_SCATTERED, (0, 2, 5, 6)), Planted(_STAR, (0, 2))),
    ),
    Template(
        "page-full",
        "16 tokens, a page exactly: the root opens the next one",
        ("SLOT-1", "COMMIT-1"),
        (16,),
        (Planted(_SCATTERED, (0, 2, 5)), Planted(_Y, (0,))),
    ),
    Template(
        "page-begun",
        "17 tokens in pieces of 16 and 1: one row past a page",
        ("SLOT-1", "FWD-1"),
        (16, 1),
        (Planted(_SCATTERED, (0, 1, 3)), Planted(_Y, (0, 2))),
    ),
    Template(
        "edge-tokens",
        "a prompt that ends with token 0 and the last id",
        ("TREE-2", "PAD-1"),
        (6,),
        (Planted(_STAR, (0, 3)), Planted(_Y, (0, 2, 3))),
        ends=(0, 60),
    ),
    Template(
        "chain",
        "chains taken whole, in part and not at all",
        ("FWD-5", "ACC-2"),
        (5,),
        (Planted(_CHAIN, (0, 1, 2)), Planted(_CHAIN, (0,)), Planted(_CHAIN, (0, 1))),
    ),
    Template(
        "limits",
        "a length limit inside the accepted path, a stop token on it, a stop token as the bonus",
        ("ACC-4", "ACC-3", "COMMIT-2"),
        (7,),
        (
            Planted(_CHAIN, (0, 1, 2, 3), max_emitted=2),
            Planted(_Y, (0, 2, 3), stop_at=0),
            Planted(_Y, (0, 2), stop_at=1),
        ),
    ),
    Template(
        "long",
        "70 tokens in pieces that cross 16, 32 and 64; trees of 65 and 129 nodes over 200 slots",
        ("MASK-2", "SLOT-1", "MLA-3", "COMMIT-1"),
        (15, 18, 37),
        (Planted(_NODES_65, (0, 1, 62)), Planted(_NODES_129, (0, 3, 128))),
    ),
)

# What the families of faults asked for, beside the edges.
SIZES = (
    Template(
        "bushy",
        "trees of 12, 9 and 17 nodes: nine siblings of one depth, a spine eight deep",
        ("MASK-2", "POS-1", "ACC-1", "COMMIT-1"),
        (6,),
        (
            Planted(_TWELVE, (0, 1, 3, 7, 10)),
            Planted(_NINE, (0, 8)),
            Planted(_COMB, (0, 2, 4, 5)),
        ),
    ),
    Template(
        "forty",
        "two trees of forty nodes and a best-first one of 24: more than 32 rows, twice",
        ("MASK-2", "TREE-3", "COMMIT-1"),
        (5,),
        (
            Planted(_FORTY, (0, 2, 6, 14, 30)),
            Planted(_FORTY, (0, 1)),
            Drafted((0, 1, None), budget=24),
        ),
    ),
    Template(
        "budgets",
        "best-first trees of 9, 4 and 12 drafts: hits at several ranks, a miss at once",
        ("TREE-3", "TREE-4", "ACC-1"),
        (5,),
        (
            Drafted((1, 0, None), budget=9),
            Drafted((None, 0), budget=4),
            Drafted((0, 2, 0), budget=12),
        ),
    ),
    Template(
        "far",
        "two long pieces: positions past 128 and 256, of prompts, lone roots and trees",
        ("POS-1", "SLOT-1", "MLA-3", "FWD-1"),
        (131, 130),
        (_ROOT, Planted(_SCATTERED, (0, 2)), _ROOT),
    ),
    Template(
        "from-root",
        "an empty cache and a root set by hand: trees at L = 0",
        ("FWD-3", "MASK-1", "POS-1"),
        (1,),
        (Planted(_Y, (0, 2)), Planted(_STAR, (0, 3))),
        is_root=True,
    ),
)
# Of the model that emits token 0 most often.
LIMITS = (
    Template(
        "stop-first",
        "a stop token in the first round, after token 0; a length limit in the second",
        ("ACC-4", "ACC-3"),
        (6,),
        (
            Planted(_CHAIN, (0, 1, 2, 3), stop_at=2),
            Planted(_CHAIN, (0, 1, 2, 3), max_emitted=2),
            _ROOT,
        ),
        emits=((1, 0),),
    ),
    Template(
        "stop-later",
        "a stop token in the second round, after token 0",
        ("ACC-4", "ACC-3"),
        (6,),
        (
            Planted(_Y, (0,)),
            Planted(_CHAIN, (0, 1, 2, 3), stop_at=2),
        ),
        emits=((2, 0),),
    ),
    Template(
        "both-limits",
        "both limits in every round: the length decides, the token, the length again",
        ("ACC-4", "ACC-3"),
        (6,),
        (
            Planted(_CHAIN, (0, 1, 2, 3), max_emitted=2, stop_at=2),
            Planted(_CHAIN, (0, 1, 2, 3), max_emitted=3, stop_at=1),
            Planted(_CHAIN, (0, 1, 2, 3), max_emitted=2, stop_at=2),
        ),
    ),
)
TIED = Template(
    "tied-siblings",
    "both tokens of a tie are offered: the lower one is on the path, whichever comes first",
    ("ACC-1", "COMMIT-1"),
    (6,),
    (
        Planted(_STAR, (0, 2), tied=TWIN),
        Planted(
            _Y,
            (0, 1),
            tied=TWIN,
        ),
        Planted(_SCATTERED, (0, 2, 5), tied=TWIN),
    ),
)
