"""Two KDTR files, compared by what they hold: the first difference, and how many there are.

The order is that of causes: configuration, weights, then case by case its inputs, then point by
point the stages in the order of contract/stages.py. Names alone are read, so bundles of other rules
versions, and files that are no golden bundles, can be compared too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from kdtr.conformance.bundle_check import EXPERT_GAP
from kdtr.conformance.compare import coordinates
from kdtr.contract import STAGE, STAGES, ModelConfig, Source
from kdtr.kdtr_format import Bundle, Entry
from kdtr.kdtr_format.layout import DTYPE_BY_NAME

_CASE = re.compile(r"(input|expect)/([^/]+)/(?:(chunk|round)([0-9]+)/)?(?:layer([0-9]+)/)?([^/]+)")
_ALL_TEXT = 100  # characters of a value that are shown
_FIELDS = [f.name for f in fields(ModelConfig)]
_RANK = {stage.name: i for i, stage in enumerate(STAGES)}
_FIRST_PER_LAYER = next(i for i, stage in enumerate(STAGES) if stage.source is Source.LAYER)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that differs: its place in words, and lines that say how."""

    name: str
    place: str
    lines: tuple[str, ...]


@dataclass(slots=True)
class BundleDifference:
    """What differs between A and B.

    metadata   path, value in A, value in B; as text
    cases      those only in A, those only in B
    first      the first tensor that differs, of what both should hold
    unequal    names of tensors in both that differ
    only       tensors only in A, only in B, besides those of cases only there
    n_common   tensors in both
    """

    same_bytes: bool
    metadata: list[tuple[str, str, str]]
    cases: tuple[list[str], list[str]]
    first: TensorDifference | None = None
    unequal: list[str] = field(default_factory=list)
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    n_common: int = 0

    @property
    def same_content(self) -> bool:
        return not (self.metadata or any(self.cases) or self.unequal or any(self.only))


def diff_bundles(a: Bundle, b: Bundle) -> BundleDifference:
    """Compare two open bundles whose payloads are checked."""
    aliases = [_aliases(bundle) for bundle in (a, b)]
    everywhere = list(dict.fromkeys([*aliases[0], *aliases[1]]))
    cases = (
        [alias for alias in aliases[0] if alias not in aliases[1]],
        [alias for alias in aliases[1] if alias not in aliases[0]],
    )
    found = BundleDifference(
        a.sha256() == b.sha256(), _metadata_differences(a.metadata, b.metadata, cases), cases
    )
    entries = [{entry.name: entry for entry in bundle.entries} for bundle in (a, b)]
    lonely = {*cases[0], *cases[1]}
    for name in sorted({*entries[0], *entries[1]}, key=_order(everywhere)):
        match = _CASE.fullmatch(name)
        if match and match[2] in lonely:
            continue
        pair = (entries[0].get(name), entries[1].get(name))
        if pair[0] is None or pair[1] is None:
            found.only[pair[0] is None].append(name)
        else:
            found.n_common += 1
            if _same(a, b, pair[0], pair[1]):
                continue
            found.unequal.append(name)
        found.first = found.first or _describe(a, b, name, pair)
    return found


# Order


def _aliases(bundle: Bundle) -> list[str]:
    """The cases of a bundle: as its metadata lists them, then others that have tensors."""
    aliases = [match[2] for name in bundle if (match := _CASE.fullmatch(name))]
    return list(dict.fromkeys([*_by_alias(bundle.metadata.get("cases")), *aliases]))


def _by_alias(cases: Any) -> dict[str, Any]:
    """The entries of a list of cases by alias; empty if it is no such list."""
    if not isinstance(cases, list) or not all(isinstance(entry, dict) for entry in cases):
        return {}
    named = {entry["alias"]: entry for entry in cases if isinstance(entry.get("alias"), str)}
    return named if len(named) == len(cases) else {}


