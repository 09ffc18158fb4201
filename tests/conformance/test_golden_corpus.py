"""The committed corpus: its bytes, its size, and what its cases are there to show."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import GoldenBundle
from kdtr.conformance.bundle import GoldenCase
from kdtr.conformance.corpus_models import corpus_models
from kdtr.conformance.golden_corpus import SUMS, _record, read_sums
from kdtr.contract import BundleError, DraftTree, rules
from kdtr.kdtr_format import Bundle

MODELS = {entry.model.name: entry for entry in corpus_models()}
FIRM = [name for name, entry in MODELS.items() if not entry.thin]
CORPUS = Path(__file__).resolve().parents[2] / "conformance" / "corpus"
LIMIT = 16 * 2**20  # bytes of the repository


@cache
def opened(name: str) -> GoldenBundle:
    return GoldenBundle.open(CORPUS / f"{name}.kdtr")


@cache
def entries(name: str) -> dict[str, Any]:
    """The metadata of each case."""
    with Bundle.open(CORPUS / f"{name}.kdtr") as bundle:
        return {entry["alias"]: entry for entry in bundle.metadata["cases"]}


def points(case: GoldenCase, stage: str) -> list[np.ndarray]:
    found = [case.expectation(point).get(stage) for point in case.inputs.points()]
    return [array for array in found if array is not None]


def rounds(names: list[str]) -> Iterator[tuple[GoldenCase, int, DraftTree, tuple[int, ...]]]:
    """Every round of some models: case, number, tree, accepted path."""
    for name in names:
        for case in opened(name).cases:
            for i, entry in enumerate(case.inputs.rounds):
                path = case.expectation(f"round{i}").get("path")
                assert path is not None
                yield case, i, entry.tree, tuple(path.tolist())


# Files


def test_the_sums_are_those_of_the_files() -> None:
    sums = read_sums(CORPUS)
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in CORPUS.glob("*.kdtr")}

    tiny = sums.pop("tiny.kdtr")  # too large to keep
    assert files == sums
    assert 64 == len(tiny)
    assert {f"{name}.kdtr" for name in MODELS} == set(files)
    assert {*files, SUMS} == {p.name for p in CORPUS.iterdir()}


def test_the_corpus_is_small() -> None:
    assert sum(p.stat().st_size for p in CORPUS.iterdir()) < LIMIT


def test_a_directory_without_sums(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such file; record the corpus with `make golden`"):
        read_sums(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_every_bundle_is_its_model_with_its_cases(name: str) -> None:
    bundle, entry = opened(name), MODELS[name]

    assert name == bundle.model_name
    assert entry.model.config == bundle.config
    assert [t.alias for t in entry.templates] == [case.inputs.alias for case in bundle.cases]
    assert [t.level for t in entry.templates] == [case.inputs.level for case in bundle.cases]


@pytest.mark.parametrize("name", ["raw-weights", "negative-logits"])
def test_a_fresh_recording_gives_the_committed_bytes(name: str, tmp_path: Path) -> None:
    fresh = tmp_path / f"{name}.kdtr"

    sha256 = _record(fresh, MODELS[name], lambda _: None)

    assert fresh.read_bytes() == (CORPUS / f"{name}.kdtr").read_bytes()
    assert read_sums(CORPUS)[f"{name}.kdtr"] == sha256


# What the cases show


@pytest.mark.parametrize("name", MODELS)
def test_every_rule_that_is_cited_exists(name: str) -> None:
    for alias, entry in entries(name).items():
        assert entry["rules"], alias
        assert set(entry["rules"]) <= set(rules()), alias


@pytest.mark.parametrize("name", MODELS)
def test_decisions_are_thin_in_the_precisions_that_the_model_says_and_no_other(name: str) -> None:
    meant = set(MODELS[name].thin)

    for alias, entry in entries(name).items():
        assert meant == {precision for precision, n in entry["thin"].items() if n > 0}, alias


@pytest.mark.parametrize("name", MODELS)
def test_two_rounds_or_more(name: str) -> None:
    for case in opened(name).cases:
        assert len(case.inputs.rounds) >= 2, case.inputs.alias


@pytest.mark.parametrize("name", MODELS)
def test_some_first_round_rejects_nodes(name: str) -> None:
    """What is left behind must not matter in the rounds that follow."""
    rejects = [len(path) < len(tree) for _, i, tree, path in rounds([name]) if i == 0]

    assert any(rejects)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "expert-ties"])
def test_some_accepted_path_is_no_prefix_of_the_nodes(name: str) -> None:
    assert any(path != tuple(range(len(path))) for _, _, _, path in rounds([name]))


def test_the_accepted_sibling_is_first_and_last_somewhere() -> None:
    places = set()
    for _, _, tree, path in rounds(FIRM):
        for above, node in pairwise(path):
            siblings = [i for i, parent in enumerate(tree.parents) if parent == above]
            if len(siblings) > 1:
                places |= {"first"} if node == siblings[0] else set()
                places |= {"last"} if node == siblings[-1] else set()

    assert {"first", "last"} == places


def test_token_0_and_the_last_id_are_prompt_and_tree() -> None:
    base = opened("base")
    last = base.config.vocab_size - 1
    prompts = {t for case in base.cases for chunk in case.inputs.chunks for t in chunk}
    drafts = {t for _, _, tree, _ in rounds(["base"]) for t in tree.tokens[1:]}

    assert {0, last} <= prompts
    assert {0, last} <= drafts


def test_exact_ties_of_tokens_on_accepted_rows() -> None:
    """ACC-1: the lowest id is the target."""
    tied = 0
    for case in opened("token-ties").cases:
        for i in range(len(case.inputs.rounds)):
            at = case.expectation(f"round{i}")
            logits, targets, path = at.get("logits"), at.get("targets"), at.get("path")
            assert logits is not None
            assert targets is not None
            assert path is not None
            assert logits.argmax(axis=1).tolist() == targets.tolist()
            top = logits[path] == logits[path].max(axis=1, keepdims=True)
            tied += int((top.sum(axis=1) > 1).sum())

    assert tied > 10


def test_exact_ties_of_experts_choose_the_lowest_ids() -> None:
    bundle = opened("expert-ties")
    config = bundle.config
    for case in bundle.cases:
        for point in case.inputs.points():
            for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
                scores = case.expectation(point).get("router_scores", layer)
                ids = case.expectation(point).get("expert_ids", layer)
                assert scores is not None
                assert ids is not None
                assert (scores == scores[:, :1]).all()
                assert (case.expectation(point).expert_gap(layer) == 0).all()


def test_all_logits_are_negative_where_they_are_said_to_be() -> None:
    """A maximum that starts at 0 finds none."""
    for case in opened("negative-logits").cases:
        for logits in points(case, "logits"):
            assert logits.max() < 0


def test_trees_of_more_than_two_words_of_ancestors_over_long_histories() -> None:
    sizes = {len(tree) for _, _, tree, _ in rounds(["base"])}

    assert {65, 129} <= sizes
    assert max(case.inputs.max_len for case in opened("base").cases) > 200


def test_limits_are_kept_and_cut() -> None:
    (case,) = (one for one in opened("base").cases if "limits" == one.inputs.alias)
    limits = [entry.limit for entry in case.inputs.rounds]
    paths = points(case, "path")
    emitted = points(case, "emitted")

    assert 2 == limits[0].max_emitted == len(emitted[0])
    for limit, tokens in zip(limits[1:], emitted[1:], strict=True):
        assert int(tokens[-1]) in limit.stop_tokens
    assert [2, 1, 2] == [len(path) for path in paths]


def test_near_ties_are_thinner_than_float32_tells_apart() -> None:
    """Twins of the head whose logits differ, but by less than any float32 engine can say."""
    for case in opened("near-ties").cases:
        for logits in points(case, "logits"):
            best = np.sort(logits, axis=1)
            gap = best[:, -1] - best[:, -2]
            thin = gap < 1e-5
            assert (gap[thin] > 0).all()
        margins = np.concatenate(points(case, "margin_float32"))
        assert (margins < 1).any()
