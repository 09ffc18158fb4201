"""Every small scene of a law, one after the other: the brute force beside Hypothesis' shrinking.

The law's own body runs, on values that are counted out here: every prompt length, every chunking,
every shape in every topological order, every path. Nothing is drawn, and no strategy is asked.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hypothesis.errors import UnsatisfiedAssumption
from played_size import Size, size

from kdtr.contract import DraftTree
from kdtr.property_tests.history import Decode, Draft, Prefill, Step
from kdtr.property_tests.laws import laws
from kdtr.property_tests.strategies import PLAIN, Plant, Scene, SmallModel, with_distinct_siblings
from kdtr.property_tests.watch import Example, watching

Values = dict[str, Any]  # of a law's arguments; those it draws by label stand under "data"
Tokens = Callable[[int], int]  # the token of the k-th place that needs one

VOCAB_SIZE = PLAIN.vocab_size
MAX_NODES = 4
MAX_PROMPT = 4  # longer than a page: a tree begins at every offset in one
# A fault may hide behind equal tokens, or behind different ones.
TOKENS: dict[str, Tokens] = {
    "zeros": lambda k: 0,
    "rising": lambda k: (k + 1) % VOCAB_SIZE,
    "scattered": lambda k: (11 * k + 5) % VOCAB_SIZE,
}
MODELS = (
    SmallModel(),
    SmallModel(PLAIN.replace(num_hidden_layers=2)),  # dense, then experts
)


class Given:
    """Stands where a law draws: each label has its value."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def draw(self, strategy: object, label: str) -> Any:
        return self._values[label]


@dataclass(slots=True)
class Enumerated:
    """What the brute force found: it ends with the first size at which the fault shows.

    held      scenes of all smaller sizes, by size: the law held in each
    shown     scenes of this size in which the fault shows
    hidden    the others of this size
    smallest  the first of these
    raised    what the law raised for it
    """

    held: Counter[Size] = field(default_factory=Counter)
    shown: int = 0
    hidden: int = 0
    smallest: Example | None = None
    raised: BaseException | None = None

    @property
    def minimum(self) -> Size:
        assert self.smallest is not None, "the fault shows in no scene"
        return size(self.smallest)


def enumerate_scenes(law: str, subject: Any) -> Enumerated:
    """The law on every scene, in the order of what it plays if it holds."""
    found = Enumerated()
    scenes = sorted(SCENES[law](), key=lambda scene: scene[0])
    for full, group in itertools.groupby(scenes, key=lambda scene: scene[0]):
        for _, values in group:
            example, raised = play(law, subject, values)
            if example.verdict == "failed":
                found.shown += 1
                if found.smallest is None or size(example) < found.minimum:
                    found.smallest, found.raised = example, raised
            else:
                assert size(example) == full, f"{law} played {size(example)} of {full}"
                found.held[full] += 1
        if found.shown:
            found.hidden = found.held.pop(full, 0)
            break
    return found


def play(law: str, subject: Any, values: Values) -> tuple[Example, BaseException | None]:
    """One run of the law's body; the example says how it ended, and what was raised says why."""
    entry = laws()[law]
    handle: Any = entry.function
    body = getattr(handle.hypothesis.inner_test, "unwatched", handle.hypothesis.inner_test)
    arguments = {**values, entry.subject: subject}
    if "data" in arguments:
        arguments["data"] = Given(arguments["data"])
    module = sys.modules[handle.__module__]
    # Outside of Hypothesis there are no statistics to tell.
    with (
        mock.patch.object(module, "event", create=True),
        mock.patch("kdtr.property_tests.judge.event"),
    ):
        ended: list[Example] = []
        raised: BaseException | None = None
        try:
            with watching(law, ended.append):
                body(**arguments)
        except (Exception, UnsatisfiedAssumption) as error:
            raised = error
    return ended[0], raised


# What there is


def shapes(n: int) -> Iterator[tuple[int, ...]]:
    """The parents of every tree of n nodes, in every topological order."""
    for above in itertools.product(*(range(i) for i in range(1, n))):
        yield (-1, *above)


def tree_of(parents: Sequence[int], tokens: Tokens, first: int) -> DraftTree:
    """Tokens from place `first` on, siblings made distinct."""
    wanted = [tokens(first + i) for i in range(len(parents))]
    return with_distinct_siblings(wanted, parents, VOCAB_SIZE)


def prompt_of(n: int, tokens: Tokens) -> tuple[int, ...]:
    return tuple(tokens(k) for k in range(n))


