"""What a golden case asks of an engine: prompts in chunks, then draft trees, round by round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from kdtr.contract import NO_LIMIT, CaseError, DraftTree, EmitLimit


@dataclass(frozen=True, slots=True)
class Planted:
    """A tree whose accepted path is planted: the recorder fills in tokens from the truth.

    parents      as in DraftTree
    path         the nodes to be accepted, root first; a node off it gets a token that is not the
                 target of its parent
    max_emitted  the round's length limit, or None (ACC-4)
    stop_at      index of the emitted token that the round is told to stop at, or None (ACC-4)
    tied         of a model whose tokens t and t + tied have equal logits: the first child off the
                 path of each node on it gets that twin of the target (ACC-1), or None
    """

    parents: tuple[int, ...]
    path: tuple[int, ...] = (0,)
    max_emitted: int | None = None
    stop_at: int | None = None
    tied: int | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """A best-first tree from generated draft logits (TREE-3).

    ranks   per depth, where the truth's next token ranks among the draft's (0: first); None: it
            is not among them, and the walk ends above
    budget  nodes besides the root
    """

    ranks: tuple[int | None, ...]
    budget: int


# How much of the truth a case records.
STAGES = "stages"  # every stage, float64
DECISIONS = "decisions"  # integers, and the numbers that decide: logits and router scores


@dataclass(frozen=True, slots=True, eq=False)
class RoundInput:
    """One round as an engine is asked to do it: the tree, and what it may be built from."""

    tree: DraftTree
    draft_logits: np.ndarray | None = None
    budget: int | None = None
    limit: EmitLimit = NO_LIMIT


# RoundInput: a round that was recorded before, tokens, drafts and limit as they are.
RoundPlan = Planted | Drafted | DraftTree | RoundInput


@dataclass(frozen=True, slots=True)
class CasePlan:
    """A case before it is recorded.

    alias   its name for people: letters, digits, dashes
    why     one line: what it is for
    rules   the rules it is there to hold
    chunks  the prompt, in the pieces in which it is prefilled
    root    a root to set instead of a prompt, for a cache that starts empty; None with a prompt
    level   how much of the truth is recorded
    """

    alias: str
    why: str
    rules: tuple[str, ...]
    rounds: tuple[RoundPlan, ...]
    chunks: tuple[tuple[int, ...], ...] = ()
    root: int | None = None
    level: str = STAGES

    def __post_init__(self) -> None:
        if not self.alias or not all(c.isalnum() or c == "-" for c in self.alias):
            raise CaseError(f"alias = {self.alias!r}; expected letters, digits and dashes")
        if len(self.alias) > 32:
            raise CaseError(f"alias {self.alias!r} has {len(self.alias)} characters; at most 32")
        if bool(self.chunks) == (self.root is not None):
            raise CaseError(
                f"case {self.alias}: {len(self.chunks)} prompt chunks and root = {self.root}; "
                "expected a prompt or a root, and not both"
            )
        if self.level not in (STAGES, DECISIONS):
            raise CaseError(
                f"case {self.alias}: level = {self.level!r}; expected {STAGES!r} or {DECISIONS!r}"
            )
        if any(not chunk for chunk in self.chunks):
            raise CaseError(f"case {self.alias}: a prompt chunk is empty; expected token ids")
        if not self.rounds:
            raise CaseError(f"case {self.alias} has no rounds; expected at least one")


@dataclass(frozen=True, slots=True, eq=False)
class CaseInput:
    """A recorded case, without any expectation: all that an engine ever sees.

    max_len  slots to open the session with: exactly what the case needs (SLOT-3)
    level    how much of the truth is recorded beside it
    """

    alias: str
    why: str
    rules: tuple[str, ...]
    chunks: tuple[tuple[int, ...], ...]
    root: int | None
    rounds: tuple[RoundInput, ...]
    max_len: int
    level: str = STAGES
    case_id: str = ""

    def points(self) -> list[str]:
        """Every chunk and round by name, in order."""
        chunks = [f"chunk{i}" for i in range(len(self.chunks))]
        return chunks + [f"round{i}" for i in range(len(self.rounds))]

    def tensors(self) -> dict[str, np.ndarray]:
        """The case by name, as stored under `input/<alias>/`."""
        tensors = {"max_len": np.array(self.max_len)}
        if self.root is not None:
            tensors["root"] = np.array(self.root)
        for i, chunk in enumerate(self.chunks):
            tensors[f"chunk{i}/tokens"] = np.array(chunk)
        for i, entry in enumerate(self.rounds):
            tensors[f"round{i}/tokens"] = np.array(entry.tree.tokens)
            tensors[f"round{i}/parents"] = np.array(entry.tree.parents)
            if entry.limit.stop_tokens:
                stops = sorted(entry.limit.stop_tokens)
                tensors[f"round{i}/stop_tokens"] = np.array(stops)
            if entry.limit.max_emitted is not None:
                tensors[f"round{i}/max_emitted"] = np.array(entry.limit.max_emitted)
            if entry.draft_logits is not None:
                tensors[f"round{i}/draft_logits"] = entry.draft_logits
                tensors[f"round{i}/budget"] = np.array(entry.budget)
        return tensors

    def content_id(self, weights_sha256: str) -> str:
        """Twelve hex digits that change with the weights or with anything an engine is asked."""
        digest = hashlib.sha256(weights_sha256.encode())
        for name, array in sorted(self.tensors().items()):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()[:12]
