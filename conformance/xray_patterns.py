"""Ways in which engines get rows, positions and the cache wrong, each with its sentence.

An engine shows a pattern if the pattern explains every row of every session. Order counts: of
two that explain all rows the first is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdtr.conformance.xray_replay import (
    EMPTY,
    Parents,
    Pattern,
    SeenRow,
    State,
    path_to,
    rule_columns,
    rule_commit,
    rule_positions,
)

# Mask


def _block(state: State, parents: Parents, sees: list[set[int]]) -> list[set[int]]:
    """The open prefix, and nodes `sees[i]` of the tree."""
    prefix = set(range(state.length))
    return [prefix | {state.length + j for j in row} for row in sees]


def _union(rows: list[set[int]], more: list[set[int]]) -> list[set[int]]:
    return [a | b for a, b in zip(rows, more, strict=True)]


def _sees_earlier(state: State, parents: Parents) -> list[set[int]]:
    return _block(state, parents, [set(range(i + 1)) for i in range(len(parents))])


def _sees_all(state: State, parents: Parents) -> list[set[int]]:
    return _block(state, parents, [set(range(len(parents))) for _ in parents])


def _sees_earlier_siblings(state: State, parents: Parents) -> list[set[int]]:
    alike = [{j for j in range(i) if parents[j] == parents[i]} for i in range(len(parents))]
    return _union(rule_columns(state, parents), _block(state, parents, alike))


def _sees_siblings(state: State, parents: Parents) -> list[set[int]]:
    alike = [{j for j, parent in enumerate(parents) if parent == p} for p in parents]
    return _union(rule_columns(state, parents), _block(state, parents, alike))


def _sees_level(state: State, parents: Parents) -> list[set[int]]:
    depth = [len(path_to(parents, i)) for i in range(len(parents))]
    sees = [{j for j, d in enumerate(depth) if d < depth[i]} | {i} for i in range(len(parents))]
    return _block(state, parents, sees)


def _sees_descendants(state: State, parents: Parents) -> list[set[int]]:
    n = len(parents)
    return _block(
        state, parents, [{j for j in range(n) if i in path_to(parents, j)} for i in range(n)]
    )


def _sees_parent_only(state: State, parents: Parents) -> list[set[int]]:
    return _block(state, parents, [{i, max(parent, 0)} for i, parent in enumerate(parents)])


def _sees_itself_only(state: State, parents: Parents) -> list[set[int]]:
    return _block(state, parents, [{i} for i in range(len(parents))])


def _without_root(state: State, parents: Parents) -> list[set[int]]:
    rows = rule_columns(state, parents)
    return [row - {state.length} if i else row for i, row in enumerate(rows)]


def _without_itself(state: State, parents: Parents) -> list[set[int]]:
    rows = rule_columns(state, parents)
    return [row - {state.length + i} for i, row in enumerate(rows)]


def _left(state: State, parents: Parents) -> list[set[int]]:
    rows = rule_columns(state, parents)
    return [{c - (c >= state.length) for c in row if c != state.length - 1} for row in rows]


def _right(state: State, parents: Parents) -> list[set[int]]:
    return [
        {c + (c >= state.length) for c in row} | {state.length}
        for row in rule_columns(state, parents)
    ]


def _right_with_a_gap(state: State, parents: Parents) -> list[set[int]]:
    return [{c + (c >= state.length) for c in row} for row in rule_columns(state, parents)]


def _no_prefix(state: State, parents: Parents) -> list[set[int]]:
    rows = rule_columns(state, parents)
    return [{c for c in row if c >= state.length} for row in rows]


def _no_first_slot(state: State, parents: Parents) -> list[set[int]]:
    return [row - {0} for row in rule_columns(state, parents)]


def _no_last_slot(state: State, parents: Parents) -> list[set[int]]:
    return [row - {state.length - 1} for row in rule_columns(state, parents)]


def _kept_mask(state: State, parents: Parents) -> list[set[int]]:
    return rule_columns(state, state.sizes.get(len(parents), parents))


def _one_slot_more(state: State, parents: Parents) -> list[set[int]]:
    """A slot behind the tree that an earlier, larger forward has written."""
    behind = state.length + len(parents)
    stale = {behind} if behind < len(state.slots) else set()
    return [row | stale for row in rule_columns(state, parents)]


def _all_written_slots(state: State, parents: Parents) -> list[set[int]]:
    behind = set(range(state.length + len(parents), len(state.slots)))
    return [row | behind for row in rule_columns(state, parents)]


def _foreign_column(state: State, parents: Parents) -> list[set[int]]:
    return [row | {state.length + len(parents)} for row in rule_columns(state, parents)]


# Positions


def _by_index(state: State, parents: Parents) -> list[int]:
    return [state.length + i for i in range(len(parents))]


def _low(state: State, parents: Parents) -> list[int]:
    return [p - 1 for p in rule_positions(state, parents)]


def _high(state: State, parents: Parents) -> list[int]:
    return [p + 1 for p in rule_positions(state, parents)]


def _drafts_high(state: State, parents: Parents) -> list[int]:
    return [p + (i > 0) for i, p in enumerate(rule_positions(state, parents))]


def _drafts_low(state: State, parents: Parents) -> list[int]:
    return [p - (i > 0) for i, p in enumerate(rule_positions(state, parents))]


def _root_low(state: State, parents: Parents) -> list[int]:
    return [p - (i == 0) for i, p in enumerate(rule_positions(state, parents))]


def _all_at_root(state: State, parents: Parents) -> list[int]:
    return [state.length for _ in parents]


def _without_prefix(state: State, parents: Parents) -> list[int]:
    return [p - state.length for p in rule_positions(state, parents)]


def _of_first_tree(state: State, parents: Parents) -> list[int]:
    return rule_positions(state, state.sizes.get(len(parents), parents))


# Commit


def _in_place(state: State, path: Sequence[int], n_rows: int) -> None:
    state.length += len(path)


def _grow_by_tree(state: State, path: Sequence[int], n_rows: int) -> None:
    state.length += n_rows


def _move_and_grow_by_tree(state: State, path: Sequence[int], n_rows: int) -> None:
    rule_commit(state, path, n_rows)
    state.length += n_rows - len(path)


def _one_rejected_stays(state: State, path: Sequence[int], n_rows: int) -> None:
    rule_commit(state, path, n_rows)
    state.length += len(path) < n_rows


def _root_not_counted(state: State, path: Sequence[int], n_rows: int) -> None:
    rule_commit(state, path, n_rows)
    state.length -= 1


def _last_stays(state: State, path: Sequence[int], n_rows: int) -> None:
    length = state.length
    if len(path) > 1:
        rule_commit(state, path[:-1], n_rows)
    state.length = length + len(path)


def _one_at_a_time_upside_down(state: State, path: Sequence[int], n_rows: int) -> None:
    for k, node in reversed([*enumerate(path)]):
        state.write(state.length + k, state.at(state.length + node))
    state.length += len(path)


def _keys_stay(state: State, path: Sequence[int], n_rows: int) -> None:
    before = list(state.slots)
    rule_commit(state, path, n_rows)
    for slot in range(state.length - len(path), state.length):
        state.slots[slot] = state.slots[slot]._replace(position=before[slot].position)


def _latents_stay(state: State, path: Sequence[int], n_rows: int) -> None:
    before = list(state.slots)
    rule_commit(state, path, n_rows)
    for slot in range(state.length - len(path), state.length):
        state.slots[slot] = state.slots[slot]._replace(token=before[slot].token)


def _rotated_again(state: State, path: Sequence[int], n_rows: int) -> None:
    first = state.length
    rule_commit(state, path, n_rows)
    for k, node in enumerate(path):
        if node != k:
            cell = state.slots[first + k]
            state.slots[first + k] = cell._replace(position=cell.position + first + k)


def _forgets_all(state: State, path: Sequence[int], n_rows: int) -> None:
    rule_commit(state, path, n_rows)
    if len(path) == 1 and n_rows > 1:
        state.length = 0


def _nothing_at_zero(row: SeenRow) -> SeenRow:
    return row._replace(
        visible=tuple(EMPTY if cell.position == 0 else cell for cell in row.visible)
    )


_MASK, _POSITIONS, _CACHE = "mask", "positions", "cache_c_kv"

PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "a row also sees its earlier siblings", _MASK, ("MASK-2",), columns=_sees_earlier_siblings
    ),
    Pattern("a row also sees its siblings", _MASK, ("MASK-2",), columns=_sees_siblings),
    Pattern(
        "a row sees every earlier node, as if the tree were a chain",
        _MASK,
        ("MASK-2",),
        columns=_sees_earlier,
    ),
    Pattern("a row sees every node that is less deep", _MASK, ("MASK-2",), columns=_sees_level),
    Pattern("every row sees the whole tree", _MASK, ("MASK-2",), columns=_sees_all),
    Pattern(
        "the mask is transposed: a row sees its descendants instead of its ancestors",
        _MASK,
        ("MASK-2",),
        columns=_sees_descendants,
    ),
    Pattern(
        "of its ancestors a row sees only the parent",
        _MASK,
        ("MASK-2",),
        columns=_sees_parent_only,
    ),
    Pattern("of the tree a row sees only itself", _MASK, ("MASK-2",), columns=_sees_itself_only),
    Pattern("no draft sees the root", _MASK, ("MASK-2",), columns=_without_root),
    Pattern("no row sees itself", _MASK, ("MASK-1",), columns=_without_itself),
    Pattern(
        "the tree's block of the mask is shifted by one column to the left",
        _MASK,
        ("MASK-2", "MASK-1"),
        columns=_left,
    ),
    Pattern(
        "the tree's block of the mask is shifted by one column to the right",
        _MASK,
        ("MASK-2", "MASK-1"),
        columns=_right,
    ),
    Pattern(
        "the tree's block of the mask is shifted by one column to the right, and nobody sees "
        "column L",
        _MASK,
        ("MASK-2", "MASK-1"),
        columns=_right_with_a_gap,
    ),
    Pattern("no row sees the prefix", _MASK, ("MASK-1",), columns=_no_prefix),
    Pattern("no row sees slot 0", _MASK, ("MASK-1",), columns=_no_first_slot),
    Pattern("no row sees slot L-1", _MASK, ("MASK-1",), columns=_no_last_slot),
    Pattern(
        "a tree gets the mask of the first tree with as many nodes",
        _MASK,
        ("MASK-2",),
        columns=_kept_mask,
    ),
    Pattern(
        "a row also sees slot L+M behind the tree, once a rejected node was left there",
        _MASK,
        ("COMMIT-4", "MASK-3"),
        columns=_one_slot_more,
    ),
    Pattern(
        "a row also sees every slot behind the tree that an earlier tree has written",
        _MASK,
        ("COMMIT-4", "MASK-3"),
        columns=_all_written_slots,
    ),
    Pattern(
        "a row also sees slot L+M behind the tree",
        _MASK,
        ("MASK-3", "MASK-1"),
        columns=_foreign_column,
    ),
    Pattern("positions = L + index, not L + depth", _POSITIONS, ("POS-1",), positions=_by_index),
    Pattern(
        "every node is one too low against the prefix: the root is at L-1",
        _POSITIONS,
        ("POS-1",),
        positions=_low,
    ),
    Pattern(
        "every node is one too high against the prefix: the root is at L+1",
        _POSITIONS,
        ("POS-1",),
        positions=_high,
    ),
    Pattern(
        "every node but the root is one too high", _POSITIONS, ("POS-1",), positions=_drafts_high
    ),
    Pattern(
        "every node but the root is one too low", _POSITIONS, ("POS-1",), positions=_drafts_low
    ),
    Pattern("the root alone is at L-1", _POSITIONS, ("POS-1",), positions=_root_low),
    Pattern("every node is at L", _POSITIONS, ("POS-1",), positions=_all_at_root),
    Pattern(
        "positions = depth, without L: every tree starts at 0",
        _POSITIONS,
        ("POS-1",),
        positions=_without_prefix,
    ),
    Pattern(
        "a tree gets the positions of the first tree with as many nodes",
        _POSITIONS,
        ("POS-1",),
        positions=_of_first_tree,
    ),
    Pattern(
        "every chunk of a prompt starts at position 0",
        _POSITIONS,
        ("FWD-1",),
        chunk_positions=lambda length, n: list(range(n)),
    ),
    Pattern(
        "accepted rows are not moved: slots L.. hold nodes 0, 1, ..., whatever the path",
        _CACHE,
        ("COMMIT-1", "COMMIT-3", "COMMIT-4"),
        commit=_in_place,
    ),
    Pattern(
        "the last accepted row is not moved",
        _CACHE,
        ("COMMIT-1", "COMMIT-3"),
        commit=_last_stays,
    ),
    Pattern(
        "rejected rows stay: L grows by the tree's size, and nothing is moved",
        _CACHE,
        ("COMMIT-4", "COMMIT-2", "COMMIT-3"),
        commit=_grow_by_tree,
    ),
    Pattern(
        "accepted rows are moved, but L grows by the tree's size",
        _CACHE,
        ("COMMIT-2", "COMMIT-4"),
        commit=_move_and_grow_by_tree,
    ),
    Pattern(
        "one row too many stays after a commit: L grows by accept_len + 1",
        _CACHE,
        ("COMMIT-2", "COMMIT-4"),
        commit=_one_rejected_stays,
    ),
    Pattern(
        "the last accepted row is lost: L grows by accept_len - 1",
        _CACHE,
        ("COMMIT-2", "COMMIT-3"),
        commit=_root_not_counted,
    ),
    Pattern(
        "accepted rows are moved from the last to the first, over rows not yet read",
        _CACHE,
        ("COMMIT-1",),
        commit=_one_at_a_time_upside_down,
    ),
    Pattern(
        "only c_kv is moved: the accepted rows have the keys (k_pe) that lay there",
        "cache_k_pe",
        ("COMMIT-1", "COMMIT-3"),
        commit=_keys_stay,
    ),
    Pattern(
        "only k_pe is moved: the accepted rows have the latents that lay there",
        _CACHE,
        ("COMMIT-1", "COMMIT-3"),
        commit=_latents_stay,
    ),
    Pattern(
        "moved rows are rotated once more, by their slot",
        "cache_k_pe",
        ("COMMIT-1",),
        commit=_rotated_again,
    ),
    Pattern(
        "the cache is forgotten when no draft is accepted",
        "committed_len",
        ("COMMIT-2", "COMMIT-3"),
        commit=_forgets_all,
    ),
    Pattern(
        "a forward of one row does not append it",
        _CACHE,
        ("SLOT-1", "COMMIT-3"),
        writes=lambda n, i: n > 1,
    ),
    Pattern(
        "the row at position 0 holds no token: its embedding is zero",
        "embedding",
        ("FWD-4",),
        otherwise=_nothing_at_zero,
    ),
)
