"""A KDTR file for people: the file, its model, its cases with their trees, its tensors.

Everything is lines of plain text. Text from the file is shown printable: a name may hold an escape
sequence. A line is meant for 80 columns and only longer where a name or a deep tree is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from kdtr.conformance.bundle import GoldenBundle, GoldenCase
from kdtr.conformance.case_index import PRECISIONS, Point, case_points, stage
from kdtr.conformance.drawing_tree import tree_lines
from kdtr.conformance.plain_text import printable, table
from kdtr.conformance.tree_rules import node_depths
from kdtr.contract import NO_LIMIT, EmitLimit, ModelConfig
from kdtr.kdtr_format import Bundle, Entry
from kdtr.kdtr_format.layout import HEADER, HEADER_SIZE, Header

WIDTH = 80
_METADATA_LINES = 200
_TOKENS = 64  # of a prompt chunk that are shown


def wrapped(label: str, text: str, indent: int = 0) -> list[str]:
    """`label  text`, the text in a column of its own."""
    column = " " * indent + f"{label:<11} "
    lines = wrap(printable(text), WIDTH - len(column), break_long_words=False) or [""]
    return [(column if i == 0 else " " * len(column)) + line for i, line in enumerate(lines)]


# File and model


def file_lines(path: Path, bundle: Bundle) -> list[str]:
    with path.open("rb") as file:
        header = Header._make(HEADER.unpack(file.read(HEADER_SIZE)))
    major, minor = bundle.version
    return [
        printable(path),
        f"{'size':<11} {header.file_size} bytes",
        f"{'SHA-256':<11} {bundle.sha256()}",
        f"{'format':<11} KDTR {major}.{minor}, alignment {header.alignment}, "
        f"{_count(len(bundle), 'entry', 'entries')}",
    ]


def metadata_lines(metadata: Mapping[str, Any]) -> list[str]:
    lines = json.dumps(metadata, indent=2, sort_keys=True, ensure_ascii=False).splitlines()
    shown = ["metadata", *("  " + printable(line) for line in lines[:_METADATA_LINES])]
    if len(lines) > _METADATA_LINES:
        shown.append(f"  and {len(lines) - _METADATA_LINES} lines more")
    return shown


def golden_lines(golden: GoldenBundle, metadata: Mapping[str, Any]) -> list[str]:
    """Versions, model, configuration and the table of cases."""
    versions = ", ".join(f"{name} {value}" for name, value in sorted(metadata["versions"].items()))
    lines = ["", *wrapped("versions", versions), *wrapped("model", golden.model_name)]
    model = metadata.get("model")
    for key, value in sorted(model.items()) if isinstance(model, dict) else ():
        lines += wrapped(key, str(value)) if key != "name" else []
    lines += ["", *config_lines(golden.config), "", *_case_table(golden.cases)]
    return lines


def config_lines(config: ModelConfig) -> list[str]:
    """The fields in two columns, and YaRN's."""
    lines = ["config", *_two_columns(_values(config, skip=("yarn",)))]
    if config.yarn is None:
        return [*lines, "  yarn: none"]
    return [*lines, "  yarn:", *_two_columns(_values(config.yarn))]


