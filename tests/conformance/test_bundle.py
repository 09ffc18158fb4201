"""A golden bundle with any gap or flaw is refused, by a text that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import GoldenBundle
from kdtr.conformance.case import CasePlan, Planted
from kdtr.contract import BundleError, CaseError, KdtrError, rules_version
from kdtr.kdtr_format import Bundle, write_bundle

Tensors = dict[str, np.ndarray]
Metadata = dict[str, Any]
Rewrite = Callable[[Callable[[Tensors, Metadata], object]], Path]


def refusal(path: Path) -> str:
    with pytest.raises(KdtrError) as refused:
        GoldenBundle.open(path)
    assert isinstance(refused.value, BundleError)
    text = str(refused.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_the_small_bundle_as_it_is(small: Path, rewritten: Rewrite) -> None:
    bundle = GoldenBundle.open(rewritten(lambda tensors, metadata: None))

    assert ("y", "ar", "drafted", "from-root") == tuple(c.inputs.alias for c in bundle.cases)
    assert "small" == bundle.model_name
    assert ["chunk0", "round0", "round1"] == bundle.cases[0].inputs.points()
    assert bundle.cases[0].expectation("round0").get("moves") is not None
    assert bundle.cases[0].expectation("chunk0").get("moves") is None
    bundle.close()


# Expectations

E = "expect/y/round0/"


@pytest.mark.parametrize(
    "name",
    [
        E + "tokens",
        E + "mask",
        E + "layer0/c_kv",
        E + "layer1/expert_ids",
        E + "layer1/expert_gap",
        E + "logits",
        E + "targets",
        E + "moves",
        E + "margin_float32",
        E + "margin_bfloat16",
        E + "cache_k_pe",
        E + "root",
        "expect/y/chunk0/layer1/scores",
        "expect/drafted/round0/build_parents",
        "expect/ar/round1/path",
    ],
)
def test_a_missing_stage(rewritten: Rewrite, name: str) -> None:
    path = rewritten(lambda tensors, _: tensors.pop(name))

    text = refusal(path)

    # without a path nobody knows how far the cache has grown, so sizes are what is noticed first
    assert text.startswith(name if not name.endswith("/path") else "expect/ar/round1/")


def test_the_text_of_a_missing_stage(rewritten: Rewrite) -> None:
    path = rewritten(lambda tensors, _: tensors.pop(E + "mask"))

    assert f"{E}mask is missing; record the bundle again with `kdtr golden`" == refusal(path)


@pytest.mark.parametrize(
    "name",
    [
        E + "surprise",
        E + "layer2/c_kv",
        E + "layer0/expert_ids",  # layer 0 is dense
        E + "untouched",
        "expect/y/round2/tokens",
        "expect/y/chunk0/parents",
        "expect/y/chunk0/path",
        "expect/y/round0/build_tokens",
        "expect/nobody/round0/tokens",
    ],
)
def test_an_extra_tensor(rewritten: Rewrite, name: str) -> None:
    path = rewritten(lambda tensors, _: tensors.update({name: np.zeros(6, np.int64)}))

    text = refusal(path)

    # a path in a prefill is taken at its word for the size of the cache
    if name.endswith("chunk0/path"):
        assert text.startswith("expect/y/")
    else:
        assert f"{name} belongs to no point of any case; record the bundle again" == text


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        (E + "mask", np.ones((4, 9), bool), "is bool [4, 9]; expected int64 or bool [4, 10]"),
        (E + "mask", np.ones((4, 10)), "is float64 [4, 10]; expected int64 or bool [4, 10]"),
        (E + "bonus", np.zeros(1, int), "is int64 [1]; expected int64 or bool []"),
        (E + "targets", np.zeros(3, int), "is int64 [3]; expected int64 or bool [4]"),
        (E + "logits", np.zeros((4, 36)), "is float64 [4, 36]; expected float64 [4, 37]"),
        (E + "logits", np.zeros((4, 37), int), "is int64 [4, 37]; expected float64 [4, 37]"),
        (E + "layer0/c_kv", np.zeros((10, 4)), "is float64 [10, 4]; expected float64 [4, 10]"),
        (E + "layer1/expert_gap", np.zeros((4, 1)), "is float64 [4, 1]; expected float64 [4]"),
        (E + "cache_c_kv", np.zeros((2, 8, 10)), "is float64 [2, 8, 10]; expected float64 [2, 9"),
        (E + "moves", np.zeros((3, 3), int), "is int64 [3, 3]; expected int64 or bool [3, 2]"),
    ],
    ids=map(str, range(10)),
)
def test_a_wrong_shape_or_dtype(
    rewritten: Rewrite, name: str, array: np.ndarray, text: str
) -> None:
    path = rewritten(lambda tensors, _: tensors.update({name: array}))

    assert refusal(path).startswith(f"{name} {text}")


def test_a_truth_in_float32(rewritten: Rewrite) -> None:
    path = rewritten(lambda t, _: t.update({E + "logits": t[E + "logits"].astype(np.float32)}))

    assert refusal(path).startswith(f"{E}logits is float32 [4, 37]; expected float64 [4, 37]")


# Metadata


@pytest.mark.parametrize("kind", ["model", "", None, 5])
def test_another_kind_of_file(rewritten: Rewrite, kind: object) -> None:
    path = rewritten(lambda _, metadata: metadata.update(kind=kind))

    assert f"kind = {kind!r}; expected a golden bundle, as `kdtr golden` writes it" == refusal(path)


def test_no_kind_at_all(tmp_path: Path) -> None:
    write_bundle(tmp_path / "empty.kdtr", {}, {})

    assert refusal(tmp_path / "empty.kdtr").startswith("kind = None; expected a golden bundle")


@pytest.mark.parametrize(
    ("versions", "found"),
    [({"rules": 99}, 99), ({"rules": "1"}, "1"), ({}, None), ([], None), (None, None), (1, None)],
)
def test_other_rules(rewritten: Rewrite, versions: object, found: object) -> None:
    path = rewritten(lambda _, metadata: metadata.update(versions=versions))

    assert (
        f"recorded under rules version {found}, this kdtr has {rules_version()}; record it again "
        "with `kdtr golden`"
    ) == refusal(path)


@pytest.mark.parametrize("model", [None, [], "tiny", {}])
def test_a_model_without_the_sum_of_its_weights(rewritten: Rewrite, model: object) -> None:
    path = rewritten(lambda _, metadata: metadata.update(model=model))

    assert refusal(path).startswith("model.weights_sha256 = None, the weights give ")


def test_a_model_without_a_name_is_no_reason_to_refuse(rewritten: Rewrite) -> None:
    bundle = GoldenBundle.open(rewritten(lambda _, metadata: metadata["model"].pop("name")))

    assert "None" == bundle.model_name
    bundle.close()


def test_other_weights_than_were_recorded(rewritten: Rewrite) -> None:
    def double(tensors: Tensors, metadata: Metadata) -> None:
        tensors["weights/model.norm.weight"] = tensors["weights/model.norm.weight"] * 2

    assert refusal(rewritten(double)).startswith("model.weights_sha256 = ")


@pytest.mark.parametrize(
    "cases",
    [
        None,
        5,
        "y",
        {},
        [None],
        ["y"],
        [5],
        [{}],
        [{"alias": "y"}],
        [{"alias": "y", "id": "0", "rules": 5, "why": ""}],
        [{"alias": "y", "id": "0", "why": ""}],
        [[]],
    ],
    ids=map(str, range(12)),
)
def test_a_malformed_list_of_cases(rewritten: Rewrite, cases: object) -> None:
    path = rewritten(lambda _, metadata: metadata.update(cases=cases))

    text = refusal(path)

    assert text.startswith(("cases = ", "a case in the metadata "))
    assert "; expected a" in text


def test_no_list_of_cases(rewritten: Rewrite) -> None:
    path = rewritten(lambda _, metadata: metadata.pop("cases"))

    assert "cases = None; expected a list of cases" == refusal(path)


def test_a_case_that_is_not_recorded(rewritten: Rewrite) -> None:
    def rename(tensors: Tensors, metadata: Metadata) -> None:
        metadata["cases"][0]["alias"] = "z"

    assert "input/z/max_len is missing; expected a number of slots" == refusal(rewritten(rename))


def test_no_cases_at_all(kdtr: Callable[..., SimpleNamespace], rewritten: Rewrite) -> None:
    def empty(tensors: Tensors, metadata: Metadata) -> None:
        metadata["cases"] = []
        for name in [name for name in tensors if name.startswith(("expect/", "input/"))]:
            del tensors[name]

    run = kdtr("gate", rewritten(empty), "--engine", "host")

    assert (2, "") == (run.code, run.out)
    assert "cases = []; expected a list of cases" in run.err


# Inputs


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        (
            "round0/parents",
            [-1, 0, 3, 2],
            "input/y/round0/: parents[2] = 3, but a parent precedes its child; expected 0 <= "
            "parents[2] <= 1",
        ),
        ("round0/parents", [0, 0, 0, 2], "input/y/round0/: parents[0] = 0, but node 0 is the root"),
        ("round0/parents", [-1, 0], "input/y/round0/: the tree has 4 tokens and 2 parents"),
        ("round0/tokens", [1.0, 2.0], "input/y/round0/tokens is float64 [2]; expected int64 [n]"),
        ("round0/tokens", [[1, 2]], "input/y/round0/tokens is int64 [1, 2]; expected int64 [n]"),
        ("chunk0/tokens", 5, "input/y/chunk0/tokens is int64 []; expected int64 [n]"),
    ],
    ids=map(str, range(6)),
)
def test_a_bad_tree_or_prompt(rewritten: Rewrite, name: str, array: Any, text: str) -> None:
    path = rewritten(lambda tensors, _: tensors.update({f"input/y/{name}": np.array(array)}))

    assert refusal(path).startswith(text)


def test_no_capacity(rewritten: Rewrite) -> None:
    path = rewritten(lambda tensors, _: tensors.pop("input/y/max_len"))

    assert "input/y/max_len is missing; expected a number of slots" == refusal(path)


def test_a_capacity_of_several(rewritten: Rewrite) -> None:
    path = rewritten(lambda tensors, _: tensors.update({"input/y/max_len": np.array([1, 2])}))

    assert "input/y/max_len is int64 [2]; expected int64 []" == refusal(path)


def test_a_round_taken_away_is_another_case(rewritten: Rewrite) -> None:
    def cut(tensors: Tensors, metadata: Metadata) -> None:
        del tensors["input/y/round1/tokens"], tensors["input/y/round1/parents"]

    text = refusal(rewritten(cut))

    assert text.startswith("case y has id ")
    assert ", its weights and questions give " in text


def test_a_question_that_is_none(rewritten: Rewrite) -> None:
    path = rewritten(lambda tensors, _: tensors.update({"input/y/round0/odd": np.zeros(1)}))

    assert "input/y/round0/odd belongs to no question of the case; remove it" == refusal(path)


# Model


def test_no_model(rewritten: Rewrite) -> None:
    def strip(tensors: Tensors, metadata: Metadata) -> None:
        for name in [name for name in tensors if name.startswith("config/")]:
            del tensors[name]

    with pytest.raises(BundleError, match=r"the bundle holds no config/\.\.\. tensors"):
        GoldenBundle.open(rewritten(strip))


def test_a_flipped_bit_is_found_before_any_engine_runs(small: Path, tmp_path: Path) -> None:
    with Bundle.open(small) as bundle:
        entry = next(one for one in bundle.entries if one.name == E + "logits")
    data = bytearray(small.read_bytes())
    data[entry.offset] ^= 1
    path = tmp_path / "flipped.kdtr"
    path.write_bytes(data)

    assert refusal(path).startswith(f"tensor '{E}logits' has checksum ")


def test_the_plan_is_checked_where_it_is_made() -> None:
    def text(**changes: Any) -> str:
        plan = {"alias": "a", "why": "", "rules": (), "rounds": (Planted((-1,)),)}
        with pytest.raises(CaseError) as refused:
            CasePlan(**{**plan, **changes})
        return str(refused.value)

    assert "alias = ''; expected letters, digits and dashes" == text(alias="", root=1)
    assert "alias = 'a/b'; expected letters, digits and dashes" == text(alias="a/b", root=1)
    assert f"alias {'a' * 33!r} has 33 characters; at most 32" == text(alias="a" * 33, root=1)
    assert (
        "case a: 0 prompt chunks and root = None; expected a prompt or a root, and not both"
    ) == text()
    assert text(chunks=((1,),), root=1).startswith("case a: 1 prompt chunks and root = 1; ")
    assert "case a: a prompt chunk is empty; expected token ids" == text(chunks=((1,), ()))
    assert "case a has no rounds; expected at least one" == text(rounds=(), root=1)
