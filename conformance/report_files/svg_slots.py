"""The slots of a finding as a picture: what the forward writes, and what commit must leave."""

from __future__ import annotations

from dataclasses import dataclass

from kdtr.conformance.drawing import Drawing
from kdtr.conformance.drive import MODE
from kdtr.conformance.finding import Finding
from kdtr.conformance.report_files.html_elements import Element, element
from kdtr.conformance.report_files.svg import box, picture, px, words
from kdtr.contract import STAGE, Source

_W, _H = 64, 34  # of a slot
_LEFT, _TOP = 108, 22
_GAP = 34  # between two rows of slots, for arrows
_BEFORE = 2  # committed slots that are drawn
_MOST = 24  # slots that are drawn
_COMMIT = ("commit", "must leave")
_OF_ROWS = ("tokens", "positions", "slots")  # stages that say what lies in a slot
_OF_COMMIT = (Source.COMMIT, Source.JUDGE)


@dataclass(frozen=True, slots=True)
class _Line:
    """A row of slots: which node lies in which slot, and which slots differ."""

    name: tuple[str, str]
    nodes: dict[int, int]
    wrong: frozenset[int] = frozenset()


def slot_picture(ident: str, finding: Finding, drawing: Drawing) -> Element:
    """Rows of slots: written by the forward, and of a tree what commit must leave."""
    slots = _slots_to_draw(drawing)
    at: dict[int, float] = {slot: _LEFT + i * _W for i, slot in enumerate(slots)}
    lines = _lines(finding, drawing)
    height = _TOP + len(lines) * (_H + _GAP) - _GAP + 22
    parts: list[Element] = [words(_LEFT - 8, _TOP - 7, "slot", "small", "end")]
    parts += [words(at[slot] + _W / 2, _TOP - 7, slot, "small") for slot in slots]
    tops = [_TOP + number * (_H + _GAP) for number in range(len(lines))]
    for line, top in zip(lines, tops, strict=True):
        for part, text in enumerate(line.name):
            parts.append(words(_LEFT - 8, top + 15 + 13 * part, text, "small", "end"))
        parts += [part for slot in slots for part in _slot(drawing, line, slot, at[slot], top)]
    commit = next((i for i, line in enumerate(lines) if line.name == _COMMIT), None)
    if commit is not None:
        parts += _arrows(drawing, at, tops[0] + _H, tops[commit])
    left_out = slots[-1] + 1 - slots[0] - len(slots)
    left_out += drawing.committed_len + len(drawing.parents) - slots[-1] - 1
    if left_out:
        told = f"{left_out} slots are not drawn"
        parts.append(words(_LEFT, height - 6, told, "small", "start"))
    width = _LEFT + len(slots) * _W + 6
    return picture(ident, "Slots", _description(drawing, lines), width, height, parts)


def _slots_to_draw(drawing: Drawing) -> list[int]:
    """Ascending: the last committed ones, and all of a small tree; of a larger one those of the
    nodes that are drawn, and those that its path goes to."""
    before, n = drawing.committed_len, len(drawing.parents)
    slots = set(range(max(0, before - _BEFORE), before))
    if n <= _MOST:
        return sorted(slots | set(range(before, before + n)))
    nodes = range(_MOST) if drawing.is_chunk else drawing.tree_nodes()[:_MOST]
    slots |= {before + k for k in range(min(len(drawing.path), _MOST))}
    return sorted(slots | {before + node for node in nodes})


def slots_tell(finding: Finding, drawing: Drawing) -> bool:
    """Whether there is something to see: a prompt fills its slots in order, unless they differ."""
    stage = STAGE.get(finding.stage)
    told = finding.stage in _OF_ROWS or (stage is not None and stage.source in _OF_COMMIT)
    return bool(drawing.slots) and (told or not drawing.is_chunk)


