"""Where in a session a row is, and what its neighbours are called."""

from __future__ import annotations

from kdtr.conformance.finding import Place
from kdtr.conformance.xray_drive import Answer
from kdtr.conformance.xray_replay import Cell, SeenRow, path_to

BUNDLE = "x-ray"


def length_at(answer: Answer) -> int:
    """L at the verify, by COMMIT-2."""
    steps = answer.script.steps[: answer.step.number]
    return sum(map(len, answer.script.chunks)) + sum(len(step.path) for step in steps)


def known_cells(answer: Answer) -> dict[int, Cell]:
    """Every token fed so far, by what became of it under the rules."""
    known: dict[int, Cell] = {}
    length = 0
    for chunk in answer.script.chunks:
        for token in chunk:
            known[token] = Cell(token, length, f"slot {length}")
            length += 1
    for step in answer.script.steps[: answer.step.number]:
        for node, token in enumerate(step.tree.tokens):
            depth = len(path_to(step.tree.parents, node)) - 1
            name = f"node {node} of round {step.number}, rejected"
            if node in step.path:
                name = f"slot {length + depth}"
            known[token] = Cell(token, length + depth, name)
        length += len(step.path)
    for node, token in enumerate(answer.step.tree.tokens):
        depth = len(path_to(answer.step.tree.parents, node)) - 1
        known[token] = Cell(token, length + depth, f"node {node}")
    return known


def from_length(position: int, length: int) -> str:
    """`L+2`."""
    return f"L{position - length:+d}" if position != length else "L"


def place(model: str, answer: Answer) -> Place:
    return Place(BUNDLE, model, answer.script.name, f"round{answer.step.number}")


def described(row: SeenRow) -> str:
    slots = sum(cell.name.startswith("slot") for cell in row.visible)
    names = [cell.name for cell in row.visible if cell.name.startswith("node")]
    nodes = ", ".join(name.removeprefix("node ") for name in names)
    return f"slots 0..{slots - 1} and node{'s' * (len(names) > 1)} {nodes}"
