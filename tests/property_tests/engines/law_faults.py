"""The host engine with what only some laws ask for: honest variants, and one fault at a time.

`law_faults:make_engine` with the option `variant` is such an engine by name. The faults of
`planted_faults.py` are there too: this file holds those that it has no use for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kdtr.conformance import load_engine
from kdtr.conformance.mutants import BY_NAME
from kdtr.conformance.mutants.planting import physical
from kdtr.contract import Acceptance, DraftTree, Round, SessionError, Verified
from kdtr.property_tests.trees import reordered, siblings_reversed

EMBEDDING = "model.embed_tokens.weight"
VARIANTS: dict[str, Callable[[Any], Any]] = {}
LEAST = frozenset({"prefill", "verify", "commit"})


def make_engine(variant: str, page_size: int = 3, split_size: int = 5) -> Any:
    return VARIANTS[variant](
        load_engine("host", {"page_size": page_size, "split_size": split_size})
    )


def variant(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    VARIANTS[function.__name__] = function
    return function


class Wrapped:
    """Anything, with some attributes of its own."""

    def __init__(self, inner: Any, **own: Any) -> None:
        self._inner = inner
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _sessions(engine: Any, change: Callable[[Any], Any], **info: Any) -> Any:
    """Every session of the engine is change(session)."""

    def load(source: Any) -> Any:
        model = engine.load(source)
        return Wrapped(model, open=lambda *, max_len: change(model.open(max_len=max_len)))

    return Wrapped(engine, load=load, info=replace(engine.info, **info))


def _kernels(engine: Any, **operations: Callable[..., Any]) -> Any:
    """Each operation is called with the original first."""
    for name, operation in operations.items():
        setattr(engine._kernels, name, partial(operation, getattr(engine._kernels, name)))
    return engine


# Honest: fewer verbs, fewer observations, more weights


@variant
def honest(engine: Any) -> Any:
    return engine


@variant
def logits_only(engine: Any) -> Any:
    """Every verb, and no stage."""
    return Wrapped(engine, info=replace(engine.info, stages=frozenset()))


@variant
def targets_only(engine: Any) -> Any:
    """A verify shows tokens alone; so there is no forward by hand, which would show logits."""

    def change(session: Any) -> Any:
        def verify(tree: Any, **trace: Any) -> Verified:
            return Verified(None, session.verify(tree, **trace).targets)

        return Wrapped(session, verify=verify)

    verbs = engine.info.verbs - {"forward_tokens"}
    return _sessions(engine, change, stages=frozenset(), verbs=verbs)


@variant
def least(engine: Any) -> Any:
    """prefill, verify, commit."""
    return Wrapped(engine, info=replace(engine.info, stages=frozenset(), verbs=LEAST))


@variant
def least_targets_only(engine: Any) -> Any:
    return least(targets_only(engine))


@variant
def takes_nan(engine: Any) -> Any:
    """Weights are not searched for NaN."""

    def load(source: Any) -> Any:
        config, tensors = source
        lost = np.isnan(tensors[EMBEDDING])
        finite = {**tensors, EMBEDDING: np.where(lost, 0, tensors[EMBEDDING]).astype(np.float32)}
        model = engine.load((config, finite))
        weights = model._forward.weights
        embedding = np.where(lost, np.nan, weights.embedding).astype(np.float32)
        model._forward = replace(model._forward, weights=replace(weights, embedding=embedding))
        return model

    return Wrapped(engine, load=load)


@variant
def unsteady(engine: Any) -> Any:
    """Declares no determinism: every second session rounds another way."""
    sessions = [0]

    def change(session: Any) -> Any:
        sessions[0] += 1
        way = np.float32(np.inf if sessions[0] % 2 else -np.inf)

        def verify(tree: Any, **trace: Any) -> Verified:
            done = session.verify(tree, **trace)
            return Verified(np.nextafter(done.logits, way), done.targets)

        def snapshot() -> Any:
            cache = session.snapshot()
            return replace(cache, c_kv=np.nextafter(cache.c_kv, way))

        return Wrapped(session, verify=verify, snapshot=snapshot)

    return _sessions(engine, change, **_restless_profile(engine))


@variant
def undecided(engine: Any) -> Any:
    """Declares no determinism: of equal top logits every second choice takes the last."""
    calls = [0]

    def argmax(original: Any, logits: Any) -> Any:
        calls[0] += 1
        if calls[0] % 2:
            return original(logits)
        return logits.shape[-1] - 1 - original(logits[..., ::-1])

    engine = _kernels(engine, argmax=argmax)
    return Wrapped(engine, info=replace(engine.info, **_restless_profile(engine)))


def _restless_profile(engine: Any) -> dict[str, Any]:
    profile = replace(engine.info.profile, deterministic=False, batch_invariant=False)
    return {"profile": profile}


@variant
def own_eps(engine: Any) -> Any:
    """Declares an eps of its latent norms, and keeps to it."""

    def load(source: Any) -> Any:
        config, tensors = source
        return engine.load((config.replace(latent_norm_eps=0.5), tensors))

    info = replace(engine.info, conventions={"latent_norm_eps": "0.5"})
    return Wrapped(engine, load=load, info=info)


# Batches


def _batched(
    engine: Any,
    slices: Callable[[list[int], int], int] = lambda sizes, i: sum(sizes[:i]),
    kept: Callable[[list[Acceptance], list[DraftTree]], list[Acceptance]] = lambda paths, _: paths,
) -> Any:
    """The batch verbs, by looping; `slices` says where request i begins in the rows of all."""

    def load(source: Any) -> Any:
        model = engine.load(source)
        pending: list[DraftTree] = []

        def verify_batch(sessions: Any, trees: Any, **traces: Any) -> list[Verified]:
            pending[:] = trees
            each = [s.verify(tree) for s, tree in zip(sessions, trees, strict=True)]
            rows = np.concatenate([one.logits for one in each])
            tokens = [token for one in each for token in one.targets]
            sizes = [len(tree) for tree in trees]
            starts = [min(slices(sizes, i), len(rows) - n) for i, n in enumerate(sizes)]
            return [
                Verified(rows[a : a + n], tuple(tokens[a : a + n]))
                for a, n in zip(starts, sizes, strict=True)
            ]

        def commit_batch(sessions: Any, acceptances: Any) -> None:
            for session, one in zip(sessions, kept(acceptances, pending), strict=True):
                session.commit(one)

        return Wrapped(model, verify_batch=verify_batch, commit_batch=commit_batch)

    verbs = engine.info.verbs | {"verify_batch", "commit_batch"}
    return Wrapped(engine, load=load, info=replace(engine.info, verbs=verbs))


@variant
def batch(engine: Any) -> Any:
    """Honest."""
    return _batched(engine)


@variant
def batch_lengths_rolled(engine: Any) -> Any:
    """Request i keeps as many nodes as request i - 1 accepted, as far as its path has them."""

    def kept(acceptances: list[Acceptance], _: Any) -> list[Acceptance]:
        lengths = np.roll([len(one.path) for one in acceptances], 1).tolist()
        return [
            Acceptance(one.path[:n], one.bonus) for one, n in zip(acceptances, lengths, strict=True)
        ]

    return _batched(engine, kept=kept)


@variant
def batch_offset_of_request_1(engine: Any) -> Any:
    """Request 1 begins behind as many rows as it has itself, not behind those of request 0."""
    return _batched(engine, lambda sizes, i: sizes[1] if i == 1 else sum(sizes[:i]))


# Faults


@variant
def invisible_times_zero(engine: Any) -> Any:
    """MASK-3: invisible rows are weighed with 0 instead of being left out, and 0 NaN is NaN."""

    def verify_attn(
        original: Any, cache: Any, layer: int, q: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        out = original(cache, layer, q, q_pe, seen, *rest)
        slots = [physical(cache, slot) for slot in range(seen.n_slots)]
        return out + 0 * cache.rows[layer, slots, : out.shape[-1]].sum(axis=0)

    return _kernels(engine, verify_attn=verify_attn)


@variant
def stale_times_zero(engine: Any) -> Any:
    """COMMIT-4: the mutant of the same name."""
    BY_NAME["stale_times_zero"].plant(engine)
    return engine


@variant
def nan_is_mended(engine: Any) -> Any:
    """FWD-4: NaN becomes 0 in the logits, so that nobody hears of it."""

    def change(session: Any) -> Any:
        def verify(tree: Any, **trace: Any) -> Verified:
            done = session.verify(tree, **trace)
            return Verified(np.nan_to_num(done.logits), done.targets)

        return Wrapped(session, verify=verify)

    return _sessions(takes_nan(engine), change)


@variant
def positions_wrap(engine: Any) -> Any:
    """POS-1: the rotary table has 8 rows, and starts again."""
    return _kernels(engine, rotary_angles=lambda original, at, *rest: original(at % 8, *rest))


@variant
def positions_forgotten(engine: Any) -> Any:
    """POS-1: nothing is rotated."""
    return _kernels(engine, rotary_angles=lambda original, at, *rest: original(0 * at, *rest))


@variant
def one_scratch_for_all(engine: Any) -> Any:
    """SLOT-1: the scratch is the model's: a commit takes its first row from the latest verify."""
    latest: list[Any] = []

    def change(session: Any) -> Any:
        def verify(tree: Any, **trace: Any) -> Verified:
            latest[:] = [session]
            done: Verified = session.verify(tree, **trace)
            return done

        def commit(acceptance: Any) -> None:
            other, length = latest[0], session.committed_len
            session.commit(acceptance)
            if other is not session:
                a, b = session._cache, other._cache
                theirs = physical(b, other.committed_len)
                a.rows[:, physical(a, length)] = b.rows[:, theirs]

        return Wrapped(session, verify=verify, commit=commit)

    return _sessions(engine, change)


