"""What a session refuses, forgets and keeps: a script over one case, without golden numbers.

Each check opens sessions of its own, brings them into a state, asks for something and looks at
what changed. An engine is measured against the rules and against itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kdtr.conformance.case import CaseInput
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.host_array import Numbers, host_copy, host_integer, host_integers
from kdtr.conformance.observe import as_round, as_verified, host_cache, unchanged_rows
from kdtr.conformance.raised import RAISED, in_words, is_own, told
from kdtr.contract import (
    Acceptance,
    DraftTree,
    EngineError,
    EngineInfo,
    KdtrError,
    LogicalCache,
    Model,
    ModelConfig,
    Session,
)

SCRIPT = "script"  # the mode's name
CASE = "state"


@dataclass(frozen=True, slots=True)
class _Check:
    """`run` returns what is wrong, or None; `verbs` are what it needs beside the least."""

    name: str
    rules: tuple[str, ...]
    run: Callable[[_Script], str | None]
    verbs: frozenset[str] = frozenset()


def judge_state(
    bundle: str, model: Model, info: EngineInfo, config: ModelConfig, case: CaseInput
) -> CaseResult:
    """Run every check on a case with a prompt and a first tree of several nodes."""
    result = CaseResult(bundle, CASE, SCRIPT)
    least = frozenset({"prefill", "verify", "commit"})
    for check in _CHECKS:
        missing = sorted((least | check.verbs) - info.verbs)
        if missing:
            result.unshown.update(f"{verb}()" for verb in missing)
            continue
        script = _Script(model, info, config, case)
        place, found = Place(bundle, CASE, SCRIPT, check.name), Verdict.FAIL
        rules, stage = check.rules, check.name
        try:
            wrong = check.run(script)
        except RAISED as error:
            wrong = in_words(error)
            if is_own(error):  # an answer of the wrong form says nothing of what is checked
                found, rules, stage = Verdict.ERROR, (), "answer"
        closing = script.close()
        wrong = wrong or closing
        result.points += 1
        result.comparisons += 1
        if wrong is None:
            continue
        result.verdict = max(result.verdict, found, key=list(Verdict).index)
        finding = Finding(found, place, stage, wrong, rules=rules)
        if found is Verdict.FAIL or all(one.summary != wrong for one in result.findings):
            result.findings.append(finding)
    if not result.points:
        result.verdict = Verdict.UNSUPPORTED
    return result


def suits(case: CaseInput) -> bool:
    """Whether the script can run on a case."""
    return bool(case.chunks) and len(case.rounds[0].tree) > 1


class _Script:
    """Sessions of one check, and the questions of its case."""

    def __init__(
        self, model: Model, info: EngineInfo, config: ModelConfig, case: CaseInput
    ) -> None:
        self.info = info
        self.config = config
        self.prompt = [token for chunk in case.chunks for token in chunk]
        self._model = model
        self._shape = case.rounds[0].tree
        self._sessions: list[Session] = []

    def begun(self, *, room: int | None = None) -> Session:
        """A session after the prompt, with `room` slots left (None: for two trees)."""
        left = 2 * len(self._shape) if room is None else room
        session = self._model.open(max_len=len(self.prompt) + left)
        self._sessions.append(session)
        session.prefill(list(self.prompt))
        return session

    def tree(self, session: Session) -> DraftTree:
        """The case's first tree under the session's own root, which may be a near tie off."""
        if session.root is None:
            raise EngineError("root is None after prefill(); expected the target of its last row")
        root = host_integer("root", session.root)
        return replace(self._shape, tokens=(root, *self._shape.tokens[1:]))

    def verified(self, session: Session, tree: DraftTree) -> tuple[tuple[int, ...], bytes]:
        """The targets of a verify, and the bytes of its logits where it shows them."""
        found = as_verified(session.verify(tree))
        targets = tuple(host_integers("verify() targets", found.targets).tolist())
        if found.logits is None:
            return targets, b""
        return targets, host_copy("verify() logits", found.logits, Numbers.FLOATING).tobytes()

    def rounded(self, session: Session) -> tuple[Acceptance, tuple[int, ...]]:
        """The walk of a round over the case's first tree, and what it emitted."""
        done = as_round(session.round(self.tree(session)))
        return done.acceptance, tuple(host_integers("round() emitted", done.emitted).tolist())

    def close(self) -> str | None:
        """What went wrong in closing the sessions, or None."""
        for session in self._sessions:
            try:
                session.close()
            except RAISED as error:
                return f"then close() raised {told(error)}"
        return None

    def refused(self, session: Session, call: Callable[[], object]) -> str | None:
        """Whether the call is refused and changes nothing."""
        before = self.state(session)
        try:
            call()
        except EngineError as error:  # what went wrong in it, not what it refuses
            return f"raised {told(error)}; expected the refusal of a caller's mistake"
        except KdtrError:
            return self.changed(session, before)
        except RAISED as error:
            return f"raised {told(error)}; expected a KdtrError: an engine refuses in its own words"
        return "was not refused"

    def changed(self, session: Session, before: _State) -> str | None:
        after = self.state(session)
        if before.committed_len != after.committed_len:
            return f"changed committed_len from {before.committed_len} to {after.committed_len}"
        if before.root != after.root:
            return f"changed the root from {before.root} to {after.root}"
        if before.cache is not None and after.cache is not None:
            rows = np.flatnonzero(~unchanged_rows(before.cache, after.cache))
            if len(rows):
                return f"changed {len(rows)} committed rows, the first at slot {rows[0]}"
        return None

    def state(self, session: Session) -> _State:
        cache = host_cache(session.snapshot()) if "snapshot" in self.info.verbs else None
        return _State(session.committed_len, session.root, cache)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    committed_len: int
    root: int | None
    cache: LogicalCache | None


