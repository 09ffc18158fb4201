"""All comparisons of a run as a Parquet table: a row for each stage, layer and point."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

from kdtr.conformance.report_files.plain_data import header_data
from kdtr.conformance.report_files.run import Run
from kdtr.contract import UnsupportedError

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: str
    nullable: bool
    what: str


COLUMNS = (
    Column("bundle", "string", False, "path of the golden bundle"),
    Column("case", "string", False, "name of the case"),
    Column("mode", "string", False, "how the engine was driven: stepwise, round, ..."),
    Column("verdict", "string", False, "of the case in this mode"),
    Column("point", "string", False, "chunk0, chunk1, ..., round0, round1, ..."),
    Column("stage", "string", False, "what was compared (contract/stages.py)"),
    Column("layer", "int32", True, "from 0; null: the stage is not per layer"),
    Column("rows", "int64", False, "rows that were compared"),
    Column(
        "headroom", "double", True, "largest error, in units of its bound; null: compared exactly"
    ),
    Column("same", "bool", False, "false: a difference was found, which may be a near tie"),
)


def check_pyarrow() -> None:
    """Raises UnsupportedError where it is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"Parquet needs pyarrow ({error}); install the extra: pip install 'kdtr[parquet]'"
        ) from error


def comparison_table(run: Run) -> bytes:
    """The bytes of the file. The run's header is metadata of the schema, under kdtr.header.

    Raises UnsupportedError without pyarrow.
    """
    check_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        "string": pa.string(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "bool": pa.bool_(),
    }
    metadata = {
        "kdtr.schema": str(SCHEMA),
        "kdtr.header": json.dumps(header_data(run.header)),
    }
    schema = pa.schema(
        [pa.field(c.name, kinds[c.kind], c.nullable, {"what": c.what}) for c in COLUMNS], metadata
    )
    rows = [
        (
            *(result.bundle, result.case, result.mode, result.verdict.value),
            *(one.point, one.stage, one.layer, one.rows, one.headroom, one.same),
        )
        for result in run.gate.results
        for one in result.compared
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    arrays = [
        pa.array(list(values), field.type) for values, field in zip(columns, schema, strict=True)
    ]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), out)
    return out.getvalue()
