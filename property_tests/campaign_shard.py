"""A shard: the cases of one work unit as a Parquet file, written whole or not at all.

A row is a case (COLUMNS). What the unit was, on what it ran and how it ended is JSON in the
schema's metadata, under `kdtr`: a shard can be judged without the others. Parquet needs the extra
`kdtr[campaign]`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdtr.contract import EngineInfo, UnsupportedError
from kdtr.property_tests.campaign_plan import CampaignError, Unit
from kdtr.property_tests.campaign_unit import Case, Outcome
from kdtr.property_tests.trees import SHAPES

# Name, Arrow type, whether it may be null, and what it says.
COLUMNS: tuple[tuple[str, str, bool, str], ...] = (
    ("unit", "string", False, "the unit's id"),
    ("ordinal", "int32", False, "counts the cases of the unit"),
    ("law", "string", False, "the law's name"),
    ("verdict", "string", False, "held, excused or failed"),
    ("excuse", "string", False, "why a difference was let pass (NUM-2), or empty"),
    *((f"trees_{shape}", "int32", False, f"draft trees of shape {shape}") for shape in SHAPES),
    *((f"rows_{shape}", "int32", False, f"rows of the trees of shape {shape}") for shape in SHAPES),
    ("deepest", "int32", False, "edges from the root of the deepest tree"),
    ("widest", "int32", False, "most siblings in a tree"),
    ("scattered", "int32", False, "commits of a path that is not a prefix of the nodes"),
    ("worst", "float64", True, "largest error as a fraction of its bound"),
    ("worst_stage", "string", False, "the stage of `worst`, or empty"),
)
_KEY = b"kdtr"


@dataclass(frozen=True, slots=True)
class Head:
    """A shard without its rows.

    key      what the rows follow from: unit, engine, versions (`unit_key`)
    held     cases that held
    failure  what a unit that went wrong says for people, or ""
    """

    key: dict[str, Any]
    verdict: str
    why: str
    held: int
    discarded: int
    failure: str

    @property
    def unit(self) -> Unit:
        return Unit(**self.key["unit"])


def unit_key(unit: Unit, campaign: Mapping[str, Any]) -> dict[str, Any]:
    """The unit beside what the campaign fixes for all of them."""
    return {"unit": asdict(unit), **{k: campaign[k] for k in ("engine", "info", "versions")}}


def info_values(info: EngineInfo) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "name": info.name,
        "version": info.version,
        "device": info.device,
        "profile": asdict(info.profile),
        "verbs": sorted(info.verbs),
        "stages": sorted(info.stages),
        "conventions": dict(sorted(info.conventions.items())),
    }


def head_of(outcome: Outcome, key: dict[str, Any]) -> Head:
    text = outcome.failure.text if outcome.failure else ""
    return Head(key, outcome.verdict, outcome.why, outcome.held, outcome.discarded, text)


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """A row per case, with a value for each of COLUMNS."""
    unit = outcome.unit
    return [
        {"unit": unit.id, "ordinal": i, "law": unit.law, **_values(case)}
        for i, case in enumerate(outcome.cases)
    ]


def _values(case: Case) -> dict[str, Any]:
    same = ("verdict", "excuse", "deepest", "widest", "scattered", "worst", "worst_stage")
    return {
        **{name: getattr(case, name) for name in same},
        **{f"trees_{shape}": case.trees.get(shape, 0) for shape in SHAPES},
        **{f"rows_{shape}": case.rows.get(shape, 0) for shape in SHAPES},
    }


def pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet; UnsupportedError without them."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UnsupportedError(
            f"shards need pyarrow ({error}); install the extra: pip install 'kdtr[campaign]'"
        ) from error
    return pa, pq


def _schema(metadata: dict[bytes, bytes] | None = None) -> Any:
    pa, _ = pyarrow()
    kinds = {"string": pa.string(), "int32": pa.int32(), "float64": pa.float64()}
    columns = [
        pa.field(n, kinds[kind], nullable, {"what": what}) for n, kind, nullable, what in COLUMNS
    ]
    return pa.schema(columns, metadata)


def write_shard(path: Path, outcome: Outcome, head: Head) -> None:
    """Write beside the path and move it there; raises CampaignError where that fails."""
    pa, pq = pyarrow()
    schema = _schema({_KEY: json.dumps(asdict(head)).encode()})
    table = pa.Table.from_pylist(rows_of(outcome), schema)

    def write(file: Any) -> None:
        pq.write_table(table, file)

    write_whole(path, write)


def write_whole(path: Path, write: Any) -> None:
    """Call write(file) on a new file, which takes the path's place when it is complete."""
    sibling = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with sibling.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        sibling.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise CampaignError(f"{path}: {reason}; expected a place to write to") from error
    finally:
        with suppress(OSError):
            sibling.unlink(missing_ok=True)


def read_head(path: Path) -> Head:
    """The metadata of a shard; raises CampaignError for a file that is none."""
    pa, pq = pyarrow()
    try:
        metadata = pq.read_schema(path).metadata or {}
        return Head(**json.loads(metadata[_KEY]))
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise CampaignError(
            f"{path}: not a shard of a campaign ({error}); expected what `kdtr campaign` writes; "
            "remove it"
        ) from error


def read_rows(path: Path) -> Any:
    """The rows of a shard as an Arrow table without metadata, so that tables can be joined."""
    _, pq = pyarrow()
    return pq.read_table(path).cast(_schema()).replace_schema_metadata(None)
