"""The case index: every chunk and round of golden bundles as a row, for people who query.

COLUMNS is the schema. A table's bytes carry the version of pyarrow that wrote it, so tables are
compared by their rows. Parquet needs the extra `kdtr[parquet]`; the rows alone do not.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kdtr.conformance.bundle import Expectation, GoldenBundle, GoldenCase
from kdtr.conformance.bundle_check import MARGINS
from kdtr.conformance.tree_rules import node_depths
from kdtr.contract import BundleError, CaseError, DraftTree, ModelConfig, UnsupportedError, Yarn
from kdtr.kdtr_format import Bundle

PRECISIONS = tuple(name.removeprefix("margin_") for name in MARGINS)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its Arrow type, whether it may be null, and what it says."""

    name: str
    kind: str
    nullable: bool
    what: str


def _config_columns(holder: type, prefix: str, *, nullable: bool) -> Iterator[Column]:
    kinds = {"int": "int64", "float": "double", "bool": "bool", "str": "string"}
    for field in fields(holder):
        kind, _, optional = str(field.type).partition(" | ")
        if kind in kinds:
            what = f"`{holder.__name__}.{field.name}`"
            yield Column(prefix + field.name, kinds[kind], nullable or bool(optional), what)


COLUMNS: tuple[Column, ...] = (
    Column("bundle", "string", False, "the file's name, without folders"),
    Column("sha256", "string", False, "of the file, in hex"),
    Column("model", "string", False, "the model's name"),
    *_config_columns(ModelConfig, "config_", nullable=False),
    *_config_columns(Yarn, "config_yarn_", nullable=True),
    Column("case", "string", False, "the case's alias"),
    Column("id", "string", False, "the case's id"),
    Column("why", "string", False, "what the case is for"),
    Column("rules", "list<string>", False, "ids of the rules it holds"),
    Column("level", "string", False, "how much of the truth is recorded"),
    Column("point", "string", False, "`chunk<i>` or `round<i>`"),
    Column("kind", "string", False, "`chunk` or `round`"),
    Column("n_rows", "int64", False, "rows of the forward: tokens of a chunk, nodes of a tree"),
    Column("committed_len", "int64", False, "tokens in the cache before the point"),
    Column("depth", "int64", True, "edges from the root to the deepest node"),
    Column("is_chain", "bool", True, "every node's parent is the node before it"),
    Column("max_children", "int64", True, "children of the node that has most"),
    Column("accept_len", "int64", True, "nodes kept, root included"),
    Column("path_is_prefix", "bool", True, "the accepted path is 0..accept_len-1: no row moves"),
    Column("bonus", "int64", True, "the next root"),
    Column("emitted", "list<int64>", True, "the tokens emitted"),
    *(
        Column(margin, "double", True, f"smallest over the rows that count in {precision}")
        for margin, precision in zip(MARGINS, PRECISIONS, strict=True)
    ),
    *(
        Column(f"thin_{precision}", "int64", False, f"rows that are thin in {precision}")
        for precision in PRECISIONS
    ),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A chunk or round in short; the fields are those of COLUMNS.

    margins  and thin: by precision. As the recorder counts: every row in float32, the accepted
             rows in lower precisions. A margin is None where no row decides anything.
    """

    name: str
    kind: str
    n_rows: int
    committed_len: int
    margins: dict[str, float | None]
    thin: dict[str, int]
    depth: int | None = None
    is_chain: bool | None = None
    max_children: int | None = None
    path: tuple[int, ...] | None = None
    bonus: int | None = None
    emitted: tuple[int, ...] | None = None

    @property
    def accept_len(self) -> int | None:
        return None if self.path is None else len(self.path)

    @property
    def path_is_prefix(self) -> bool | None:
        return None if self.path is None else self.path == tuple(range(len(self.path)))


def case_points(case: GoldenCase) -> Iterator[Point]:
    """The chunks and rounds of a case, in order. Raises BundleError for a path off its tree."""
    committed_len = 0
    for i, chunk in enumerate(case.inputs.chunks):
        found = case.expectation(f"chunk{i}")
        margins, thin = _margins(found, range(len(chunk)))
        yield Point(f"chunk{i}", "chunk", len(chunk), committed_len, margins, thin)
        committed_len = int(stage(found, "committed_len"))
    for i, entry in enumerate(case.inputs.rounds):
        found = case.expectation(f"round{i}")
        path = tuple(stage(found, "path").tolist())
        _check_path(f"expect/{case.inputs.alias}/round{i}/path", path, entry.tree)
        margins, thin = _margins(found, path)
        yield Point(
            f"round{i}",
            "round",
            len(entry.tree),
            committed_len,
            margins,
            thin,
            max(node_depths(entry.tree.parents)),
            entry.tree.parents == tuple(range(-1, len(entry.tree) - 1)),
            max(entry.tree.parents.count(node) for node in range(len(entry.tree))),
            path,
            int(stage(found, "bonus")),
            tuple(stage(found, "emitted").tolist()),
        )
        committed_len = int(stage(found, "committed_len"))


def stage(found: Expectation, name: str) -> np.ndarray:
    """A stage that every case records (bundle_check.py)."""
    array = found.get(name)
    assert array is not None, name
    return array


def _check_path(name: str, path: tuple[int, ...], tree: DraftTree) -> None:
    """Each node of the path is a child of the one before it: rows are taken by these numbers."""
    rooted = path[:1] == (0,) and all(0 <= node < len(tree) for node in path)
    if not rooted or any(tree.parents[child] != parent for parent, child in pairwise(path)):
        raise BundleError(
            f"{name} = {list(path)}; expected a path from the root, node 0, "
            f"down the tree of {len(tree)} nodes"
        )


def _margins(
    found: Expectation, accepted: Sequence[int]
) -> tuple[dict[str, float | None], dict[str, int]]:
    margins: dict[str, float | None] = {}
    thin = {}
    for precision, name in zip(PRECISIONS, MARGINS, strict=True):
        rows = stage(found, name)
        if precision != "float32":
            rows = rows[list(accepted)]
        deciding = rows[~np.isposinf(rows)]
        margins[precision] = float(deciding.min()) if deciding.size else None
        thin[precision] = int((~(rows > 1)).sum())  # as clear_rows in golden_margins.py
    return margins, thin


def index_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """A row per chunk and round of one bundle, with a value for each of COLUMNS."""
    path = Path(path)
    with Bundle.open(path) as file:
        file.verify()
        golden = GoldenBundle(path, file)
        about = {"bundle": path.name, "sha256": file.sha256(), "model": golden.model_name}
        about.update(_config_values(golden.config))
        try:
            return [
                {**about, **_case_values(case), **_point_values(point)}
                for case in golden.cases
                for point in case_points(case)
            ]
        except BundleError as error:
            raise BundleError(f"{path}: {error}") from error


def _config_values(config: ModelConfig) -> dict[str, Any]:
    values = {f"config_{field.name}": getattr(config, field.name) for field in fields(config)}
    yarn = values.pop("config_yarn")
    for field in fields(Yarn):
        values[f"config_yarn_{field.name}"] = getattr(yarn, field.name, None)
    return values


def _case_values(case: GoldenCase) -> dict[str, Any]:
    inputs = case.inputs
    return {
        "case": inputs.alias,
        "id": inputs.case_id,
        "why": inputs.why,
        "rules": list(inputs.rules),
        "level": inputs.level,
    }


def _point_values(point: Point) -> dict[str, Any]:
    same = ("kind", "n_rows", "committed_len", "depth", "is_chain", "max_children", "accept_len")
    return {
        "point": point.name,
        **{name: getattr(point, name) for name in (*same, "path_is_prefix", "bonus")},
        "emitted": None if point.emitted is None else list(point.emitted),
        **{f"margin_{precision}": margin for precision, margin in point.margins.items()},
        **{f"thin_{precision}": count for precision, count in point.thin.items()},
    }


def write_index(bundles: Sequence[str | os.PathLike[str]], out: Path) -> int:
    """Index the bundles into the Parquet file `out`; returns the number of rows.

    Nothing is written unless all bundles are read; an earlier file stays until the new one is
    complete. Raises UnsupportedError without pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UnsupportedError(
            f"Parquet needs pyarrow ({error}); install the extra: pip install 'kdtr[parquet]'"
        ) from error
    _check_out(bundles, out)
    kinds = {
        "string": pa.string(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "list<string>": pa.list_(pa.string()),
        "list<int64>": pa.list_(pa.int64()),
    }
    schema = pa.schema(
        pa.field(column.name, kinds[column.kind], column.nullable, {"what": column.what})
        for column in COLUMNS
    )
    rows = [row for path in bundles for row in index_rows(path)]
    table = pa.Table.from_pylist(rows, schema)
    sibling = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        with sibling.open("xb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        sibling.replace(out)
    except OSError as error:
        reason = error.strerror or error
        raise CaseError(f"--out {out}: {reason}; expected a place to write to") from error
    finally:
        with suppress(OSError):
            sibling.unlink(missing_ok=True)
    return len(rows)


def _check_out(bundles: Sequence[str | os.PathLike[str]], out: Path) -> None:
    if out.is_dir():
        raise CaseError(f"--out {out} is a directory; expected the file to write")
    if out.exists() and not out.is_file():  # a device, a pipe: a file would take its place
        raise CaseError(f"--out {out} is no regular file; expected the file to write")
    for path in bundles:
        if out.exists() and Path(path).exists() and out.samefile(path):
            raise CaseError(f"--out {out} is a bundle to read; expected another file")