def _wrong_root(script: _Script) -> str | None:
    session = script.begun()
    tree = script.tree(session)
    other = (tree.tokens[0] + 1) % script.config.vocab_size
    wrong = replace(tree, tokens=(other, *tree.tokens[1:]))
    return script.refused(session, lambda: session.verify(wrong))


def _foreign_token(script: _Script) -> str | None:
    session = script.begun()
    tree = script.tree(session)
    wrong = replace(tree, tokens=(*tree.tokens[:-1], script.config.vocab_size))
    return script.refused(session, lambda: session.verify(wrong))


def _one_slot_short(script: _Script) -> str | None:
    n = len(script.tree(script.begun()))
    exact = script.begun(room=n)
    exact.verify(script.tree(exact))  # legal up to equality
    session = script.begun(room=n - 1)
    return script.refused(session, lambda: session.verify(script.tree(session)))


def _commit_of_nothing(script: _Script) -> str | None:
    session = script.begun()
    return script.refused(session, lambda: session.commit(Acceptance((0,), 0)))


def _second_commit(script: _Script) -> str | None:
    session = script.begun()
    session.verify(script.tree(session))
    session.commit(Acceptance((0,), script.prompt[0]))
    return script.refused(session, lambda: session.commit(Acceptance((0,), script.prompt[0])))


def _path_off_the_tree(script: _Script) -> str | None:
    session = script.begun()
    tree = script.tree(session)
    session.verify(tree)
    siblings = [i for i, parent in enumerate(tree.parents) if parent == tree.parents[1]]
    # Two siblings, or a node without the one above it: neither is a path of the tree.
    path = (0, *siblings[:2]) if len(siblings) > 1 else (0, len(tree) - 1)
    if path == (0, 1):
        path = (0, 1, 2)  # a tree of two nodes has no row 2
    return script.refused(session, lambda: session.commit(Acceptance(path, 0)))


def _verify_twice(script: _Script) -> str | None:
    session = script.begun()
    tree = script.tree(session)
    before = script.state(session)
    first, logits = script.verified(session, tree)
    second, again = script.verified(session, tree)
    if first != second:
        return f"gave other targets the second time: {first}, then {second}"
    if script.info.profile.deterministic and logits != again:
        return "gave other bits of logits the second time; the profile says deterministic"
    return script.changed(session, before)


def _two_sessions(script: _Script) -> str | None:
    session = script.begun()
    tree = script.tree(session)
    before = script.state(session)
    alone, _ = script.verified(session, tree)
    other = script.begun()
    other.prefill(list(reversed(script.prompt[-2:])))
    again, _ = script.verified(session, tree)
    if script.info.profile.deterministic and again != alone:
        return "gave other targets after another session had run"
    return script.changed(session, before)


def _reset(script: _Script) -> str | None:
    session = script.begun()
    before = script.state(session)
    session.verify(script.tree(session))
    session.reset()
    if session.committed_len != 0 or session.root is not None:
        return (
            f"left committed_len {session.committed_len} and root {session.root}; "
            "expected 0 and None"
        )
    session.prefill(list(script.prompt))
    if session.root != before.root:
        return f"then the same prompt gave root {session.root}; expected {before.root} as at first"
    return None


def _set_root_forgets(script: _Script) -> str | None:
    session = script.begun()
    tree = script.tree(session)
    session.verify(tree)
    session.set_root((tree.tokens[0] + 1) % script.config.vocab_size)
    return script.refused(session, lambda: session.commit(Acceptance((0,), 0)))


def _set_root(script: _Script) -> str | None:
    """Another root takes the place of the one that is there, and is the one that verify wants."""
    session = script.begun()
    tree = script.tree(session)
    other = (tree.tokens[0] + 1) % script.config.vocab_size
    session.set_root(other)
    if session.root != other:
        return f"left the root at {session.root}; expected {other}"
    session.verify(replace(tree, tokens=(other, *tree.tokens[1:])))
    return None


def _same_round_again(script: _Script) -> str | None:
    """A round of a fresh session after the same prompt leaves the same bits behind."""
    first = script.begun()
    done = script.rounded(first)
    state = script.state(first)
    for _ in range(2):
        session = script.begun()
        again = script.rounded(session)
        if again != done:
            return f"emitted {done[1]} at first, and then {again[1]}"
        wrong = script.changed(session, state) if script.info.profile.deterministic else None
        if wrong is not None:
            return f"the same round after the same prompt {wrong}; the profile says deterministic"
    return None


_CHECKS = (
    _Check("verify under another root", ("FWD-3",), _wrong_root),
    _Check("verify of a token outside the vocabulary", ("FWD-3",), _foreign_token),
    _Check("verify one slot over capacity", ("SLOT-3",), _one_slot_short),
    _Check("commit of nothing", ("COMMIT-5",), _commit_of_nothing),
    _Check("second commit", ("COMMIT-5",), _second_commit),
    _Check("commit of a path that is not the tree's", ("ACC-1", "COMMIT-5"), _path_off_the_tree),
    _Check("second verify", ("SLOT-2", "NUM-4"), _verify_twice),
    _Check("same round again", ("NUM-4", "LOSSLESS"), _same_round_again, frozenset({"round"})),
    _Check("another session at work", ("SLOT-2",), _two_sessions),
    _Check("reset", ("FWD-1",), _reset, frozenset({"reset"})),
    _Check("set_root", ("FWD-3",), _set_root, frozenset({"set_root"})),
    _Check("set_root after verify", ("COMMIT-5",), _set_root_forgets, frozenset({"set_root"})),
)
CHECK_NAMES = tuple(check.name for check in _CHECKS)
