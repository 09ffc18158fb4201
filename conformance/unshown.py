"""What an engine does not show, by what it would take to show it, the most telling first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kdtr.contract import STAGES, Source


@dataclass(frozen=True, slots=True)
class _Group:
    """Stages that one thing shows.

    names  of the stages
    first  those to show first; a list with others is cut to these
    by     what shows them
    tells  what one learns from it
    """

    names: frozenset[str]
    first: tuple[str, ...]
    by: str
    tells: str


def _of(source: Source) -> frozenset[str]:
    return frozenset(stage.name for stage in STAGES if stage.source is source)


_LAYOUT = frozenset({"parents", "tokens", "positions", "mask", "slots"})
_CACHE = frozenset({"cache_tokens", "cache_positions", "cache_c_kv", "cache_k_pe", "untouched"})

# In the order in which they are worth showing.
_GROUPS = (
    _Group(_LAYOUT, ("positions", "mask"), "trace", "a wrong layout of the tree"),
    _Group(
        _of(Source.LAYER) | {"embedding", "final_hidden"},
        ("scores",),
        "trace",
        "the layer, and what in it",
    ),
    _Group(_CACHE, (), "snapshot()", "what commit left in the cache"),
    _Group(frozenset({"copied"}), (), "snapshot(), and c_kv and k_pe", "rows changed in moving"),
    _Group(frozenset({"logits"}), ("logits",), "trace", "wrong logits where no verb returns them"),
    _Group(frozenset({"path", "bonus"}), ("path", "bonus"), "accept()", "a wrong walk"),
    _Group(_of(Source.WALK), ("targets",), "trace of round()", "targets, and rows moved"),
    _Group(_of(Source.BUILD), (), "build()", "a wrong best-first tree"),
)


def unshown_lines(unshown: Iterable[str]) -> list[str]:
    """One line per group that has something missing; empty where nothing is."""
    left = set(unshown)
    lines = []
    for group in _GROUPS:
        missing = left & group.names
        left -= missing
        if not missing:
            continue
        first = [name for name in group.first if name in missing]
        others = len(missing) - len(first)
        if first:
            what = ", ".join(first) + (f" (and {others} more)" if others else "")
            lines.append(f"  {what + ' by ' + group.by:<37} tells {group.tells}")
        else:
            lines.append(f"  {group.by:<37} tells {group.tells}")
    return lines
