"""A failed example as a golden case: the same prompts, trees and paths, with the truth beside them.

A law plays what it likes: roots of its own, paths that no engine would choose. A golden case holds
what the truth does, so the shape of the play is kept and its tokens are planted anew: prefills
become chunks; each committed verify becomes a tree of the same parents with the same accepted
path; a decode is a lone root, a later prefill a chain that is accepted whole. A verify that was
never committed is left out, unless it is the last: then it ends the case, with its root accepted.

What this loses is kept by further cases of the same bundle (`_readings`): the path that the truth
takes in the last round, where the engine chose another, abandoned verifies as rounds, and a walk
over targets that the law made up as a round whose tree is accepted so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdtr.conformance.case import STAGES, CasePlan, Planted
from kdtr.conformance.golden import record_bundle
from kdtr.contract import Acceptance, CaseError, DraftTree, EmitLimit, KdtrError, Session
from kdtr.property_tests.laws import laws
from kdtr.property_tests.strategies import SmallModel
from kdtr.property_tests.watch import Event, Example, Played
from kdtr.reference import accept, emitted, make_engine

_BEFORE = ("prefill", "set_root")  # what may come before the first round


def write_failure(law: str, example: Example, directory: Path) -> Path:
    """Record the sessions of the example, alike ones once; returns the bundle's path.

    Raises CaseError where nothing was played that a golden case can hold.
    """
    model, plans = _plans(law, example)
    if not plans:
        raise CaseError(f"law {law}: no session of the example verified or prefilled anything")
    about = {"name": f"law {law}", "seed": model.seed, "why": f"an example that broke {law}"}
    digest = hashlib.sha256(repr((law, model, plans)).encode()).hexdigest()[:8]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{law[:60].rstrip('_').replace('_', '-')}-{digest}.kdtr"
    record_bundle(path, about, model.config, model.tensors(), plans, alignment=64)
    return path


def _plans(law: str, example: Example) -> tuple[SmallModel, list[CasePlan]]:
    rules = laws()[law].rules
    found: dict[tuple[object, ...], CasePlan] = {}
    model = SmallModel()
    for played in (one for whole in example.played for one in _readings(whole)):
        chunks, root, rounds = plan_of(played)
        if not rounds or (found and played.model != model):
            continue  # one model to a bundle: the first one's sessions
        model = played.model
        key = (chunks, root, rounds)
        if key not in found:
            alias = f"session{len(found)}"
            why = f"what a session of the failed example played ({law})"
            found[key] = CasePlan(alias, why, rules, rounds, chunks, root, STAGES)
    return model, list(found.values())


def plan_of(
    played: Played,
) -> tuple[tuple[tuple[int, ...], ...], int | None, tuple[Planted, ...]]:
    """(chunks, root, rounds) of a `CasePlan`: a root only where nothing is prefilled first."""
    events = _since_reset(played)
    first = next((i for i, (verb, _) in enumerate(events) if verb not in _BEFORE), len(events))
    chunks = [what for verb, what in events[:first] if verb == "prefill"]
    rounds = tuple(_rounds(events[first:]))
    if chunks:
        # A case has a round: the truth's own next token stands in for what was not asked.
        return tuple(chunks), None, rounds or (Planted((-1,)),)
    root = next((what for verb, what in events if verb == "set_root"), None)
    if root is None:
        return (), None, ()
    return (), root, rounds


def _readings(played: Played) -> Iterator[Played]:
    """As it was played, and as what a golden case can hold of the rest."""
    yield played
    for verb, what in played.events:
        if verb == "accept" and what[1] is not None:
            yield replace(played, events=[("set_root", what[0].tokens[0]), ("walk", what)])
    events = _since_reset(played)
    for other in (_last_round_of_the_truth(played, events), _abandoned_as_rounds(events)):
        if other != events:
            yield replace(played, events=other)


def _last_round_of_the_truth(played: Played, events: list[Event]) -> list[Event]:
    """The last committed tree with the path that the truth accepts: a fused round commits what the
    engine chose, and a wrong choice may be the failure."""
    last = max((i for i, (verb, _) in enumerate(events) if verb == "commit"), default=0)
    if not last or events[last - 1][0] != "verify":
        return events
    tree = events[last - 1][1]
    try:
        model = make_engine().load((played.model.config, played.model.tensors()))
        session = model.open(max_len=played.max_len)
        for verb, what in events[: last - 1]:
            _replay(session, verb, what)
        _replay(session, "verify", tree)
        acceptance = session.accept(tree)
    except KdtrError:
        return events  # the truth refuses what the engine took: there is no such round
    if acceptance.path == events[last][1].path:
        return events
    return [*events[:last], ("commit", acceptance)]


def _replay(session: Session, verb: str, what: Any) -> None:
    if verb in ("verify", "decode"):
        session.set_root(what.tokens[0] if verb == "verify" else what)
    if verb == "decode":
        session.decode()
    elif verb in ("set_root", "prefill", "verify", "commit"):
        getattr(session, verb)(what)


def _abandoned_as_rounds(events: list[Event]) -> list[Event]:
    """Each verify that nobody committed as a round that accepts its root alone.

    The root takes a slot, so the tree gets a node more: as many rows as before lie behind L.
    """
    found: list[Event] = []
    for i, (verb, what) in enumerate(events):
        found.append((verb, what))
        if verb == "verify" and i + 1 < len(events):
            after = [v for v, _ in events[i + 1 :] if v not in ("set_root", "forward_tokens")]
            if after and after[0] != "commit":
                longer = DraftTree((*what.tokens, 0), (*what.parents, len(what) - 1))
                found[-1:] = [("verify", longer), ("commit", Acceptance((0,), 0))]
    return found


def _since_reset(played: Played) -> list[Event]:
    """Without walks, which change nothing."""
    resets = [i for i, (verb, _) in enumerate(played.events) if verb == "reset"]
    events = played.events[resets[-1] + 1 :] if resets else played.events
    return [(verb, what) for verb, what in events if verb != "accept"]


def _rounds(events: Sequence[Event]) -> Iterator[Planted]:
    pending: DraftTree | None = None
    for verb, what in events:
        if verb == "verify":
            assert isinstance(what, DraftTree)
            pending = what
        elif verb == "commit":
            assert isinstance(what, Acceptance)
            if pending is not None:
                yield Planted(pending.parents, what.path)
            pending = None
        elif verb == "decode":
            yield Planted((-1,))
            pending = None
        elif verb == "prefill":
            assert isinstance(what, tuple)
            yield Planted(tuple(range(-1, len(what) - 1)), tuple(range(len(what))))
            pending = None
        elif verb == "walk":
            yield _walked(*what)
    if pending is not None:
        yield Planted(pending.parents)


def _walked(tree: DraftTree, targets: Sequence[int], limit: EmitLimit) -> Planted:
    """The tree with the path that these targets accept, cut where the limit cuts it."""
    free = accept(tree, targets)
    stops = [token in limit.stop_tokens for token in emitted(tree, free)]
    stop_at = stops.index(True) if True in stops else None
    return Planted(tree.parents, free.path, limit.max_emitted, stop_at)