def _lines(finding: Finding, drawing: Drawing) -> list[_Line]:
    written = {slot: node for node, slot in enumerate(drawing.slots)}
    stage = STAGE.get(finding.stage)
    by_commit = stage is not None and stage.source in _OF_COMMIT
    wrong = frozenset(drawing.slots[node] for node in drawing.rows if node < len(drawing.slots))
    name = ("written by", "the prefill" if drawing.is_chunk else "the forward")
    lines = [_Line(name, written, wrong if finding.stage in _OF_ROWS else frozenset())]
    shown = drawing.shown_slots
    if shown is not None and shown != drawing.slots:
        theirs = {slot: node for node, slot in enumerate(shown)}
        off = {slot for slot, node in theirs.items() if written.get(slot) != node}
        lines.append(_Line(("the engine", "says"), theirs, frozenset(off)))
    if drawing.is_chunk:
        return lines
    kept = _kept(drawing, drawing.path)
    if finding.stage == "moves" and drawing.shown_moves is not None:
        before, moves = drawing.committed_len, set(drawing.shown_moves)
        off = {slot for slot, node in kept.items() if (before + node, slot) not in moves}
    else:
        off = {slot for slot, node in kept.items() if by_commit and node in drawing.rows}
    lines.append(_Line(_COMMIT, kept, frozenset(off)))
    theirs_path = drawing.shown_path
    lives_with_it = finding.place.mode in MODE and not MODE[finding.place.mode].pinned
    if theirs_path is not None and theirs_path != drawing.path and lives_with_it:
        theirs = _kept(drawing, theirs_path[:_MOST])  # it may be of any length
        off = {slot for slot in {*kept, *theirs} if kept.get(slot) != theirs.get(slot)}
        lines.append(_Line(("by the", "engine's path"), theirs, frozenset(off)))
    return lines


def _kept(drawing: Drawing, path: tuple[int, ...]) -> dict[int, int]:
    return {drawing.committed_len + k: node for k, node in enumerate(path)}


def _slot(drawing: Drawing, line: _Line, slot: int, x: float, top: float) -> list[Element]:
    node = line.nodes.get(slot)
    wrong = slot in line.wrong
    if node is not None and not 0 <= node < len(drawing.positions):  # of an engine's path
        class_, text, below = "taken", str(node)[:9], "no node"
    elif node is not None:
        class_, text, below = "taken", f"node {node}", f"pos {drawing.positions[node]}"
        if drawing.is_chunk:
            text = f"row {node}"
    elif slot < drawing.committed_len:
        class_, text, below = "committed", "cached", ""
    else:
        class_, text, below = "free", "free", ""
    shown = drawing.shown_positions
    if node is not None and shown is not None and 0 <= node < len(shown):
        below = below if shown[node] == drawing.positions[node] else f"pos {shown[node]} ✗"
    parts = [box(x, top, _W - 3, _H, f"slot {class_}{' wrong' if wrong else ''}")]
    middle = x + (_W - 3) / 2
    marked = (f"✗ {text}", "small bad") if wrong else (text, "small")
    parts.append(words(middle, top + (15 if below else 21), *marked))
    if below:
        parts.append(words(middle, top + 28, below, "small bad" if "✗" in below else "small"))
    return parts


def _arrows(drawing: Drawing, at: dict[int, float], start: float, end: float) -> list[Element]:
    """From where the forward wrote a row of the path to where commit copies it."""
    arrows = []
    for k, node in enumerate(drawing.path):
        destination = drawing.committed_len + k
        source = drawing.slots[node] if node < len(drawing.slots) else -1
        if source not in at or destination not in at:
            continue
        x1, x2 = at[source] + (_W - 3) / 2, at[destination] + (_W - 3) / 2
        moved = "arrow moved" if source != destination else "arrow"
        line = f"M{px(x1)} {px(start)}L{px(x2)} {px(end - 5)}"
        head = f"M{px(x2 - 4)} {px(end - 8)}L{px(x2)} {px(end - 1)}L{px(x2 + 4)} {px(end - 8)}"
        arrows.append(element("path", d=line, class_=moved))
        arrows.append(element("path", d=f"{head}Z", class_=f"{moved} head"))
    return arrows


def _description(drawing: Drawing, lines: list[_Line]) -> str:
    one = "row" if drawing.is_chunk else "node"
    told = []
    for line in lines:
        places = ", ".join(f"{one} {node} in slot {slot}" for slot, node in line.nodes.items())
        wrong = f"; wrong in slots {', '.join(map(str, sorted(line.wrong)))}" if line.wrong else ""
        told.append(f"{' '.join(line.name)}: {places}{wrong}")
    return f"{drawing.committed_len} slots are committed. {'. '.join(told)}"
