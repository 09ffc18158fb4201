"""`kdtr diff` names the first stage that differs, in the order of causes, and counts the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.diff_bundles import _order, diff_bundles
from kdtr.contract import stage_order
from kdtr.kdtr_format import Bundle, write_bundle

Kdtr = Callable[..., SimpleNamespace]
Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors, dict[str, Any]], object]
E = "expect/y/round0/"
_BITS_1E308 = int(np.array(1e308).view(np.int64))  # how many steps it is above 0


@pytest.fixture
def diff(kdtr: Kdtr, small: Path, tmp_path: Path) -> Callable[[Change], SimpleNamespace]:
    """diff(change): code, lines below the two files, and err, of the small bundle and the changed.

    The bundle is written by its own writer, so checksums are right.
    """

    def diff(change: Change) -> SimpleNamespace:
        with Bundle.open(small) as bundle:
            tensors = {name: np.array(bundle[name]) for name in bundle}
            metadata = {**bundle.metadata, "cases": [{**e} for e in bundle.metadata["cases"]]}
        change(tensors, metadata)
        write_bundle(tmp_path / "changed.kdtr", tensors, metadata)
        run = kdtr("diff", small, tmp_path / "changed.kdtr")
        return SimpleNamespace(code=run.code, lines=run.out.splitlines()[2:], err=run.err)

    return diff


Diff = Callable[[Change], SimpleNamespace]


@pytest.fixture
def pair(kdtr: Kdtr, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """pair(a, b): two files of these tensors, and metadata, compared."""

    def pair(a: Tensors, b: Tensors, *metadata: dict[str, Any]) -> SimpleNamespace:
        about = metadata or ({}, {})
        for name, tensors, said in zip("ab", (a, b), about, strict=True):
            write_bundle(tmp_path / name, tensors, said)
        run = kdtr("diff", tmp_path / "a", tmp_path / "b")
        return SimpleNamespace(code=run.code, lines=run.out.splitlines()[2:], err=run.err)

    return pair


def add(name: str, index: tuple[int, ...] = (), amount: float = 1) -> Change:
    def change(tensors: Tensors, _: object) -> None:
        tensors[name][index] += amount

    return change


# Verdicts


def test_the_same_bytes(kdtr: Kdtr, small: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.kdtr"
    copy.write_bytes(small.read_bytes())
    with Bundle.open(small) as bundle:
        sha256 = bundle.sha256()

    run = kdtr("diff", small, copy)

    assert [f"A  {sha256}  {small}", f"B  {sha256}  {copy}", "same bytes"] == run.out.splitlines()
    assert (0, "") == (run.code, run.err)


def test_the_same_content_in_other_bytes(kdtr: Kdtr, tmp_path: Path) -> None:
    for name, alignment in (("a", 64), ("b", 256)):
        write_bundle(tmp_path / name, {"x": np.ones(3)}, {}, alignment=alignment)

    run = kdtr("diff", tmp_path / "a", tmp_path / "b")

    verdict = "same content; the bytes differ in alignment or in what a reader may ignore"
    assert (0, verdict) == (run.code, run.out.splitlines()[-1])


def test_one_element_of_one_stage(diff: Diff, small: Path) -> None:
    with Bundle.open(small) as bundle:
        value = float(bundle[E + "layer1/out_latent"][2, 1, 3])
    near = float(np.nextafter(value, np.inf))

    def change(tensors: Tensors, _: object) -> None:
        tensors[E + "layer1/out_latent"][2, 1, 3] = near
        tensors[E + "logits"][1] += 1

    run = diff(change)

    assert (1, "") == (run.code, run.err)
    assert [
        "first difference: case y, round0, layer 1, stage out_latent",
        f"  tensor    {E}layer1/out_latent",
        "  at        layer 1, row 2 (path 0-2), head 1, latent channel 3",
        f"  A         {value!r}",
        f"  B         {near!r}",
        f"  distance  1 ulp, at most 1 ulp; largest absolute difference {near - value:.3g}",
        "  in all    1 of 120 elements",
    ] == run.lines[:-1]
    assert run.lines[-1].startswith("2 of ")
    assert run.lines[-1].endswith(" common tensors differ (expect 2)")


def test_an_integer_stage(diff: Diff) -> None:
    run = diff(add(E + "positions", (3,)))

    assert [
        "first difference: case y, round0, stage positions",
        f"  tensor    {E}positions",
        "  at        row 3 (path 0-2-3)",
        "  A         8",
        "  B         9",
        "  in all    1 of 4 elements",
    ] == run.lines[:-1]


def test_a_chunk_has_rows_without_paths(diff: Diff) -> None:
    run = diff(add("expect/ar/chunk0/layer0/hidden", (5, 7)))

    assert "first difference: case ar, chunk0, layer 0, stage hidden" == run.lines[0]
    assert "  at        layer 0, row 5, hidden channel 7" == run.lines[2]


def test_a_single_number_has_no_coordinates(diff: Diff) -> None:
    run = diff(add(E + "bonus"))

    assert "first difference: case y, round0, stage bonus" == run.lines[0]
    assert run.lines[2].startswith("  A         ")


# Order


@pytest.mark.parametrize(
    ("earlier", "later", "place"),
    [
        ("config/rope_theta", "weights/lm_head.weight", "config"),
        ("weights/lm_head.weight", "input/y/chunk0/tokens", "weights"),
        ("input/y/round1/tokens", "expect/y/chunk0/logits", "case y, round1, input tokens"),
        ("expect/y/round1/logits", "input/ar/chunk0/tokens", "case y, round1, stage logits"),
        ("expect/y/chunk0/logits", "expect/y/round0/tokens", "case y, chunk0, stage logits"),
        (E + "layer0/hidden", E + "layer1/c_kv", "case y, round0, layer 0, stage hidden"),
        (E + "layer1/c_kv", E + "layer1/attn_out", "case y, round0, layer 1, stage c_kv"),
        (
            E + "layer1/expert_gap",
            E + "layer1/expert_weights",
            "case y, round0, layer 1, expect expert_gap",
        ),
        (E + "cache_k_pe", E + "margin_float32", "case y, round0, stage cache_k_pe"),
    ],
)
def test_the_earlier_stage_comes_first(diff: Diff, earlier: str, later: str, place: str) -> None:
    def change(tensors: Tensors, _: object) -> None:
        for name in (earlier, later):
            tensors[name] = tensors[name] + np.array(1, tensors[name].dtype)

    run = diff(change)

    assert f"first difference: {place}" == run.lines[0]
    assert run.lines[-1].startswith("2 of ")


def test_the_order_is_that_of_the_contract() -> None:
    stages = [
        f"expect/a/round0/{'' if layer is None else f'layer{layer}/'}{stage.name}"
        for stage, layer in stage_order(12)
    ]

    stages_by_name = sorted(stages)
    assert stages != stages_by_name
    assert stages == sorted(stages_by_name, key=_order(["a"]))


def test_points_and_layers_are_numbers_in_the_order() -> None:
    names = ["weights/l.9", "weights/l.10", "input/a/max_len", "input/a/chunk0/tokens"]
    names += [f"input/a/round{i}/tokens" for i in (0, 2, 10)] + ["other"]

    names_by_name = sorted(names)
    assert names != names_by_name
    assert names == sorted(names_by_name, key=_order(["a"]))


# Forms, cases, metadata


def test_another_dtype_or_shape(diff: Diff) -> None:
    def change(tensors: Tensors, _: object) -> None:
        tensors[E + "layer0/c_kv"] = tensors[E + "layer0/c_kv"].astype(np.float32)
        tensors[E + "logits"] = tensors[E + "logits"][:, :5]

    run = diff(change)

    assert ["  A         f64 [4, 10]", "  B         f32 [4, 10]"] == run.lines[2:4]
    assert run.lines[-1].startswith("2 of ")


def test_a_tensor_in_one_of_them(diff: Diff) -> None:
    def change(tensors: Tensors, _: object) -> None:
        del tensors[E + "mask"]
        tensors["weights/extra"] = np.ones(2)

    run = diff(change)

    assert [
        "first difference: weights",
        "  tensor    weights/extra",
        "  A         no such tensor",
        "  B         f64 [2]",
        "tensors only in A: 1 (expect 1)",
        "tensors only in B: 1 (weights 1)",
    ] == run.lines[:-1]
    assert run.lines[-1].startswith("0 of ")
    assert run.lines[-1].endswith(" common tensors differ")


def test_a_case_in_one_of_them_is_named_and_no_difference_of_stages(diff: Diff) -> None:
    def change(tensors: Tensors, metadata: dict[str, Any]) -> None:
        for name in [name for name in tensors if "/ar/" in name]:
            del tensors[name]
        del metadata["cases"][1]

    run = diff(change)

    assert "cases only in A: ar" == run.lines[0]
    assert run.lines[1].startswith("0 of ")
    assert (1, 2) == (run.code, len(run.lines))


def test_metadata_alone(diff: Diff) -> None:
    def change(_: object, metadata: dict[str, Any]) -> None:
        metadata["versions"] = {**metadata["versions"], "corpus": 77}
        metadata["cases"][0]["id"] = "0" * 12
        metadata["note"] = True
        del metadata["cases"][2]["why"]

    run = diff(change)

    assert 1 == run.code
    text = "\n".join(run.lines)
    assert '  cases[]/drafted/why\n    A         "built"\n    B         absent\n' in text
    assert '\n  cases[]/y/id\n    A         "' in text
    assert '\n    B         "000000000000"\n' in text
    assert "\n  note\n    A         absent\n    B         true\n" in text
    assert "\n  versions/corpus\n    A         " in text
    assert run.lines[-1].startswith("0 of ")


def test_cases_in_another_order(diff: Diff) -> None:
    run = diff(lambda _, metadata: metadata["cases"].reverse())

    assert [
        "metadata",
        "  order of cases",
        "    A         y, ar, drafted, from-root",
        "    B         from-root, drafted, ar, y",
    ] == run.lines[:-1]
    assert 1 == run.code


def test_long_texts_are_shown_where_they_part(pair: Callable[..., SimpleNamespace]) -> None:
    run = pair({}, {}, {"why": "x" * 500 + "left"}, {"why": "x" * 500 + "right"})

    assert f'    A         ...{"x" * 20}left"' == run.lines[2]
    assert f'    B         ...{"x" * 20}right"' == run.lines[3]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1}, {"x": True}),
        ({"x": {}}, {}),
        ({"a/b": 1}, {"a": {"b": 1}}),
        ({"cases": [{"alias": "y"}]}, {"cases[]": {"y": {"alias": "y"}}}),
        ({"cases": [{"alias": "y"}]}, {"cases": {"y": {"alias": "y"}}}),
        ({"cases[]": 1}, {"cases[]": 2}),
        ({"cases": [1]}, {"cases": [{"alias": 7}]}),
        ({"cases": None}, {"cases": [{"alias": "y"}, {"alias": "y"}]}),
    ],
)
def test_metadata_that_only_look_alike(
    pair: Callable[..., SimpleNamespace], a: dict[str, Any], b: dict[str, Any]
) -> None:
    assert 1 == pair({}, {}, a, b).code
    assert 0 == pair({}, {}, a, a).code


# Numbers


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_distances_count_numbers_between(pair: Callable[..., SimpleNamespace], dtype: type) -> None:
    a = np.array([1, 1, 0, 2], dtype)
    b = np.nextafter(a, np.array([4, 4, -4, 2], dtype))
    b[1] = np.nextafter(b[1], dtype(4))

    run = pair({"x": a}, {"x": b})

    # from 0 downwards there is -0 first, then the smallest number
    assert "  at        element [0]" == run.lines[2]
    assert run.lines[5].startswith("  distance  1 ulp, at most 2 ulp; largest absolute difference ")
    assert "  in all    3 of 4 elements" == run.lines[6]


@pytest.mark.parametrize(
    ("a", "b", "lines"),
    [
        (0.0, -0.0, ["0.0", "-0.0", "1 ulp, at most 1 ulp; largest absolute difference 0"]),
        (
            1.0,
            np.nan,
            [
                "1.0",
                "nan",
                "none between NaN and others, at most 0 ulp; largest absolute difference 0",
            ],
        ),
        (
            1e308,
            -1e308,
            [
                "1e+308",
                "-1e+308",
                f"{2 * _BITS_1E308 + 1} ulp, at most {2 * _BITS_1E308 + 1} ulp; "
                "largest absolute difference inf",
            ],
        ),
    ],
    ids=["zeros", "nan", "far"],
)
def test_floats_are_compared_bit_for_bit(
    pair: Callable[..., SimpleNamespace], a: float, b: float, lines: list[str]
) -> None:
    run = pair({"x": np.array(a)}, {"x": np.array(b)})

    assert (1, "first difference: tensors") == (run.code, run.lines[0])
    assert [f"  A         {lines[0]}", f"  B         {lines[1]}"] == run.lines[2:4]
    assert f"  distance  {lines[2]}" == run.lines[4]


def test_two_kinds_of_nan(pair: Callable[..., SimpleNamespace]) -> None:
    a, b = (np.array([bits], np.uint64).view(np.float64) for bits in (0x7FF8 << 48, 0x7FF9 << 48))

    run = pair({"x": a}, {"x": b})

    assert "  A         nan (bits 7ff8000000000000)" == run.lines[3]
    assert "  B         nan (bits 7ff9000000000000)" == run.lines[4]
    assert 0 == pair({"x": a}, {"x": a}).code


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, np.int8, np.uint64, np.bool_])
def test_other_dtypes(pair: Callable[..., SimpleNamespace], dtype: type) -> None:
    run = pair({"x": np.array([0, 1, 1], dtype)}, {"x": np.array([0, 1, 0], dtype)})

    assert "  at        element [2]" == run.lines[2]
    assert "  in all    1 of 3 elements" == run.lines[5]


# Hostile files


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("expect/y/round0/moves", (2, 3)),  # three sides
        ("expect/y/round0/layer0/scores", (3,)),
        ("expect/y/round0/layer99999999999999999999/c_kv", (2, 2)),
        ("expect/y/mask", (2, 2)),
        ("expect/y/round0/positions", (9,)),  # more rows than nodes
        ("expect/y/round0/tokens", (3,)),
        ("input/y/round0/parents", (3,)),
        ("expect//round0/mask", (2,)),
        ("config/", (1,)),
    ],
)
@pytest.mark.parametrize("parents", [[-1, 1, 0], [0, 0, 0], [7], []], ids=str)
def test_bundles_of_odd_names_and_shapes(
    pair: Callable[..., SimpleNamespace], name: str, shape: tuple[int, ...], parents: list[int]
) -> None:
    others = {"input/y/round0/parents": np.array(parents, np.int64)}
    a = {**others, name: np.zeros(shape, np.int64)}
    b = {**others, name: np.ones(shape, np.int64)}

    run = pair(a, b)

    assert (1, "") == (run.code, run.err)
    assert f"  tensor    {name}" == run.lines[1]


def test_names_cannot_act_on_the_terminal(pair: Callable[..., SimpleNamespace]) -> None:
    run = pair({"\x1b[2J": np.zeros(2)}, {"\x1b[2J": np.ones(2)}, {"\x9b": 1}, {"\x9b": 2})

    assert [] == [line for line in run.lines if not line.isprintable()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_damaged_file_is_refused(
    kdtr: Kdtr, small: Path, tmp_path: Path, order: tuple[int, int]
) -> None:
    damaged = tmp_path / "damaged.kdtr"
    data = bytearray(small.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    files = (small, damaged)

    run = kdtr("diff", *(files[i] for i in order))

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith(f"kdtr: BundleError: {damaged}: tensor ")
    assert 1 == run.err.count("\n")


def test_the_comparison_as_data(small: Path) -> None:
    with Bundle.open(small) as a, Bundle.open(small) as b:
        found = diff_bundles(a, b)

    assert found.same_bytes
    assert found.same_content
    assert found.first is None
    assert found.n_common > 100
