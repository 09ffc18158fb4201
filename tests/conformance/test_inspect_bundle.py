"""`kdtr inspect` shows what is in a file, in lines for people, and refuses damaged files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.inspect_bundle import WIDTH, config_lines
from kdtr.contract import ModelConfig
from kdtr.kdtr_format import Bundle, write_bundle

Kdtr = Callable[..., SimpleNamespace]
Change = Callable[[dict[str, np.ndarray], dict[str, Any]], object]

CORPUS = Path(__file__).resolve().parents[2] / "conformance" / "corpus"


@pytest.fixture
def rewritten(small: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """rewritten(change): the small bundle after change(tensors, metadata), checksums and all."""

    def rewrite(change: Change) -> Path:
        with Bundle.open(small) as bundle:
            tensors = {name: np.array(bundle[name]) for name in bundle}
            metadata = {**bundle.metadata}
        change(tensors, metadata)
        write_bundle(tmp_path / "changed.kdtr", tensors, metadata)
        return tmp_path / "changed.kdtr"

    return rewrite


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A KDTR file that is no golden bundle."""
    tensors = {
        "bf16": np.array([[0.5, np.nan], [np.inf, -2]], ml_dtypes.bfloat16),
        "e5": np.array([0.25, 4], ml_dtypes.float8_e5m2),
        "empty": np.zeros((0, 3), np.int8),
        "flags": np.array([True, False, True]),
        "long": np.arange(1000, dtype=np.uint32),
        "nibbles": np.array([-8, 7, 1], ml_dtypes.int4),
        "eight": np.zeros((4,) * 8),
        "nan": np.array(np.nan),
        "one": np.array(1 / 3),
    }
    write_bundle(tmp_path / "plain.kdtr", tensors, {"made by": "a test", "n": 3}, alignment=64)
    return tmp_path / "plain.kdtr"


# Golden bundles


def test_the_head_of_a_bundle(kdtr: Kdtr, small: Path) -> None:
    run = kdtr("inspect", small, "--case", "y")

    lines = run.out.splitlines()
    with Bundle.open(small) as bundle:
        sha256, n = bundle.sha256(), len(bundle)
    assert (0, "") == (run.code, run.err)
    assert [
        str(small),
        f"size        {small.stat().st_size} bytes",
        f"SHA-256     {sha256}",
        f"format      KDTR 1.0, alignment 256, {n} entries",
        "",
    ] == lines[:5]
    assert lines[5].startswith("versions    corpus ")
    assert "model       small" == lines[6]
    assert "  vocab_size             37   n_shared_experts         2" in lines
    assert "  yarn: none" in lines


def test_the_table_counts_thin_rows_as_the_recorder_did(kdtr: Kdtr, small: Path) -> None:
    with Bundle.open(small) as bundle:
        entries = bundle.metadata["cases"]

    lines = kdtr("inspect", small).out.splitlines()

    (head,) = (i for i, line in enumerate(lines) if line.startswith("case  "))
    columns = ["case", "id", "level", "chunks", "rounds", "thin", "f32", "thin", "bf16"]
    assert columns == lines[head].split()
    for entry, line in zip(entries, lines[head + 1 :], strict=False):
        thin = entry["thin"]
        cells = line.split()
        assert [entry["alias"], entry["id"], entry["level"]] == cells[:3]
        assert [str(thin["float32"]), str(thin["bfloat16"])] == cells[-2:]


def test_a_case_with_its_chunk_and_its_rounds(kdtr: Kdtr, small: Path) -> None:
    with Bundle.open(small) as bundle:
        targets, positions, emitted = (
            bundle[f"expect/y/round0/{name}"].tolist()
            for name in ("targets", "positions", "emitted")
        )
        tokens = bundle["input/y/round0/tokens"].tolist()
        bonus = bundle["expect/y/round0/bonus"]
        case_id = bundle.metadata["cases"][0]["id"]

    out = kdtr("inspect", small, "--case", "y").out

    assert f"\ncase y ({case_id})\n  why         a Y\n  rules       MASK-2\n" in out
    assert (
        f"\n  chunk0: 6 tokens after 0 committed tokens; the next root is token {tokens[0]}\n"
        in (out)
    )
    assert "\n    tokens      3 0 36 8 8 1\n    margin      " in out
    at = out.index("\n  round0: 4 nodes, depth 2, after 6 committed tokens\n")
    block = [line.split() for line in out[at + 1 :].splitlines()[1:9]]
    columns = (positions, (0, 1, 1, 2), targets, tokens)
    numbers = [list(map(str, row)) for row in zip(*columns, strict=True)]
    assert ["position", "depth", "target", "token", "node"] == block[0]
    assert ["*", *numbers[0], "0"] == block[1]
    assert [*numbers[1], "├", "1"] == block[2]
    assert ["*", *numbers[2], "└", "2"] == block[3]
    assert ["*", *numbers[3], "3"] == block[4]
    assert ["accept_len", "3", "(path", "0-2-3)"] == block[5]
    assert ["bonus", "token", str(bonus)] == block[6]
    assert ["emitted", *map(str, emitted)] == block[7]
    assert "case ar" not in out