def _values(holder: Any, skip: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    named = ((field.name, getattr(holder, field.name)) for field in fields(holder))
    return [(name, "null" if v is None else str(v)) for name, v in named if name not in skip]


def _two_columns(values: Sequence[tuple[str, str]]) -> list[str]:
    half = (len(values) + 1) // 2
    left, right = values[:half], [*values[half:], ("", "")]
    names = [max(len(name) for name, _ in side) for side in (left, right)]
    width = max(len(value) for _, value in left)
    return [
        f"  {a:<{names[0]}}  {x:<{width}}   {b:<{names[1]}}  {y}".rstrip()
        for (a, x), (b, y) in zip(left, right, strict=False)
    ]


def _case_table(cases: Sequence[GoldenCase]) -> list[str]:
    short = (f"thin {precision.replace('float', 'f')}" for precision in PRECISIONS)
    rows = [("case", "id", "level", "chunks", "rounds", *short)]
    for case in cases:
        points = list(case_points(case))
        thin = (str(sum(point.thin[p] for point in points)) for p in PRECISIONS)
        inputs = case.inputs
        sizes = (str(len(inputs.chunks)), str(len(inputs.rounds)))
        rows.append((inputs.alias, inputs.case_id, inputs.level, *sizes, *thin))
    return table(rows, numbers=range(3, 7))


# Cases


def case_lines(case: GoldenCase) -> Iterator[str]:
    """A case: what it is for, its prompt, its rounds."""
    inputs = case.inputs
    yield ""
    yield f"case {printable(inputs.alias)} ({printable(inputs.case_id)})"
    yield from wrapped("why", inputs.why, indent=2)
    yield from wrapped("rules", " ".join(inputs.rules), indent=2)
    yield from wrapped("level", f"{inputs.level}; {inputs.max_len} slots", indent=2)
    if inputs.root is not None:
        yield from wrapped("root", f"token {inputs.root}, set in an empty cache", indent=2)
    for point in case_points(case):
        if point.kind == "chunk":
            yield from _chunk_lines(case, point)
        else:
            yield from _round_lines(case, point)


def _chunk_lines(case: GoldenCase, point: Point) -> Iterator[str]:
    tokens = case.inputs.chunks[int(point.name.removeprefix("chunk"))]
    root = stage(case.expectation(point.name), "root")
    yield ""
    yield (
        f"  {point.name}: {_count(point.n_rows, 'token')} after "
        f"{_count(point.committed_len, 'committed token')}; the next root is token {root}"
    )
    left = len(tokens) - _TOKENS
    yield from wrapped(
        "tokens",
        " ".join(map(str, tokens[:_TOKENS])) + (f" and {left} more" if left > 0 else ""),
        indent=4,
    )
    yield from _margin_lines(point)


def _round_lines(case: GoldenCase, point: Point) -> Iterator[str]:
    i = int(point.name.removeprefix("round"))
    entry, found = case.inputs.rounds[i], case.expectation(point.name)
    assert point.path is not None
    assert point.emitted is not None
    drafted = "" if entry.budget is None else f"; best-first, budget {entry.budget}"
    yield ""
    yield (
        f"  {point.name}: {_count(point.n_rows, 'node')}, depth {point.depth}, after "
        f"{_count(point.committed_len, 'committed token')}{drafted}"
    )
    if entry.limit != NO_LIMIT:
        yield from wrapped("limit", _limit(entry.limit), indent=4)
    columns = {
        "position": stage(found, "positions").tolist(),
        "depth": node_depths(entry.tree.parents),
        "target": stage(found, "targets").tolist(),
        "token": entry.tree.tokens,
    }
    for line in tree_lines(entry.tree.parents, point.path, columns):
        yield "    " + line
    path = "-".join(map(str, point.path))
    yield from wrapped("accept_len", f"{point.accept_len} (path {path})", indent=4)
    yield from wrapped("bonus", f"token {point.bonus}", indent=4)
    yield from wrapped("emitted", " ".join(map(str, point.emitted)), indent=4)
    yield from _margin_lines(point)


def _limit(limit: EmitLimit) -> str:
    """When the round stops emitting (ACC-4)."""
    parts = [] if limit.max_emitted is None else [f"at most {limit.max_emitted} emitted"]
    if limit.stop_tokens:
        parts.append(f"stops at token {' or '.join(map(str, sorted(limit.stop_tokens)))}")
    return ", ".join(parts)


def _margin_lines(point: Point) -> list[str]:
    parts = []
    for precision, margin in point.margins.items():
        text = "no row decides" if margin is None else f"{margin:.3g}"
        thin = point.thin[precision]
        parts.append(f"{text} in {precision}" + (f" ({_count(thin, 'thin row')})" if thin else ""))
    return wrapped("margin", ", ".join(parts), indent=4)


# Tensors


def entry_lines(entries: Sequence[Entry]) -> list[str]:
    """A line per tensor. The name comes last, and whole: it is what one copies."""
    rows = [("dtype", "shape", "bytes", "crc", "name")]
    rows += [(e.dtype, str(list(e.shape)), str(e.n_bytes), f"{e.crc:08x}", e.name) for e in entries]
    return ["", *table(rows, numbers=(2,))]


def tensor_lines(entry: Entry, array: np.ndarray) -> list[str]:
    """Shape, range and values; large arrays shortened."""
    if entry.dtype == "i4x2":
        array = array.astype(np.int8)
    elif entry.dtype in ("f16", "bf16", "f8e4m3", "f8e5m2"):
        array = array.astype(np.float32)  # exact
    lines = ["", printable(entry.name), f"  {entry.dtype} {list(entry.shape)}, {_range(array)}"]
    edge = {1: 6, 2: 4, 3: 3}.get(array.ndim, 2 if array.ndim < 7 else 1)
    text = np.array2string(
        array, precision=6, threshold=200, edgeitems=edge, max_line_width=WIDTH - 2
    )
    if array.ndim == 0:
        text = str(array[()])  # a single number in full
    return [*lines, *(f"  {line}".rstrip() for line in text.splitlines())]


def _range(array: np.ndarray) -> str:
    if array.size == 0:
        return "no elements"
    if array.dtype.kind == "b":
        return f"{int(array.sum())} of {array.size} true"
    if array.dtype.kind in "iu":
        return f"min {array.min()}, max {array.max()}"
    finite = array[np.isfinite(array)]
    ends = f"min {finite.min():.6g}, max {finite.max():.6g}" if finite.size else "none finite"
    return f"{ends}, {int(np.isnan(array).sum())} NaN, {int(np.isinf(array).sum())} inf"


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
