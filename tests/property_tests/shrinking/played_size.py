"""How large a counterexample is: counted from what the law played, drawn or enumerated alike."""

from __future__ import annotations

from typing import NamedTuple

from kdtr.contract import Acceptance, DraftTree
from kdtr.property_tests.watch import Example, Played


class Size(NamedTuple):
    """Compared from the first field on.

    nodes   of all trees that were verified; a decode is a tree of the root alone
    path    nodes that were committed
    prompt  tokens that were prefilled
    chunks  prefills
    """

    nodes: int = 0
    path: int = 0
    prompt: int = 0
    chunks: int = 0


def session_size(played: Played) -> Size:
    """What one session was asked; rows that `forward_tokens` computes beside it are not counted."""
    nodes = path = prompt = chunks = 0
    for verb, what in played.events:
        if verb == "verify":
            assert isinstance(what, DraftTree)
            nodes += len(what)
        elif verb == "commit":
            assert isinstance(what, Acceptance)
            path += what.accept_len
        elif verb == "decode":
            nodes, path = nodes + 1, path + 1
        elif verb == "prefill":
            prompt, chunks = prompt + len(what), chunks + 1
    return Size(nodes, path, prompt, chunks)


def largest_session(example: Example) -> Played:
    """The session that was asked most, in the fewest calls: the others are its yardsticks."""
    return max(example.played, key=lambda played: (session_size(played), -len(played.events)))


def size(example: Example) -> Size:
    return session_size(largest_session(example))