@variant
def targets_ignored(engine: Any) -> Any:
    """ACC-5: accept walks by the argmax, whatever was drawn."""

    def change(session: Any) -> Any:
        def accept(tree: Any, targets: Any = None, **limit: Any) -> Any:
            return session.accept(tree, **limit)

        return Wrapped(session, accept=accept)

    return _sessions(engine, change)


@variant
def commit_keeps_the_last_bonus(engine: Any) -> Any:
    """COMMIT-2: the root of a commit is that of the commit before it."""

    def change(session: Any) -> Any:
        bonus: list[int] = []

        def commit(acceptance: Any) -> None:
            told = bonus[-1] if bonus else acceptance.bonus
            bonus.append(acceptance.bonus)
            session.commit(Acceptance(acceptance.path, told))

        return Wrapped(session, commit=commit)

    return _sessions(engine, change)


@variant
def refusal_drops_pending(engine: Any) -> Any:
    """COMMIT-5: whatever is refused, the pending verify is gone."""

    def change(session: Any) -> Any:
        def prefill(tokens: Any, **trace: Any) -> Any:
            try:
                return session.prefill(tokens, **trace)
            except Exception:
                session._pending = None
                raise

        return Wrapped(session, prefill=prefill)

    return _sessions(engine, change)


@variant
def restless(engine: Any) -> Any:
    """NUM-4: declares determinism, and every third verify has another last bit."""
    calls = [0]

    def change(session: Any) -> Any:
        def verify(tree: Any, **trace: Any) -> Verified:
            done = session.verify(tree, **trace)
            calls[0] += 1
            up = np.nextafter(done.logits, np.float32(np.inf))
            return Verified(done.logits if calls[0] % 3 else up, done.targets)

        return Wrapped(session, verify=verify)

    return _sessions(engine, change)


