"""The Parquet table: stated columns and types, a row for each comparison."""

from __future__ import annotations

import io
import json
import math
import sys

import pytest

from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.comparison_table import COLUMNS, comparison_table
from kdtr.contract import UnsupportedError

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")


def test_columns_have_their_types_and_say_what_they_hold(run: Run) -> None:
    schema = pq.read_table(io.BytesIO(comparison_table(run))).schema

    assert [
        "bundle: string", "case: string", "mode: string", "verdict: string", "point: string",
        "stage: string", "layer: int32", "rows: int64", "headroom: double", "same: bool",
    ] == [f"{field.name}: {field.type}" for field in schema]  # fmt: skip
    assert ["layer", "headroom"] == [field.name for field in schema if field.nullable]
    assert [column.what for column in COLUMNS] == [
        field.metadata[b"what"].decode() for field in schema
    ]
    assert b"1" == schema.metadata[b"kdtr.schema"]
    assert "my_engine:make" == json.loads(schema.metadata[b"kdtr.header"])["engine"]


def test_a_row_for_each_comparison(run: Run) -> None:
    rows = pq.read_table(io.BytesIO(comparison_table(run))).to_pylist()

    assert [
        ("ar", "stepwise", "pass", "chunk0", "positions", None, 4, None, True),
        ("ar", "stepwise", "pass", "chunk0", "scores", 1, 4, 0.25, True),
        ("ar", "stepwise", "pass", "round0", "logits", None, 4, math.inf, False),
    ] == [tuple(row.values())[1:] for row in rows]


def test_a_run_without_comparisons_is_a_table_without_rows(run: Run) -> None:
    run.gate.results.clear()

    assert 0 == pq.read_table(io.BytesIO(comparison_table(run))).num_rows


def test_without_pyarrow_it_is_refused_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    with pytest.raises(UnsupportedError, match=r"install the extra: pip install 'kdtr\[parquet\]'"):
        comparison_table(run)
