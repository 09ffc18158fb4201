"""An engine with the model that it has loaded, asked for rows of logits in every way it offers.

Nothing is known of the weights. What a row should be is what the engine itself says of the same
tokens by plain decoding; how far two such answers lie apart when nothing is wrong is its own
noise (`self_noise.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtr.conformance.host_array import Numbers, host_copy
from kdtr.conformance.observe import as_verified
from kdtr.conformance.raised import RAISED, told
from kdtr.contract import (
    Acceptance,
    DraftTree,
    Engine,
    EngineError,
    EngineInfo,
    KdtrError,
    Model,
    ModelSource,
    UnsupportedError,
)

LEAST_TOKENS = 16
LEAST_SLOTS = 48  # the longest prompt of the checks, and a tree behind it
_LEAST = ("prefill", "set_root", "verify", "commit")


@dataclass(frozen=True, slots=True)
class SelfModel:
    """The loaded model; every answer comes from sessions of its own.

    max_len  slots of each session
    """

    info: EngineInfo
    model: Model
    vocab_size: int
    max_len: int

    def offers(self, verb: str) -> bool:
        return verb in self.info.verbs

    @contextmanager
    def session(self, committed: Sequence[int], n_chunks: int = 1) -> Iterator[Any]:
        """A session with these tokens prefilled, in so many chunks of about equal length."""
        session = self.model.open(max_len=self.max_len)
        try:
            for part in np.array_split(np.array(committed, dtype=np.int64), max(1, n_chunks)):
                if len(part):
                    session.prefill(part.tolist())
            yield session
        finally:
            session.close()

    def rows(self, session: Any, tree: DraftTree) -> np.ndarray:
        """Logits [n, w] float64 of a verify under the tree's own root."""
        session.set_root(tree.tokens[0])
        logits = as_verified(session.verify(tree)).logits
        if logits is None:
            raise UnsupportedError(
                f"{self.info.name} shows no logits; `gate --self` compares rows of logits, so its "
                "verify() must return them"
            )
        rows = host_copy("verify() logits", logits, Numbers.FLOATING).astype(np.float64)
        if rows.shape != (len(tree), self.vocab_size):
            raise EngineError(
                f"verify() returned logits {list(rows.shape)}, the tree has {len(tree)} nodes; "
                f"expected {[len(tree), self.vocab_size]}"
            )
        return rows

    def tree_rows(self, prompt: Sequence[int], tree: DraftTree) -> np.ndarray:
        with self.session(prompt) as session:
            return self.rows(session, tree)

    def plain_row(self, tokens: Sequence[int], n_chunks: int = 1) -> np.ndarray:
        """Logits [w] after the tokens: all but the last prefilled, then the lone root."""
        with self.session(tokens[:-1], n_chunks) as session:
            return self.rows(session, lone(tokens[-1]))[0]

    def forward_rows(
        self, prompt: Sequence[int], tokens: Sequence[int], positions: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        """forward_tokens behind the prompt: logits [n, w]."""
        with self.session(prompt) as session:
            logits = session.forward_tokens(list(tokens), positions, mask)
            return host_copy("forward_tokens() logits", logits, Numbers.FLOATING).astype(np.float64)

    def causal_row(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [w] after the tokens by one causal forward_tokens from an empty cache."""
        n = len(tokens)
        return self.forward_rows((), tokens, np.arange(n), np.tri(n, dtype=bool))[-1]


def load_self(
    engine: Engine, source: ModelSource, *, vocab_size: int | None, max_len: int
) -> SelfModel:
    """Load the model. Raises UnsupportedError by name for a verb that is missing."""
    missing = [verb for verb in _LEAST if verb not in engine.info.verbs]
    if missing:
        raise UnsupportedError(
            f"{engine.info.name} does not offer {', '.join(missing)}; `gate --self` needs "
            f"{', '.join(_LEAST)}"
        )
    try:
        model = engine.load(source)
    except KdtrError:
        raise
    except RAISED as error:
        raise EngineError(f"load() raised {told(error)}") from error
    config = getattr(model, "config", None)
    n_tokens = _known(config, "vocab_size") if vocab_size is None else vocab_size
    if n_tokens is None:
        raise EngineError("the loaded model has no config.vocab_size; give --vocab-size")
    if n_tokens < LEAST_TOKENS:
        raise UnsupportedError(
            f"the vocabulary has {n_tokens} tokens; `gate --self` draws from {LEAST_TOKENS}"
        )
    most = _known(config, "max_position_embeddings") or max_len
    if most < LEAST_SLOTS:
        raise UnsupportedError(
            f"the model has {most} positions; `gate --self` asks for up to {LEAST_SLOTS}"
        )
    return SelfModel(engine.info, model, n_tokens, min(max_len, most))


def _known(config: object, name: str) -> int | None:
    """A size of the model's configuration, where it has one."""
    size = getattr(config, name, None)
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool):
        raise EngineError(f"the loaded model's config.{name} = {size!r}; expected an integer")
    return size


def lone(token: int) -> DraftTree:
    return DraftTree((token,), (-1,))


def ancestors(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The path of a node, root first, by its own few lines (MASK-2)."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return tuple(path)


def path_tokens(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[i] for i in ancestors(tree.parents, node))


def committed_row(
    model: SelfModel, prompt: Sequence[int], tree: DraftTree, path: Sequence[int], root: int
) -> np.ndarray:
    """Logits [w] of the lone root after a verify and the commit of a path, whatever was decided."""
    with model.session(prompt) as session:
        model.rows(session, tree)
        session.commit(Acceptance(tuple(path), root))
        return model.rows(session, lone(root))[0]