@variant
def bits_by_size(engine: Any) -> Any:
    """NUM-4: declares batch invariance, and in trees of more than two nodes rounds another way."""

    def change(session: Any) -> Any:
        def verify(tree: Any, **trace: Any) -> Verified:
            done = session.verify(tree, **trace)
            up = np.nextafter(done.logits, np.float32(np.inf))
            return Verified(up if len(tree) > 2 else done.logits, done.targets)

        return Wrapped(session, verify=verify)

    profile = replace(engine.info.profile, batch_invariant=True)
    return _sessions(engine, change, profile=profile)


def _own_build(build: Callable[[Any, Any, int], Any]) -> Callable[[Any], Any]:
    """Every session builds by build(session, draft logits, budget)."""

    def change(session: Any) -> Any:
        return Wrapped(session, build=lambda draft, budget: build(session, draft, budget))

    return change


@variant
def build_one_short(engine: Any) -> Any:
    """TREE-3: the tree has a node less than the budget allows."""
    return _sessions(engine, _own_build(lambda s, draft, n: s.build(draft, max(0, n - 1))))


@variant
def build_by_size(engine: Any) -> Any:
    """TREE-4: larger trees have their children in another order."""

    def build(session: Any, draft: Any, budget: int) -> Any:
        tree = session.build(draft, budget)
        return reordered(tree, siblings_reversed(tree)) if budget > 3 else tree

    return _sessions(engine, _own_build(build))