def _order(aliases: Sequence[str]) -> Callable[[str], tuple[Any, ...]]:
    """A sort key for the names of tensors."""
    rank = {alias: i for i, alias in enumerate(aliases)}

    def key(name: str) -> tuple[Any, ...]:
        last = (_natural(name), name)
        part, _, rest = name.partition("/")
        match = _CASE.fullmatch(name)
        if match:
            side, alias, kind, i, layer, stage = match.groups()
            point = ("", 0) if kind is None else (kind, int(i))  # "" < chunk < round
            place = _stage_rank(stage, layer) if side == "expect" else ()
            return (2, rank[alias], side == "expect", point, place, last)
        if part == "config":
            return (0, _FIELDS.index(rest) if rest in _FIELDS else len(_FIELDS), last)
        return (1, last) if part == "weights" else (3, last)

    return key


def _stage_rank(stage: str, layer: str | None) -> tuple[int, ...]:
    """Where a stage stands in stage_order; what is beside the stages comes after them."""
    i = _RANK.get("expert_ids" if stage == EXPERT_GAP else stage)
    if i is None:
        return (3, 0, 0, 0)
    if STAGES[i].source is Source.LAYER:
        return (1, int(layer or 0), i, stage == EXPERT_GAP)
    return (0 if i < _FIRST_PER_LAYER else 2, 0, i, 0)


def _natural(name: str) -> tuple[str | int, ...]:
    """layers.10 after layers.9."""
    return tuple(int(p) if i % 2 else p for i, p in enumerate(re.split("([0-9]+)", name)))


# Metadata


def _metadata_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], lonely: tuple[list[str], list[str]]
) -> list[tuple[str, str, str]]:
    sides = [dict(_leaves((), metadata)) for metadata in (a, b)]
    paths = [
        path
        for path in sorted({*sides[0], *sides[1]})
        if not (path[:1] == ("cases[]",) and {*path[1:2]} & {*lonely[0], *lonely[1]})
    ]
    found = [
        (
            "/".join(path) or "all",
            *_shortened(sides[0].get(path, "absent"), sides[1].get(path, "absent")),
        )
        for path in paths
        if sides[0].get(path) != sides[1].get(path)
    ]
    orders = [
        [alias for alias in _by_alias(metadata.get("cases")) if alias not in other]
        for metadata, other in zip((a, b), lonely, strict=True)
    ]
    if sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]:
        found.append(("order of cases", *_shortened(", ".join(orders[0]), ", ".join(orders[1]))))
    whole = [json.dumps(metadata, sort_keys=True, ensure_ascii=False) for metadata in (a, b)]
    if not found and not any(lonely) and whole[0] != whole[1]:
        found.append(("metadata", *_shortened(whole[0], whole[1])))
    return found


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every value that is no object, as JSON, under its path; cases under their alias."""
    if path == ("cases",) and _by_alias(value):
        path, value = ("cases[]",), _by_alias(value)
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    else:
        yield path, json.dumps(value, sort_keys=True, ensure_ascii=False)


def _shortened(a: str, b: str) -> tuple[str, str]:
    """Two texts from a little before they part, so that the difference is in sight."""
    if max(len(a), len(b)) <= _ALL_TEXT:
        return a, b
    parted = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    start = next(parted, min(len(a), len(b))) - 20
    return _cut(a, start), _cut(b, start)


def _cut(text: str, start: int) -> str:
    shown = text[max(start, 0) :]
    if len(shown) > _ALL_TEXT:
        shown = shown[:_ALL_TEXT] + "..."
    return shown if start <= 0 else "..." + shown


# Tensors


def _same(a: Bundle, b: Bundle, mine: Entry, yours: Entry) -> bool:
    if (mine.dtype, mine.shape) != (yours.dtype, yours.shape):
        return False
    return np.array_equal(a.payload(mine.name), b.payload(mine.name))


def _describe(
    a: Bundle, b: Bundle, name: str, pair: tuple[Entry | None, Entry | None]
) -> TensorDifference:
    forms = ["no such tensor" if e is None else f"{e.dtype} {list(e.shape)}" for e in pair]
    if pair[0] is None or pair[1] is None or forms[0] != forms[1]:
        lines = [f"A         {forms[0]}", f"B         {forms[1]}"]
    else:
        lines = _value_lines(a, name, pair[0], a[name], b[name])
    return TensorDifference(name, _place(name), tuple(lines))


def _place(name: str) -> str:
    match = _CASE.fullmatch(name)
    if match is None:
        return name.partition("/")[0] if "/" in name else "tensors"
    side, alias, kind, i, layer, stage = match.groups()
    what = f"stage {stage}" if side == "expect" and stage in STAGE else f"{side} {stage}"
    parts = [f"case {alias}", f"{kind}{i}" if kind else "", f"layer {layer}" if layer else "", what]
    return ", ".join(part for part in parts if part)


def _value_lines(
    bundle: Bundle, name: str, entry: Entry, a: np.ndarray, b: np.ndarray
) -> list[str]:
    """Two arrays of equal dtype and shape that differ: where first, and by how much."""
    floats = entry.dtype.startswith(("f", "bf"))
    bits = DTYPE_BY_NAME[entry.dtype].bits
    keys = [_ordered(x, bits) if floats else x for x in (a, b)]
    wrong = np.argwhere(keys[0] != keys[1])
    index = tuple(int(i) for i in wrong[0])
    texts = [str(x[index].item()) for x in (a, b)]
    if texts[0] == texts[1]:  # two NaN
        texts = [
            f"{t} (bits {x[index].tobytes()[::-1].hex()})"
            for t, x in zip(texts, (a, b), strict=True)
        ]
    lines = [f"at        {where}"] if (where := _where(bundle, name, index, entry)) else []
    lines += [f"A         {texts[0]}", f"B         {texts[1]}"]
    differ = f"{len(wrong)} of {a.size} elements"
    if floats:
        lines.append(f"distance  {_distance(a, b, keys, index)}")
    return [*lines, f"in all    {differ}"]


def _where(bundle: Bundle, name: str, index: tuple[int, ...], entry: Entry) -> str:
    """The element by name, where the tensor is a stage of the right number of axes."""
    if not index:
        return ""
    match = _CASE.fullmatch(name)
    stage = STAGE.get(match[6]) if match else None
    fits = stage is not None and len(stage.axes) == len(index)
    if match is None or match[1] != "expect" or stage is None or not fits:
        return f"element {list(index)}"
    if stage.axes.endswith("2") and entry.shape[-1] != 2:
        return f"element {list(index)}"
    layer = None if match[5] is None else int(match[5])
    parents = _parents(bundle, f"input/{match[2]}/{match[3]}{match[4]}/parents")
    if parents is not None and (stage.axes[0] != "n" or index[0] >= len(parents)):
        parents = None
    return coordinates(stage, layer, index, parents)


def _parents(bundle: Bundle, name: str) -> tuple[int, ...] | None:
    """The parents of a round's tree, if they are there and make one."""
    parents = bundle.get(name)
    if parents is None or parents.ndim != 1 or parents.dtype.kind not in "iu":
        return None
    values = tuple(parents.tolist())
    is_tree = values[:1] == (-1,) and all(0 <= p < i for i, p in enumerate(values[1:], start=1))
    return values if is_tree else None


