"""`kdtr index`: a typed row for every chunk and round, read back and compared by value."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.case_index import COLUMNS, index_rows
from kdtr.contract import BundleError, ModelConfig, Yarn
from kdtr.kdtr_format import Bundle, write_bundle

Kdtr = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def rows(small: Path) -> list[dict[str, Any]]:
    return index_rows(small)


def row(rows: list[dict[str, Any]], case: str, point: str) -> dict[str, Any]:
    (found,) = (r for r in rows if (r["case"], r["point"]) == (case, point))
    return found


# Rows


def test_a_row_per_chunk_and_round(rows: list[dict[str, Any]]) -> None:
    assert [
        ("y", "chunk0"),
        ("y", "round0"),
        ("y", "round1"),
        ("ar", "chunk0"),
        ("ar", "round0"),
        ("ar", "round1"),
        ("drafted", "chunk0"),
        ("drafted", "round0"),
        ("from-root", "round0"),
    ] == [(r["case"], r["point"]) for r in rows]


def test_every_row_has_every_column_in_its_type(rows: list[dict[str, Any]]) -> None:
    kinds = {"string": str, "int64": int, "double": float, "bool": bool}
    for found in rows:
        assert {column.name for column in COLUMNS} == set(found)
        for column in COLUMNS:
            value = found[column.name]
            if value is None:
                assert column.nullable, column.name
            elif column.kind.startswith("list"):
                inner = kinds[column.kind[5:-1]]
                assert all(type(item) is inner for item in value), column.name
            else:
                assert type(value) is kinds[column.kind], column.name


def test_the_row_of_a_round(rows: list[dict[str, Any]], small: Path) -> None:
    with Bundle.open(small) as bundle:
        emitted = bundle["expect/y/round0/emitted"].tolist()
        margins = [bundle[f"expect/y/round0/margin_{p}"] for p in ("float32", "bfloat16")]
        entry, sha256 = bundle.metadata["cases"][0], bundle.sha256()

    found = row(rows, "y", "round0")

    assert (small.name, sha256, "small") == (found["bundle"], found["sha256"], found["model"])
    assert (entry["id"], "a Y", ["MASK-2"], "stages") == tuple(
        found[name] for name in ("id", "why", "rules", "level")
    )
    assert ("round", 4, 6, 2, False, 2, 3, False) == tuple(
        found[name]
        for name in (
            "kind",
            "n_rows",
            "committed_len",
            "depth",
            "is_chain",
            "max_children",
            "accept_len",
            "path_is_prefix",
        )
    )
    assert emitted == found["emitted"]
    assert emitted[-1] == found["bonus"]
    assert margins[0].min() == found["margin_float32"]
    assert margins[1][[0, 2, 3]].min() == found["margin_bfloat16"]


def test_the_cache_grows_from_row_to_row(rows: list[dict[str, Any]]) -> None:
    assert [0, 6, 9] == [r["committed_len"] for r in rows if r["case"] == "y"]
    assert [0, 6, 7] == [r["committed_len"] for r in rows if r["case"] == "ar"]


def test_the_root_alone_is_a_chain_whose_rows_stay(rows: list[dict[str, Any]]) -> None:
    found = row(rows, "ar", "round1")

    assert (True, True, 0, 0, 1) == tuple(
        found[n] for n in ("is_chain", "path_is_prefix", "depth", "max_children", "accept_len")
    )


def test_a_chunk_has_nothing_of_a_tree(rows: list[dict[str, Any]]) -> None:
    found = row(rows, "y", "chunk0")

    assert ("chunk", 6) == (found["kind"], found["n_rows"])
    assert {
        "depth",
        "is_chain",
        "max_children",
        "accept_len",
        "path_is_prefix",
        "bonus",
        "emitted",
    } == {name for name, value in found.items() if value is None and "yarn" not in name}


def test_thin_rows_sum_to_the_recorders_count(rows: list[dict[str, Any]], small: Path) -> None:
    with Bundle.open(small) as bundle:
        entries = bundle.metadata["cases"]

    assert any(entry["thin"]["bfloat16"] for entry in entries)
    for entry in entries:
        mine = [r for r in rows if r["case"] == entry["alias"]]
        for precision, count in entry["thin"].items():
            assert count == sum(r[f"thin_{precision}"] for r in mine)


def test_the_configuration_and_yarn(
    rows: list[dict[str, Any]], record: Callable[..., Path], small_model: SimpleNamespace
) -> None:
    yarn = Yarn(factor=4.0, original_max_position_embeddings=16, mscale=1.0)
    config: ModelConfig = small_model.config.replace(yarn=yarn)
    plan = CasePlan("one", "yarn", ("MLA-5",), (Planted((-1,)),), ((1, 2),))

    found = index_rows(record([plan], config))[0]

    assert (37, "sigmoid", 2e-3) == tuple(
        found[f"config_{name}"] for name in ("vocab_size", "scoring_func", "latent_norm_eps")
    )
    assert (4.0, 16, 1.0, None) == tuple(
        found[f"config_yarn_{name}"]
        for name in ("factor", "original_max_position_embeddings", "mscale", "attention_factor")
    )
    assert rows[0]["config_yarn_factor"] is None


def test_rows_that_decide_nothing_count_for_no_margin(
    record: Callable[..., Path], small_model: SimpleNamespace
) -> None:
    """Of a prompt, in a model without a router, the last row alone decides."""
    config: ModelConfig = small_model.config.replace(first_k_dense_replace=2)
    path = record([CasePlan("one", "dense", (), (Planted((-1,)),), ((1, 2, 3),))], config)
    with Bundle.open(path) as bundle:
        margins = [bundle[f"expect/one/chunk0/margin_{p}"] for p in ("float32", "bfloat16")]

    found = index_rows(path)[0]

    for margin, precision in zip(margins, ("float32", "bfloat16"), strict=True):
        assert [np.inf, np.inf] == margin[:2].tolist()
        assert np.isfinite(margin[2])
        assert margin[2] == found[f"margin_{precision}"]


# The file


def test_the_table_reads_back_as_the_rows(
    kdtr: Kdtr,
    rows: list[dict[str, Any]],
    record: Callable[..., Path],
    small: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "index.parquet"
    other = record([CasePlan("one", "other", (), (Planted((-1,)),), ((1, 2),))])

    run = kdtr("index", small, other, "--out", out)

    table = pq.read_table(out)
    n = table.num_rows
    assert (0, f"{n} rows of 2 bundles in {out}\n", "") == (run.code, run.out, run.err)
    assert [*rows, *index_rows(other)] == table.to_pylist()
    assert [out] == list(tmp_path.iterdir())


def test_the_schema_is_the_declared_one(kdtr: Kdtr, small: Path, tmp_path: Path) -> None:
    run = kdtr("index", small, "--out", tmp_path / "i")

    assert f" rows of 1 bundle in {tmp_path / 'i'}\n" in run.out
    schema = pq.read_schema(tmp_path / "i")

    assert [c.name for c in COLUMNS] == schema.names
    for column, found in zip(COLUMNS, schema, strict=True):
        kind = re.sub("<element: |<item: ", "<", str(found.type))
        assert (column.kind, column.nullable) == (kind, found.nullable)
        assert column.what == found.metadata[b"what"].decode()
    assert pa.int64() == schema.field("config_q_lora_rank").type
    assert schema.field("config_q_lora_rank").nullable


def test_every_column_is_documented() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "golden-bundles.md"
    lines = page.read_text(encoding="utf-8").splitlines()

    for column in COLUMNS:
        if not column.name.startswith("config_"):
            star, code = " *" * column.nullable, "`" * column.kind.startswith("list")
            line = f"| `{column.name}`{star} | {code}{column.kind}{code} | {column.what} |"
            assert line in lines


# Refusals


def test_without_pyarrow(
    kdtr: Kdtr, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    run = kdtr("index", small, "--out", tmp_path / "i")

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith("kdtr: UnsupportedError: Parquet needs pyarrow (")
    assert run.err.endswith("); install the extra: pip install 'kdtr[parquet]'\n")
    assert [] == list(tmp_path.iterdir())


def test_the_command_does_not_load_pyarrow_before_it_is_asked_to() -> None:
    code = "import sys, json, kdtr.conformance.cli; print(json.dumps('pyarrow' in sys.modules))"

    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert json.loads(answer.stdout) is False


@pytest.mark.parametrize("other", ["damaged", "plain", "path"])
def test_a_bundle_that_is_refused_leaves_the_earlier_table(
    kdtr: Kdtr, small: Path, tmp_path: Path, other: str
) -> None:
    out, bad = tmp_path / "i", tmp_path / "bad.kdtr"
    out.write_text("earlier")
    if other == "damaged":
        bad.write_bytes(small.read_bytes()[:-1])
        text = ""
    elif other == "plain":
        write_bundle(bad, {"x": np.ones(2)}, {})
        text = "kind = None; expected a golden bundle, as `kdtr golden` writes it\n"
    else:
        with Bundle.open(small) as bundle:
            tensors = {name: np.array(bundle[name]) for name in bundle}
            tensors["expect/y/round0/path"] = np.array([-1, 2, 3])
            write_bundle(bad, tensors, bundle.metadata)
        text = "expect/y/round0/path = [-1, 2, 3], which is no path from the root of the "

    run = kdtr("index", small, bad, "--out", out)

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith(f"kdtr: BundleError: {bad}: {text}")
    assert "earlier" == out.read_text()
    assert {out, bad} == set(tmp_path.iterdir())


def test_rows_of_no_golden_bundle(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x", {}, {"kind": "golden"})

    with pytest.raises(BundleError, match="recorded under rules version None"):
        index_rows(tmp_path / "x")


def test_places_that_cannot_be_written(kdtr: Kdtr, small: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "none" / "i"
    before = small.read_bytes()

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    runs = [kdtr("index", small, "--out", out) for out in (tmp_path, small, pipe, nowhere)]

    assert [
        f"kdtr: CaseError: --out {tmp_path} is a directory; expected the file to write\n",
        f"kdtr: CaseError: --out {small} is a bundle to read; expected another file\n",
        f"kdtr: CaseError: --out {pipe} is no regular file; expected the file to write\n",
        f"kdtr: CaseError: --out {nowhere}: No such file or directory; "
        "expected a place to write to\n",
    ] == [run.err for run in runs]
    assert [2, 2, 2, 2] == [run.code for run in runs]
    assert before == small.read_bytes()
    assert pipe.is_fifo()