@variant
def build_beside_a_verify(engine: Any) -> Any:
    """TREE-3: while a verify is pending a build gets a node less."""

    def build(session: Any, draft: Any, budget: int) -> Any:
        return session.build(draft, budget - (budget > 0 and session._pending is not None))

    return _sessions(engine, _own_build(build))


@variant
def reset_keeps_the_root(engine: Any) -> Any:
    """SLOT-1: a session that was reset still has its root."""

    def change(session: Any) -> Any:
        def reset() -> None:
            root = session.root
            session.reset()
            if root is not None:
                session.set_root(root)

        return Wrapped(session, reset=reset)

    return _sessions(engine, change)


@variant
def decode_tells_the_root(engine: Any) -> Any:
    """FWD-2: decode returns the token that it took, not the one that it chose."""

    def change(session: Any) -> Any:
        def decode(**trace: Any) -> Any:
            root = session.root
            session.decode(**trace)
            return root

        return Wrapped(session, decode=decode)

    return _sessions(engine, change)


@variant
def one_slot_less(engine: Any) -> Any:
    """SLOT-3: the last slot is never given out."""

    def load(source: Any) -> Any:
        model = engine.load(source)
        return Wrapped(model, open=lambda *, max_len: model.open(max_len=max(1, max_len - 1)))

    return Wrapped(engine, load=load)


@variant
def second_commit_is_nothing(engine: Any) -> Any:
    """COMMIT-5: a commit without a verify is passed over."""

    def change(session: Any) -> Any:
        def commit(acceptance: Any) -> None:
            with suppress(SessionError):
                session.commit(acceptance)

        return Wrapped(session, commit=commit)

    return _sessions(engine, change)


@variant
def round_without_limit(engine: Any) -> Any:
    """ACC-4: a fused round emits all that it accepts, whatever the limit."""

    def change(session: Any) -> Any:
        def fused(tree: Any, *, limit: Any = None, **trace: Any) -> Any:
            return session.round(tree, **trace)

        return Wrapped(session, round=fused)

    return _sessions(engine, change)


@variant
def round_accepts_its_root(engine: Any) -> Any:
    """ACC-1: a fused round accepts the root alone; verify and accept are right."""

    def change(session: Any) -> Any:
        def fused(tree: Any, *, limit: Any = None, **trace: Any) -> Round:
            bonus = session.verify(tree, **trace).targets[0]
            session.commit(Acceptance((0,), bonus))
            return Round(tree, Acceptance((0,), bonus), (bonus,))

        return Wrapped(session, round=fused)

    return _sessions(engine, change)


@variant
def stale_nan_times_zero(engine: Any) -> Any:
    """COMMIT-4: NaN is taken, and stale slots are weighed with 0."""
    return takes_nan(stale_times_zero(engine))


@variant
def next_tokens(engine: Any) -> Any:
    """LOSSLESS: every token that it tells is one too high; its rows and its cache are right."""

    def change(session: Any) -> Any:
        def above(token: int) -> int:
            return (token + 1) % len(session._forward.weights.embedding)

        def prefill(tokens: Any, **trace: Any) -> int:
            session.set_root(above(session.prefill(tokens, **trace)))
            return int(session.root)

        def decode(**trace: Any) -> int:
            session.set_root(above(session.decode(**trace)))
            return int(session.root)

        def verify(tree: Any, **trace: Any) -> Verified:
            done = session.verify(tree, **trace)
            return Verified(None, tuple(map(above, done.targets)))

        return Wrapped(session, prefill=prefill, decode=decode, verify=verify)

    return _sessions(engine, change)