def _ordered(array: np.ndarray, bits: int) -> np.ndarray:
    """Floats as uint64 in the order of their values, neighbours 1 apart; -0 is just below 0."""
    raw = array.view(f"u{bits // 8}").astype(np.uint64)
    sign = np.uint64(1 << (bits - 1))
    return np.where(raw & sign, np.uint64((1 << bits) - 1) - raw, raw + sign)


def _distance(
    a: np.ndarray, b: np.ndarray, keys: Sequence[np.ndarray], index: tuple[int, ...]
) -> str:
    """In units of the last place, at the index and at most; and the largest difference."""
    wide = [x.astype(np.float32) if x.dtype.itemsize < 4 else x for x in (a, b)]  # exact
    numbers = ~(np.isnan(wide[0]) | np.isnan(wide[1]))
    finite = np.isfinite(wide[0]) & np.isfinite(wide[1])
    with np.errstate(over="ignore"):
        apart = np.abs(np.subtract(wide[0][finite], wide[1][finite], dtype=np.float64))
    ulps = np.where(keys[0] > keys[1], keys[0] - keys[1], keys[1] - keys[0])
    here = f"{ulps[index]} ulp" if numbers[index] else "none between NaN and others"
    most, largest = ulps[numbers].max(initial=0), apart.max(initial=0)
    return f"{here}, at most {most} ulp; largest absolute difference {largest:.3g}"