def test_a_case_without_prompt_and_one_that_is_built(kdtr: Kdtr, small: Path) -> None:
    out = kdtr("inspect", small).out

    assert "\n  root        token 5, set in an empty cache\n" in out
    assert "after 2 committed tokens; best-first, budget 5\n" in out


def test_a_round_with_a_limit(kdtr: Kdtr) -> None:
    out = kdtr("inspect", CORPUS / "base.kdtr", "--case", "limits").out

    assert "\n    limit       at most 2 emitted\n" in out
    assert 2 == len(re.findall(r"\n    limit       stops at token \d+\n", out))


def test_every_line_fits_a_terminal(kdtr: Kdtr, tiny: Path) -> None:
    out = kdtr("inspect", tiny).out

    assert [] == [line for line in out.splitlines()[1:] if len(line) > WIDTH]


def test_a_case_by_its_id(kdtr: Kdtr, small: Path) -> None:
    with Bundle.open(small) as bundle:
        case_id = bundle.metadata["cases"][1]["id"]

    assert kdtr("inspect", small, "--case", "ar").out == (
        kdtr("inspect", small, "--case", case_id).out
    )


def test_an_unknown_case(kdtr: Kdtr, small: Path) -> None:
    run = kdtr("inspect", small, "--case", "z")

    text = "kdtr: CaseError: no case z; the bundle has y, ar, drafted, from-root\n"
    assert (2, "", text) == (run.code, run.out, run.err)


def test_the_configuration_with_yarn() -> None:
    lines = config_lines(ModelConfig.kimi_k2())

    assert "  yarn:" in lines
    assert "  factor                            32.0   mscale            1.0" in lines
    assert any(line.endswith("attention_factor  null") for line in lines)


# Trees


# Tensors


def test_the_tensors_of_a_case(kdtr: Kdtr, small: Path) -> None:
    lines = kdtr("inspect", small, "--tensors", "--case", "ar").out.splitlines()

    with Bundle.open(small) as bundle:
        names = [n for n in bundle if n.startswith(("input/ar/", "expect/ar/"))]
        crc = next(e.crc for e in bundle.entries if e.name == "expect/ar/chunk0/mask")
    assert ["dtype", "shape", "bytes", "crc", "name"] == lines[5].split()
    assert names == [line.split()[-1] for line in lines[6:]]
    assert any(
        line.split() == ["bool", "[6,", "6]", "36", f"{crc:08x}", "expect/ar/chunk0/mask"]
        for line in lines
    )


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("bf16", ["bf16 [2, 2], min -2, max 0.5, 1 NaN, 1 inf", "[[ 0.5  nan]", " [ inf -2. ]]"]),
        ("e5", ["f8e5m2 [2], min 0.25, max 4, 0 NaN, 0 inf", "[0.25 4.  ]"]),
        ("empty", ["i8 [0, 3], no elements", "[]"]),
        ("flags", ["bool [3], 2 of 3 true", "[ True False  True]"]),
        (
            "long",
            [
                "u32 [1000], min 0, max 999",
                "[  0   1   2   3   4   5 ... 994 995 996 997 998 999]",
            ],
        ),
        ("nibbles", ["i4x2 [3], min -8, max 7", "[-8  7  1]"]),
        ("nan", ["f64 [], none finite, 1 NaN, 0 inf", "nan"]),
        ("one", ["f64 [], min 0.333333, max 0.333333, 0 NaN, 0 inf", "0.3333333333333333"]),
    ],
)
def test_the_values_of_a_tensor(kdtr: Kdtr, plain: Path, name: str, lines: list[str]) -> None:
    run = kdtr("inspect", plain, "--tensor", name)

    assert 0 == run.code
    assert [name, *(f"  {line}" for line in lines)] == run.out.splitlines()[5:]


def test_a_tensor_of_eight_axes_is_shortened(kdtr: Kdtr, plain: Path) -> None:
    out = kdtr("inspect", plain, "--tensor", "eight").out

    assert "  f64 [4, 4, 4, 4, 4, 4, 4, 4], min 0, max 0, 0 NaN, 0 inf\n" in out
    assert out.count("0.") < 300


