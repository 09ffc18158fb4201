"""Wrong rows, scales and heads: ways to do a forward's attention otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kdtr.conformance.diagnosis_forward import (
    Array,
    Workings,
    append,
    frequencies,
    mscale,
    raw_scores,
    softmax_scale,
)
from kdtr.conformance.diagnosis_past import Past
from kdtr.conformance.diagnosis_scene import FITS, Hint, Ranked, Scene
from kdtr.conformance.diagnosis_twist import Twist, twisted
from kdtr.contract import ModelConfig

_MOST_KEPT = 12  # rejected nodes that are tried one by one


def attention_twists(past: Past) -> Iterator[Twist]:
    """All of this file, for the scene's forward."""
    yield from _written(past)
    yield from _read(past)
    yield from _kept_aside(past)
    yield from _scales(past)
    yield from _heads(past)


def _written(past: Past) -> Iterator[Twist]:
    """SLOT-1: rows of this forward that are not where attention reads them."""
    n, length = past.scene.n, past.scene.committed_len
    rules = ("SLOT-1", "MLA-3")

    def other(says: str, write: Callable[[Array, Array, int], Array]) -> Twist:
        how = replace(past.right, append=write)
        return Twist(says, rules, "scores", replace(past.setting, workings=how), 3)

    if n > 1:
        yield other(
            f"the {n} rows of this forward are written back to front: slot L + i holds row "
            "n - 1 - i",
            _back_to_front,
        )
    whose = f"the {n} rows of this forward are" if n > 1 else "the one row of this forward is"
    yield other(f"{whose} not written: slot {length} holds what it held before", _first(0, only=n))
    for count in range(1, min(n, 32)):
        rows = "row is" if count == 1 else f"{count} rows are"
        yield other(
            f"only the first {rows} written of {n}: slot {length + count} holds what it held "
            "before",
            _first(count, only=n),
        )
    if length:
        yield other(
            f"rows are written from slot L - 1 = {length - 1} on, over the last committed one",
            lambda old, new, length: append(old, new, max(length - 1, 0)),
        )


def _back_to_front(old: Array, new: Array, length: int) -> Array:
    return append(old, new[::-1], length)


def _first(count: int, *, only: int) -> Callable[[Array, Array, int], Array]:
    """Of a forward of `only` rows, the first few are written."""
    return lambda old, new, length: append(old, new[:count] if len(new) == only else new, length)


def wrong_writes(past: Past) -> Iterator[tuple[str, Workings]]:
    """The same of forwards before the scene's, which may have been of another kind."""
    yield (
        "the rows of a forward were written back to front: slot L + i held row n - 1 - i",
        replace(past.right, append=_back_to_front),
    )
    for n in sorted({len(one.get("slots")) for one in past.scene.history}):  # type: ignore[arg-type]
        for count in {0, 1, 2, 4, 8, n - 1}:
            if count < n:
                says = f"of a forward of {n} rows, only {count} were written"
                yield says, replace(past.right, append=_first(count, only=n))


def _read(past: Past) -> Iterator[Twist]:
    """MASK-3 and COMMIT-4: slots that are read though nobody may see them."""
    stale = past.stale()
    for slot, who in stale:
        how = replace(past.right, also_reads=(slot,))
        says = f"every row also reads slot {slot}, behind its own: the stale row of {who}"
        yield Twist(
            says, ("COMMIT-4", "MASK-3"), "out_latent", replace(past.setting, workings=how), 3
        )
    if len(stale) > 1:
        slots = tuple(slot for slot, _ in stale)
        says = f"every row also reads slots {slots[0]}..{slots[-1]}: stale rows of earlier rounds"
        how = replace(past.right, also_reads=slots)
        yield Twist(
            says, ("COMMIT-4", "MASK-3"), "out_latent", replace(past.setting, workings=how), 3
        )


def _kept_aside(past: Past) -> Iterator[Twist]:
    """COMMIT-4: rows of rejected nodes that are read, wherever they are kept."""
    rejected = past.rejected()
    if not rejected:
        return
    last = next(reversed(rejected))
    guesses = {
        f"the row of a rejected node, node {node} of {last}": [row]
        for node, row in [*rejected[last].items()][:_MOST_KEPT]
    }
    guesses[f"the rows of all rejected nodes of {last}"] = [*rejected[last].values()]
    for which, pick in (("first", min), ("last", max)):
        says = f"the row of the {which} rejected node of every round before"
        guesses[says] = [nodes[pick(nodes)] for nodes in rejected.values()]
    guesses["the rows of all rejected nodes of every round before"] = [
        row for nodes in rejected.values() for row in nodes.values()
    ]
    n_slots = past.setting.rows.shape[1]
    for says, rows in guesses.items():
        slots = tuple(range(n_slots, n_slots + len(rows)))
        every = np.concatenate([past.setting.rows, np.stack(rows, axis=1)], axis=1)
        how = replace(past.right, also_reads=slots)
        yield Twist(
            f"every row also reads {says}",
            ("COMMIT-4",),
            "out_latent",
            replace(past.setting, workings=how, rows=every),
            3,
        )