def cuts(whole: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to cut it into chunks."""
    for chosen in itertools.product([False, True], repeat=max(0, len(whole) - 1)):
        ends = [i + 1 for i, cut in enumerate(chosen) if cut]
        pairs = zip([0, *ends], [*ends, len(whole)], strict=True)
        yield tuple(whole[a:b] for a, b in pairs)


def paths(parents: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The path to every node."""
    found: list[tuple[int, ...]] = []
    for i, parent in enumerate(parents):
        found.append((0,) if i == 0 else (*found[parent], i))
    yield from found


def worlds() -> Iterator[tuple[SmallModel, Tokens, tuple[int, ...]]]:
    """Models, tokens and prompts."""
    for model, tokens in itertools.product(MODELS, TOKENS.values()):
        for n in range(MAX_PROMPT + 1):
            yield model, tokens, prompt_of(n, tokens)


# The scenes of each law: what it plays if it holds, and the values of its arguments


def trees() -> Iterator[tuple[Size, Values]]:
    for model, tokens, prompt in worlds():
        for parents in itertools.chain.from_iterable(map(shapes, range(1, MAX_NODES + 1))):
            tree = tree_of(parents, tokens, len(prompt))
            full = Size(len(tree), 0, len(prompt), min(1, len(prompt)))
            yield full, {"scene": Scene(model, prompt, tree)}


def commits() -> Iterator[tuple[Size, Values]]:
    for full, values in trees():
        for path in paths(values["scene"].tree.parents):
            drawn = {"last accepted node": path[-1], "bonus": 0}
            yield full._replace(path=len(path)), {**values, "data": drawn}


def abandoned_trees() -> Iterator[tuple[Size, Values]]:
    """MAX_NODES: of both trees together."""
    for full, values in trees():
        tokens = TOKENS["rising"]
        for n in range(1, MAX_NODES - full.nodes + 1):
            for parents in shapes(n):
                drawn = {"abandoned": tree_of(parents, tokens, 1)}
                yield full._replace(nodes=full.nodes + n), {**values, "data": drawn}


def planted_rounds() -> Iterator[tuple[Size, Values]]:
    """One round, or two. MAX_NODES: of both together."""
    pairs = itertools.product(range(1, MAX_NODES + 1), range(MAX_NODES))
    numbers = [[n for n in pair if n] for pair in pairs if sum(pair) <= MAX_NODES]
    for (model, tokens, prompt), nodes in itertools.product(worlds(), numbers):
        for rounds in itertools.product(*(_plants(n, tokens) for n in nodes)):
            path = sum(len(plant.path) for plant in rounds)
            full = Size(sum(nodes), path, len(prompt), min(1, len(prompt)))
            drawn = {"prompt": prompt, "root": tokens(len(prompt)), "rounds": [*rounds]}
            yield full, {"model": model, "data": drawn}


def _plants(n: int, tokens: Tokens) -> list[Plant]:
    misses = tuple(tokens(i) for i in range(n))
    return [Plant(shape, path, misses) for shape in shapes(n) for path in paths(shape)]


def chunked_prompts() -> Iterator[tuple[Size, Values]]:
    for full, values in trees():
        scene = values["scene"]
        for chunks in cuts(scene.prompt) if scene.prompt else ():
            drawn = {"prompt": scene.prompt, "chunks": chunks, "tree": scene.tree}
            yield full._replace(chunks=len(chunks)), {"model": scene.model, "data": drawn}


def step_lists() -> Iterator[tuple[Size, Values]]:
    """Chunks, decodes and drafts in every order: up to two nodes and six tokens of a prompt."""
    for model, tokens in itertools.product(MODELS, TOKENS.values()):
        for full, steps in _steps(2, 6, tokens, 0):
            yield full, {"model": model, "steps": steps}


def _steps(
    nodes: int, prompt: int, tokens: Tokens, first: int
) -> Iterator[tuple[Size, tuple[Step, ...]]]:
    yield Size(), ()
    for one, step in _one_step(nodes, prompt, tokens, first):
        left, after = (nodes - one.nodes, prompt - one.prompt), first + one.nodes + one.prompt
        for rest, more in _steps(*left, tokens, after):
            yield Size(*map(sum, zip(one, rest, strict=True))), (step, *more)


def _one_step(nodes: int, prompt: int, tokens: Tokens, first: int) -> Iterator[tuple[Size, Step]]:
    for n in range(1, prompt + 1):
        yield Size(0, 0, n, 1), Prefill(tuple(tokens(first + k) for k in range(n)))
    if nodes:
        yield Size(1, 1, 0, 0), Decode(tokens(first))
    for n in range(1, nodes + 1):
        for parents in shapes(n):
            tree = tree_of(parents, tokens, first)
            yield Size(n, 0, 0, 0), Draft(tree, None, 0)
            for path in paths(parents):
                yield Size(n, len(path), 0, 0), Draft(tree, path[-1], 0)


SCENES: dict[str, Callable[[], Iterator[tuple[Size, Values]]]] = {
    "a_row_is_the_plain_run_over_its_path": trees,
    "a_commit_is_plain_decoding_of_the_path": commits,
    "a_verify_that_was_not_committed_is_never_seen": abandoned_trees,
    "greedy_output_does_not_depend_on_what_is_drafted": planted_rounds,
    "every_chunking_of_a_prompt_is_the_same_prefill": chunked_prompts,
    "cache_layouts_are_indistinguishable": step_lists,
}
