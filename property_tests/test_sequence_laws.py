"""Several sequences in one model: each is as if it were alone, by turns or in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import Acceptance, DraftTree, LogicalCache
from kdtr.property_tests.fewer_verbs import answers, rows_of
from kdtr.property_tests.history import Draft, drafts
from kdtr.property_tests.judge import Judge, tree_scene
from kdtr.property_tests.strategies import PLAIN, SmallModel, prompts, small_models
from kdtr.property_tests.subject import Answer, Subject
from kdtr.property_tests.trees import path_to, path_tokens, under_root
from kdtr.property_tests.watched import WatchedModel, WatchedSession


@dataclass(frozen=True, slots=True)
class Life:
    """A prompt, and drafts under whatever root the session then has."""

    prompt: tuple[int, ...]
    drafts: tuple[Draft, ...]


def lives(*, min_drafts: int = 0, max_drafts: int = 2) -> st.SearchStrategy[Life]:
    draft = drafts(PLAIN.vocab_size, max_nodes=4)
    return st.builds(
        Life,
        prompts(min_size=1, max_size=4),
        st.lists(draft, min_size=min_drafts, max_size=max_drafts).map(tuple),
    )


@dataclass(slots=True)
class Lived:
    """What one sequence has shown so far.

    steps  of each: the tree, its answers, and per row the tokens that it comes from; the first
           is the prompt, which shows its root alone
    """

    session: WatchedSession
    steps: list[tuple[DraftTree | None, list[Answer], list[list[int]]]]
    committed: list[int]
    cache: LogicalCache | None = None

    def live(self, life: Life) -> Iterator[None]:
        """One step at a time."""
        root = self.session.prefill(life.prompt)
        self.committed += life.prompt
        self.steps.append((None, [Answer(None, root)], [list(life.prompt)]))
        yield
        for draft in life.drafts:
            tree = self.rooted(draft.tree)
            self.saw(tree, answers(self.session, tree))
            yield  # others may verify and commit meanwhile
            if draft.last is not None:
                self.session.commit(self.kept(tree, draft))

    def rooted(self, tree: DraftTree) -> DraftTree:
        assert self.session.root is not None
        return under_root(tree, self.session.root)

    def saw(self, tree: DraftTree, rows: list[Answer]) -> None:
        histories = [[*self.committed, *path_tokens(tree, i)] for i in range(len(tree))]
        self.steps.append((tree, rows, histories))

    def kept(self, tree: DraftTree, draft: Draft) -> Acceptance:
        last = 0 if draft.last is None else draft.last
        self.committed += path_tokens(tree, last)
        return Acceptance(path_to(tree, last), draft.bonus)

    def end(self) -> None:
        if self.session.offers("snapshot"):
            self.cache = self.session.snapshot()


def lived_alone(model: WatchedModel, life: Life) -> Lived:
    alone = begun(model)
    for _ in alone.live(life):
        pass
    alone.end()
    return alone


def begun(model: WatchedModel) -> Lived:
    return Lived(model.open(max_len=24), [], [])


def hold_alike(
    engine: Subject, model: SmallModel, what: str, alone: Lived, together: Lived
) -> None:
    """The one shows what the other shows, step by step."""
    pairs = zip(alone.steps, together.steps, strict=True)
    for k, ((tree, expected, histories), (other, actual, _)) in enumerate(pairs):
        judge = Judge(engine, model) if tree is None else Judge(engine, model, tree_scene(tree))
        if tree is not None and other is not None:  # roots: a near tie ended the example before
            judge.same(f"{what}, step {k}, tree", tree, other)
        for i, row in enumerate(expected):
            judge.answer(f"{what}, step {k}, row {i}", row, actual[i], history=histories[i])
    judge = Judge(engine, model)
    judge.same(f"{what}, L", alone.session.committed_len, together.session.committed_len)
    judge.same(f"{what}, L", len(alone.committed), alone.session.committed_len)
    if len(alone.steps) > 1:
        judge.same(f"{what}, root", alone.session.root, together.session.root)
    if alone.cache is not None and together.cache is not None:
        judge.cache(f"{what}, cache", alone.cache, together.cache)


@given(model=small_models(), plans=st.lists(lives(), min_size=2, max_size=3), data=st.data())
def test_sequences_of_one_model_do_not_meet(
    engine: Subject, model: SmallModel, plans: Sequence[Life], data: st.DataObject
) -> None:
    """LOSSLESS, SLOT-1, MASK-1: sessions of one model, played by turns, show and hold what each
    shows and holds alone; a session that is opened late, or closed early, leaves the others."""
    loaded = engine.load(model)
    alone = [lived_alone(loaded, life) for life in plans]

    together: list[Lived | None] = [None] * len(plans)
    going: dict[int, Iterator[None]] = {}
    waiting = list(range(len(plans)))
    while waiting or going:
        turns = [*going, *waiting[:1]]
        turn = turns[data.draw(st.integers(0, len(turns) - 1), label="turn")]
        if turn in waiting:
            waiting.remove(turn)
            started = begun(loaded)
            together[turn], going[turn] = started, started.live(plans[turn])
        if next(going[turn], turn) is not None:
            del going[turn]
            finished = together[turn]
            assert finished is not None
            finished.end()
            hold_alike(engine, model, f"sequence {turn}", alone[turn], finished)
            if data.draw(st.booleans(), label="close it"):
                finished.session.close()


@given(
    model=small_models(),
    plans=st.lists(lives(min_drafts=2), min_size=1, max_size=3),
)
def test_a_batch_is_its_requests_alone(
    engine: Subject, model: SmallModel, plans: Sequence[Life]
) -> None:
    """LOSSLESS, SLOT-1, COMMIT-2: unequal trees behind unequal prompts, verified and committed in
    one call, show and leave what each does alone; twice, so that the second call sees what the
    first one left."""
    loaded = engine.load(model)
    batch = [begun(loaded) for _ in plans]
    alone = [begun(loaded) for _ in plans]
    for both in (batch, alone):
        for lived, life in zip(both, plans, strict=True):
            next(lived.live(Life(life.prompt, ())))
    for k in range(2):
        chosen = [life.drafts[k] for life in plans]
        trees = [one.rooted(draft.tree) for one, draft in zip(batch, chosen, strict=True)]
        sessions = [one.session for one in batch]

        verified = loaded.verify_batch(sessions, trees)
        copied = [rows_of(one) for one in verified]
        for one, tree, rows in zip(batch, trees, copied, strict=True):
            one.saw(tree, rows)
        loaded.commit_batch(
            sessions,
            [one.kept(t, draft) for one, t, draft in zip(batch, trees, chosen, strict=True)],
        )
        for one, other, tree, draft in zip(alone, batch, trees, chosen, strict=True):
            Judge(engine, model).target(
                "root", tree.tokens[0], one.session.root or 0, history=one.committed
            )
            one.saw(tree, answers(one.session, tree))
            one.session.commit(one.kept(tree, draft))
            hold_alike(engine, model, f"round {k} of a batch", one, other)
    for i, (one, other) in enumerate(zip(alone, batch, strict=True)):
        one.end()
        other.end()
        hold_alike(engine, model, f"request {i} of the batch", one, other)