def scale_names(config: ModelConfig) -> Iterator[tuple[str, float]]:
    """Wrong softmax scales by what they are taken from."""
    right = softmax_scale(config)
    d, r, c = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    widths = {
        f"(kv_lora_rank + qk_rope_head_dim)^-0.5 = {c + r}^-0.5": c + r,
        f"kv_lora_rank^-0.5 = {c}^-0.5": c,
        f"qk_nope_head_dim^-0.5 = {d}^-0.5": d,
        f"qk_rope_head_dim^-0.5 = {r}^-0.5": r,
        f"v_head_dim^-0.5 = {config.v_head_dim}^-0.5": config.v_head_dim,
        f"hidden_size^-0.5 = {config.hidden_size}^-0.5": config.hidden_size,
    }
    factor = right / config.qk_head_dim**-0.5  # YaRN's
    for name, width in widths.items():
        yield name, width**-0.5 * factor
        if factor != 1:
            yield f"{name}, without YaRN's mscale^2", width**-0.5
    yield "1: it is missing", 1.0
    yield "applied twice", right**2
    yield "its inverse", 1 / right
    yield f"(qk_nope_head_dim + qk_rope_head_dim)^-1 = {d + r}^-1", 1 / (d + r)
    if config.yarn is not None:
        m = mscale(config.yarn.factor, config.yarn.mscale_all_dim or 1.0)
        plain = config.qk_head_dim**-0.5
        for power, name in (
            (0, "without"),
            (1, "with one factor of"),
            (2, "with"),
            (4, "twice with"),
        ):
            yield f"{name} YaRN's mscale^2 = {m * m:.4g}", plain * m**power


def _scales(past: Past) -> Iterator[Twist]:
    right, config = past.right.scale, past.scene.config
    for name, scale in scale_names(config):
        if abs(scale / right - 1) < 1e-9:
            continue
        says = (
            f"the softmax scale is {name}, should be (qk_nope_head_dim + qk_rope_head_dim)^-0.5 = "
            f"{config.qk_head_dim}^-0.5{' with YaRN' if config.yarn else ''}: all scores are times "
            f"{scale / right:.4g}"
        )
        yield twisted(past, says, "MLA-4", "scores", replace(past.right, scale=scale), 3)


def _heads(past: Past) -> Iterator[Twist]:
    h = past.scene.config.num_attention_heads
    if h == 1:
        return
    orders: dict[str, list[int]] = {
        "are in reverse order": [*range(h)][::-1],
        "are those of the next head": [(i + 1) % h for i in range(h)],
        "are those of the head before": [(i - 1) % h for i in range(h)],
        "are those of head 0 for every head": [0] * h,
        "are those of head i // 2 for head i, as if repeated": [i // 2 for i in range(h)],
    }
    if h % 2 == 0:
        orders["of neighbours 2i and 2i + 1 are exchanged"] = [i ^ 1 for i in range(h)]
    for what, seen_in in (("w_kc", "scores"), ("w_vc", "attn_out")):
        for name, order in orders.items():

            def picked(heads: Array, order: list[int] = order) -> Array:
                return heads[order]

            how = (
                replace(past.right, key_heads=picked)
                if what == "w_kc"
                else replace(past.right, value_heads=picked)
            )
            yield twisted(past, f"the heads of {what} {name}", "MLA-3", seen_in, how)
        for name, change in (
            ("is transposed within each head", _transposed),
            ("is taken as [dimension, head], should be [head, dimension]", _heads_inside),
        ):
            how = (
                replace(past.right, key_heads=change)
                if what == "w_kc"
                else replace(past.right, value_heads=change)
            )
            yield twisted(past, f"{what} {name}", "MLA-3", seen_in, how)


def _transposed(heads: Array) -> Array:
    """[h, d, c] read as [h, c, d] and turned."""
    h, d, c = heads.shape
    return heads.reshape(h, c, d).swapaxes(1, 2)


def _heads_inside(heads: Array) -> Array:
    h, d, c = heads.shape
    return heads.reshape(d, h, c).swapaxes(0, 1)


def hints(scene: Scene, past: Past) -> Iterator[Ranked | None]:
    """Recognisers that find a number or a row, instead of trying a list."""
    if not scene.same_form:
        return
    if scene.stage.name in ("q_pe", "k_pe"):
        yield _another_position(scene)
    if scene.stage.name == "scores":
        yield from _patterns(scene)
        if past.is_small:
            yield _rows_of_other_slots(scene, past)


def _another_position(scene: Scene) -> Ranked | None:
    """Each wrong row is the right one rotated from its position to another."""
    angles = frequencies(scene.config)
    rows = np.flatnonzero(scene.differs.reshape(len(scene.actual), -1).any(axis=1))
    positions = scene.truth("positions")
    most = int(positions.max()) + scene.n + 8
    found: list[tuple[int, int, int]] = []
    bound = np.zeros(1) if scene.bound is None else scene.bound
    first, second = np.split(scene.expected[rows], 2, axis=-1)
    for at, row in enumerate(int(i) for i in rows):
        shifts = np.arange(most + 1) - positions[row]
        turn = shifts[:, None] * angles  # [p, r/2]
        if scene.expected.ndim == 3:
            turn = turn[:, None]
        x, y = first[at], second[at]
        cos, sin = np.cos(turn), np.sin(turn)
        guess = np.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)
        error = np.abs(guess - scene.numbers[row]).reshape(len(guess), -1).max(axis=1)
        best = int(error.argmin())
        if error[best] > 4 * float(np.broadcast_to(bound, scene.expected.shape)[row].max()):
            return None
        found.append((row, best, int(positions[row])))
    if not found:
        return None
    wrong, other, right = found[0]
    says = (
        f"{len(found)} of {len(scene.actual)} rows are rotated at another position: row {wrong} at "
        f"{other}, should be at {right}"
    )
    if len({other - right for _, other, right in found}) == 1 and len(found) > 1:
        says += f"; all are {other - right:+d}"
    return Ranked(Hint(says, ("POS-1", "MLA-7")), 2)