def test_an_unknown_tensor_is_answered_with_the_closest(kdtr: Kdtr, small: Path) -> None:
    run = kdtr("inspect", small, "--tensor", "expect/y/round0/logit")

    assert (2, "") == (run.code, run.out)
    assert "no tensor 'expect/y/round0/logit' among" in run.err
    assert "the closest are 'expect/y/round0/logits'" in run.err


# Other files


def test_a_file_that_is_no_golden_bundle(kdtr: Kdtr, plain: Path) -> None:
    run = kdtr("inspect", plain)

    assert (0, "") == (run.code, run.err)
    assert "format      KDTR 1.0, alignment 64, 9 entries\n" in run.out
    assert "\nno golden bundle that can be read: metadata and tensors follow\n" in run.out
    assert '\n  {\n    "made by": "a test",\n    "n": 3\n  }\n' in run.out
    assert re.search(
        r"^f64 +\[4, 4, 4, 4, 4, 4, 4, 4\]  524288  [0-9a-f]{8}  eight$", run.out, re.M
    )


def test_a_case_of_a_file_that_has_none(kdtr: Kdtr, plain: Path) -> None:
    run = kdtr("inspect", plain, "--case", "y")

    text = "kdtr: CaseError: --case y: no golden bundle that can be read; leave it out\n"
    assert (2, "", text) == (run.code, run.out, run.err)


def test_long_metadata_is_cut(kdtr: Kdtr, tmp_path: Path) -> None:
    write_bundle(tmp_path / "long.kdtr", {}, {"x": list(range(1000))})

    out = kdtr("inspect", tmp_path / "long.kdtr").out

    assert "\n  and 804 lines more\n" in out


def test_names_and_metadata_cannot_act_on_the_terminal(kdtr: Kdtr, tmp_path: Path) -> None:
    write_bundle(
        tmp_path / "loud.kdtr", {"a\x1b[2J\nb": np.zeros(1)}, {"\x9b31m": "[red]\u202e:smile:"}
    )

    out = kdtr("inspect", tmp_path / "loud.kdtr").out

    assert "a\\x1b[2J\\nb\n" in out
    assert '"\\x9b31m": "[red]\\u202e:smile:"\n' in out
    assert [] == [c for c in out if not c.isprintable() and c != "\n"]


# Refusals


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: b"", "the file is empty; expected a KDTR file"),
        (lambda data: b"{}" + data[2:], "not a KDTR file: "),
        (lambda data: data[:-8], "the file was cut or edited"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the file was cut or edited"),
    ],
    ids=["empty", "foreign", "cut", "payload"],
)
@pytest.mark.parametrize("more", [(), ("--tensors",), ("--tensor", "config/n_group")])
def test_a_damaged_file(
    kdtr: Kdtr,
    small: Path,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    text: str,
    more: tuple[str, ...],
) -> None:
    path = tmp_path / "damaged.kdtr"
    path.write_bytes(damage(small.read_bytes()))

    run = kdtr("inspect", path, *more)

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith(f"kdtr: BundleError: {path}: ")
    assert text in run.err
    assert 1 == run.err.count("\n")


def test_no_such_file(kdtr: Kdtr, tmp_path: Path) -> None:
    run = kdtr("inspect", tmp_path / "none")

    text = f"kdtr: BundleError: {tmp_path / 'none'}: no such file; expected a KDTR file\n"
    assert (2, "", text) == (run.code, run.out, run.err)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t, _: t.pop("expect/y/round0/mask"),
            "expect/y/round0/mask is missing; record the bundle again with `kdtr golden`",
        ),
        (
            lambda t, _: t.update({"expect/y/round0/path": np.array([0, 2, 9])}),
            "expect/y/round0/path = [0, 2, 9], which is no path from the root of the question's "
            "tree; record the bundle again",
        ),
        (
            lambda t, _: t.update({"expect/y/round0/path": np.array([0, 1, 3])}),
            "expect/y/round0/path = [0, 1, 3], which is no path from the root of the question's "
            "tree; record the bundle again",
        ),
        (
            lambda _, m: m.update(versions={"rules": 0}),
            "recorded under rules version 0, this kdtr has ",
        ),
        (lambda _, m: m.update(cases=7), "cases = 7; expected a list of cases"),
    ],
    ids=["stage", "path", "no path", "rules", "cases"],
)
def test_a_golden_bundle_that_is_refused_is_shown_and_refused(
    kdtr: Kdtr, rewritten: Callable[[Change], Path], change: Change, text: str
) -> None:
    path = rewritten(change)

    run = kdtr("inspect", path)

    assert 2 == run.code
    assert "\nno golden bundle that can be read: metadata and tensors follow\n" in run.out
    assert " expect/y/round0/logits\n" in run.out
    assert run.err.startswith(f"kdtr: BundleError: {path}: {text}")
    assert 1 == run.err.count("\n")
