"""What an engine does not show, by what it takes to show it, the most telling first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kdtr.contract import STAGES, Source


@dataclass(frozen=True, slots=True)
class _Group:
    """Stages that one thing shows.

    names  of the stages
    first  those to show first; or one name for the whole
    by     what shows them
    tells  what one learns
    """

    names: frozenset[str]
    first: tuple[str, ...]
    by: str
    tells: str


def _of(*sources: Source) -> frozenset[str]:
    return frozenset(stage.name for stage in STAGES if stage.source in sources)


_LOGITS, _WALK = frozenset({"logits"}), frozenset({"path", "bonus"})
_LAYOUT = frozenset({"parents", "tokens", "positions", "mask", "slots"})

# In the order in which they are worth showing.
_GROUPS = (
    _Group(_LAYOUT, ("positions", "mask"), "trace", "a wrong layout of the tree"),
    _Group(
        _of(Source.LAYER, Source.FORWARD) - _LAYOUT - _LOGITS,
        ("scores",),
        "trace",
        "the layer, and what in it",
    ),
    _Group(
        _of(Source.COMMIT, Source.JUDGE), ("the cache",), "snapshot()", "what commit left there"
    ),
    _Group(_LOGITS, ("logits",), "trace", "where no verb returns them"),
    _Group(_WALK, ("path", "bonus"), "accept()", "a wrong walk"),
    _Group(_of(Source.WALK) - _WALK, ("targets",), "trace", "round()'s decisions and moves"),
    _Group(_of(Source.BUILD), ("best-first trees",), "build()", "TREE-3 and TREE-4"),
)


@dataclass(frozen=True, slots=True)
class Unshown:
    """Stages that are not shown, in a few words; what would show them; and what one would learn."""

    what: str
    by: str
    tells: str


def unshown_groups(unshown: Iterable[str]) -> list[Unshown]:
    """One for each thing that would show some of these stages, the most telling first."""
    left = set(unshown)
    return [
        Unshown(_what(group, left & group.names), group.by, group.tells)
        for group in _GROUPS
        if left & group.names
    ]


def unshown_lines(unshown: Iterable[str]) -> list[str]:
    """The same as lines in columns."""
    return [f"  {one.what:<29} {one.by:<11} {one.tells}" for one in unshown_groups(unshown)]


def _what(group: _Group, missing: set[str] | frozenset[str]) -> str:
    if not group.names.issuperset(group.first):
        return group.first[0]
    named = [name for name in group.first if name in missing] or sorted(missing)[:2]
    others = len(missing) - len(named)
    return ", ".join(named) + (f" and {others} more" if others else "")
