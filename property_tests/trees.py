"""Draft trees as the laws see them: written down again here, and drawn as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kdtr.contract import NO_LIMIT, DraftTree, EmitLimit


def children(tree: DraftTree, node: int) -> list[int]:
    return [i for i, parent in enumerate(tree.parents) if parent == node]


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The nodes root..node, both included."""
    above = tree.parents[node]
    return (0,) if node == 0 else (*path_to(tree, above), node)


def path_tokens(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[i] for i in path_to(tree, node))


def depth(tree: DraftTree) -> int:
    """Edges from the root to the deepest node."""
    depths = [0]
    for parent in tree.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def walk(
    tree: DraftTree, targets: Sequence[int], limit: EmitLimit = NO_LIMIT
) -> tuple[tuple[int, ...], int]:
    """The accepted path and the bonus (ACC-1, ACC-2, ACC-4), as a recursion.

    The target of a node is emitted in any case. It ends the walk if it is a stop token, the last
    allowed, or not a child; otherwise the walk goes on from that child.

    >>> tree = DraftTree((7, 3, 5, 4), (-1, 0, 0, 2))
    >>> walk(tree, (5, 0, 4, 9)), walk(tree, (5, 0, 4, 9), EmitLimit(max_emitted=1))
    (((0, 2, 3), 9), ((0,), 5))
    """

    def below(node: int, left: int) -> tuple[tuple[int, ...], int]:
        target = targets[node]
        if target not in limit.stop_tokens and left > 1:
            for child in children(tree, node):
                if tree.tokens[child] == target:
                    path, bonus = below(child, left - 1)
                    return (node, *path), bonus
        return (node,), target

    return below(0, limit.max_emitted or len(tree) + 1)


SHAPES = ("root", "chain", "star", "branched")


def shape_class(tree: DraftTree) -> str:
    """root alone; chain, which hides what takes index for depth; star, all children of the root,
    which hides what depth alone shows; branched, the rest.

    >>> [shape_class(DraftTree(tuple(range(len(p))), p)) for p in [(-1,), (-1, 0), (-1, 0, 0, 2)]]
    ['root', 'chain', 'branched']
    """
    if len(tree) == 1:
        return "root"
    if tree.parents == tuple(range(-1, len(tree) - 1)):
        return "chain"
    return "star" if not any(tree.parents[1:]) else "branched"


def under_root(tree: DraftTree, root: int) -> DraftTree:
    """The tree with this token at its root."""
    return DraftTree((root, *tree.tokens[1:]), tree.parents)


def led(tree: DraftTree, target: int) -> DraftTree:
    """The tree with this token at the root's last child, if no child of the root has it.

    >>> led(DraftTree((7, 3, 5, 4), (-1, 0, 0, 2)), 9).tokens
    (7, 3, 9, 4)
    """
    below = children(tree, 0)
    if not below or target in [tree.tokens[child] for child in below]:
        return tree
    last = below[-1]
    return DraftTree((*tree.tokens[:last], target, *tree.tokens[last + 1 :]), tree.parents)


def chain(tokens: Sequence[int]) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


def reordered(tree: DraftTree, order: Sequence[int]) -> DraftTree:
    """Node k of the result is node order[k] of the tree; order is topological."""
    place = {node: k for k, node in enumerate(order)} | {-1: -1}
    return DraftTree(
        tuple(tree.tokens[node] for node in order),
        tuple(place[tree.parents[node]] for node in order),
    )


def siblings_reversed(tree: DraftTree) -> tuple[int, ...]:
    """The nodes depth first, every node's children last to first."""

    def below(node: int) -> list[int]:
        return [node, *(i for child in reversed(children(tree, node)) for i in below(child))]

    return tuple(below(0))


def pruned(tree: DraftTree, cut: int) -> tuple[int, ...]:
    """The nodes that stay when the branch from `cut` on is taken away."""
    return tuple(i for i in range(len(tree)) if cut not in path_to(tree, i))


def picture(tree: DraftTree, marked: Collection[int] = ()) -> str:
    """The tree as text, a node on a line as `id: token`.

    >>> print(picture(DraftTree((7, 3, 5, 4), (-1, 0, 1, 0)), marked=[2]))
    0: 7
      1: 3
        2: 5   <--
      3: 4
    """
    lines: list[str] = []

    def draw(node: int, depth: int) -> None:
        mark = "   <--" if node in marked else ""
        lines.append(f"{'  ' * depth}{node}: {tree.tokens[node]}{mark}")
        for child in children(tree, node):
            draw(child, depth + 1)

    draw(0, 0)
    return "\n".join(lines)
