"""A failed example as a golden case: the same prompts, trees and paths, with the truth beside them.

A law plays what it likes: roots of its own, paths that no engine would choose. A golden case holds
what the truth does, so the shape of the play is kept and its tokens are planted anew: prefills
become chunks; each committed verify becomes a tree of the same parents with the same accepted
path; a decode is a lone root, a later prefill a chain that is accepted whole. A verify that was
never committed is left out, unless it is the last: then it ends the case, with its root accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kdtr.conformance.case import STAGES, CasePlan, Planted
from kdtr.conformance.golden import record_bundle
from kdtr.contract import Acceptance, CaseError, DraftTree
from kdtr.property_tests.laws import laws
from kdtr.property_tests.strategies import SmallModel
from kdtr.property_tests.watch import Event, Example, Played

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
    for played in example.played:
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


def _since_reset(played: Played) -> list[Event]:
    resets = [i for i, (verb, _) in enumerate(played.events) if verb == "reset"]
    return list(played.events[resets[-1] + 1 :] if resets else played.events)


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
    if pending is not None:
        yield Planted(pending.parents)