def _patterns(scene: Scene) -> Iterator[Ranked | None]:
    """-inf where visible, and numbers where not."""
    length, parents = scene.committed_len, scene.parents
    seen = np.isfinite(scene.numbers).any(axis=1) | np.isnan(scene.numbers).any(axis=1)
    right = scene.truth("mask")
    for cells, verb in ((seen & ~right, "has a score for"), (right & ~seen, "has no score for")):
        if not cells.any():
            continue
        row, slot = (int(x) for x in np.argwhere(cells)[0])
        node = slot - length
        kind = f"slot {slot}"
        if node < 0:
            kind += " of the prefix"
        elif node == row:
            kind += ", its own"
        elif parents[node] == parents[row]:
            kind += f", of its sibling {node}"
        else:
            kind += f", of node {node}"
        says = f"row {row} {verb} {kind}; {int(cells.sum())} such pairs in all"
        yield Ranked(Hint(says, ("MASK-2", "MASK-1"), 0.5), 0)


def _rows_of_other_slots(scene: Scene, past: Past) -> Ranked | None:
    """Columns that hold the scores of other rows, or of none: a row that lies elsewhere."""
    layer = scene.layer
    assert layer is not None
    own = f"model.layers.{layer}.self_attn."
    q_nope, q_pe = past.shown["q_nope", layer], past.shown["q_pe", layer]
    held = past.shown["held", layer]
    every = raw_scores(past.weight, own, past.right, q_nope, q_pe, held)  # [n, h, S]
    none = every.shape[-1]  # of no row: zeros or NaN, whatever memory held
    every = np.concatenate([every, np.full((*every.shape[:2], 1), past.unwritten)], axis=-1)
    finite = np.isfinite(scene.expected)  # visible pairs
    tolerance = np.zeros(1) if scene.bound is None else 4 * scene.bound
    columns = np.flatnonzero(scene.differs.any(axis=(0, 1)))
    places: dict[int, int] = {}
    for slot in columns:
        visible, column = finite[..., slot], scene.numbers[..., slot : slot + 1]
        both_nan = np.isnan(every) & np.isnan(column)
        error = np.abs(
            np.where(np.isnan(every), np.inf, every) - np.where(np.isnan(column), 0.0, column)
        )
        fits = both_nan | ((error <= tolerance) & ~np.isnan(column))
        share = fits[visible].mean(axis=0) if visible.any() else np.zeros(none + 1)
        best = int(share.argmax())
        if share[best] < FITS or best == slot:
            return None
        places[int(slot)] = best
    if not places:
        return None
    first = min(places)
    empty = sorted(slot for slot, row in places.items() if row == none)
    moved = {slot: row for slot, row in places.items() if row != none}
    told = []
    if moved:
        pairs = [f"{slot} holds the row of {row}" for slot, row in [*moved.items()][:3]]
        told.append("slot " + ", ".join(pairs) + (", ..." if len(moved) > 3 else ""))
    if empty:
        told.append(f"{len(empty)} of the slots from {empty[0]} on hold no row at all")
    says = f"attention reads other rows than it should: {'; '.join(told)}"
    page = _page(places, none) if moved else 0
    if page:
        says += f"; slots below {first} are right: rows past the end of a page of {page} go astray"
    return Ranked(Hint(says, ("SLOT-1", "MLA-3")), 2)


def _page(places: dict[int, int], none: int) -> int:
    """The page size that fits: the first wrong slot begins a page, and pages move as a whole."""
    first = min(places)
    if first < 2:
        return 0
    for page in [size for size in range(first, 1, -1) if first % size == 0]:
        shifts: dict[int, set[int]] = {}
        for slot, row in places.items():
            if row != none:
                shifts.setdefault(slot // page, set()).add(row - slot)
        if all(len(of_page) == 1 for of_page in shifts.values()):
            return page
    return 0
