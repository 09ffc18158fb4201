"""What an engine is asked in an x-ray: sessions by the verbs that every engine has.

A session is a list of steps. Tokens are all different, but for the filler of a long prefix, so that
a token names the row it lies in: also when the row should be gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kdtr.conformance.xray_models import FILLER, START
from kdtr.contract import DraftTree

_TOKENS = (*range(0, 120, 7), *(t for t in range(120) if t % 7))  # 0 first; neighbours far apart


@dataclass(frozen=True, slots=True)
class Round:
    """A tree by its parents, and the path that is committed, whatever the engine decided."""

    parents: tuple[int, ...]
    path: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Plan:
    """chunks: sizes in which the prompt is prefilled; the first `filler` tokens are the filler."""

    name: str
    chunks: tuple[int, ...]
    rounds: tuple[Round, ...]
    filler: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A verify of `tree` at round `number`, and the commit of `path` with `bonus` after it."""

    number: int
    tree: DraftTree
    path: tuple[int, ...]
    bonus: int


@dataclass(frozen=True, slots=True)
class Script:
    """A plan with its tokens."""

    name: str
    chunks: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]

    @property
    def max_len(self) -> int:
        """Slots for every row ever fed: an engine that keeps rejected ones shall show it."""
        return sum(map(len, self.chunks)) + sum(len(step.tree) for step in self.steps)


ROOT = Round((-1,))
_Y = (-1, 0, 0, 2)
_SCATTERED = (-1, 0, 0, 1, 0, 2, 5, 3)
_STAR = (-1, 0, 0, 0, 0)
_CHAIN = (-1, 0, 1, 2)
_WIDE = (-1, *[0] * 13, 4, 9, 9, 15)
_DEEP = (-1, 0, 1, 1, 2, 4, 3, 5, 7, 8, 8, 9, 11, 12, 12, 14)

PLANS: tuple[Plan, ...] = (
    Plan(
        "y-tree",
        (5,),
        (Round(_Y, (0, 2, 3)), ROOT, Round(_Y), Round(_STAR, (0, 3)), Round(_Y, (0, 1)), ROOT),
    ),
    Plan("one-token", (1,), (Round(_STAR, (0, 2)), Round(_CHAIN, (0, 1)), ROOT)),
    Plan("page-15", (15,), (Round(_SCATTERED, (0, 2, 5, 6)), Round(_STAR, (0, 4)), ROOT)),
    Plan("page-16", (9, 6, 1), (Round(_SCATTERED, (0, 1, 3)), Round(_CHAIN, (0, 1, 2)), ROOT)),
    Plan(
        "page-33",
        (16, 17),
        (Round(_WIDE, (0, 9, 15, 17)), Round(_DEEP, (0, 1, 2, 4, 5)), ROOT),
        filler=22,
    ),
)


def scripts(plans: Sequence[Plan] = PLANS) -> Iterator[Script]:
    """The sessions of an attention model."""
    for plan in plans:
        yield _with_tokens(plan)


def _with_tokens(plan: Plan) -> Script:
    tokens = iter(_TOKENS)
    length = sum(plan.chunks)
    prompt = [FILLER] * plan.filler + [next(tokens) for _ in range(length - plan.filler)]
    chunks, first = [], 0
    for size in plan.chunks:
        chunks.append(tuple(prompt[first : first + size]))
        first += size
    steps, root = [], START
    for number, round_ in enumerate(plan.rounds):
        drafts = [next(tokens) for _ in round_.parents[1:]]
        tree = DraftTree(tokens=(root, *drafts), parents=round_.parents)
        root = next(tokens)
        steps.append(Step(number, tree, round_.path, root))
    return Script(plan.name, tuple(chunks), tuple(steps))
