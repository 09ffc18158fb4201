"""A golden bundle whose answers contradict each other is refused when it is opened.

Every checksum is right: what is planted is what a faulty recorder, or a hand, would write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import GoldenBundle
from kdtr.conformance.case import CaseInput, CasePlan, Planted, RoundInput
from kdtr.conformance.host_array import Numbers
from kdtr.contract import BundleError, DraftTree
from kdtr.kdtr_format import Bundle, write_bundle

Tensors = dict[str, np.ndarray]
Metadata = dict[str, Any]
Rewrite = Callable[[Callable[[Tensors, Metadata], object]], Path]

E = "expect/y/round0/"  # a Y after a prompt of 6: parents -1, 0, 0, 2; 0, 2 and 3 are accepted
C = "expect/y/chunk0/"
TO_DO = "; no engine can meet both: record the bundle again with `kdtr golden`, or do not trust it"


def refusal(path: Path) -> str:
    with pytest.raises(BundleError) as refused:
        GoldenBundle.open(path)
    text = str(refused.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def contradiction(path: Path) -> str:
    text = refusal(path)
    assert text.endswith(TO_DO)
    return text.removesuffix(TO_DO)


def other(token: Any) -> int:
    """Another token of the small model."""
    return (int(token) + 1) % 37


@pytest.mark.parametrize(
    ("name", "at", "value", "text"),
    [
        ("positions", 3, 9, "positions[3] = 9, but by the tree at L = 6 it is 8 (POS-1)"),
        ("slots", 2, 9, "slots[2] = 9, but by the tree at L = 6 it is 8 (SLOT-1)"),
        (
            "mask",
            (2, 8),
            False,
            "mask[2, 8] = False, but by the tree at L = 6 it is True (MASK-1, MASK-2)",
        ),
        (
            "mask",
            (3, 7),
            True,
            "mask[3, 7] = True, but by the tree at L = 6 it is False (MASK-1, MASK-2)",
        ),
        (
            "mask",
            (0, 0),
            False,
            "mask[0, 0] = False, but by the tree at L = 6 it is True (MASK-1, MASK-2)",
        ),
        ("moves", (1, 0), 7, "moves[1, 0] = 7, but by path at L = 6 it is 8 (COMMIT-1)"),
        ("committed_len", (), 8, "committed_len = 8, but by 3 rows more than 6 it is 9 (COMMIT-2)"),
        (
            "cache_positions",
            7,
            8,
            "cache_positions[7] = 8, but by the positions that were committed it is 7 (COMMIT-3)",
        ),
    ],
)
def test_an_index_that_does_not_follow(
    rewritten: Rewrite, name: str, at: Any, value: Any, text: str
) -> None:
    def plant(tensors: Tensors, _: Metadata) -> None:
        tensors[E + name][at] = value
        if name == "slots":
            tensors[E + name][3] = 8

    assert f"case y, round0: {text}" == contradiction(rewritten(plant))


@pytest.mark.parametrize(
    ("name", "at", "by", "rule"),
    [
        ("targets", 1, "logits (of the highest the lowest id)", "ACC-1"),
        ("bonus", (), "the walk over targets", "ACC-2"),
        ("emitted", 1, "path and bonus", "ACC-3"),
        ("root", (), "bonus", "COMMIT-2"),
        ("cache_tokens", 2, "the tokens that were committed", "COMMIT-3"),
        ("cache_tokens", 8, "the tokens that were committed", "COMMIT-3"),
    ],
)
def test_a_token_that_does_not_follow(
    rewritten: Rewrite, name: str, at: Any, by: str, rule: str
) -> None:
    right = []

    def plant(tensors: Tensors, _: Metadata) -> None:
        right.append(int(tensors[E + name][at]))
        tensors[E + name][at] = other(right[0])

    path = rewritten(plant)

    place = "" if at == () else f"[{at}]"
    assert (
        f"case y, round0: {name}{place} = {other(right[0])}, but by {by} it is {right[0]} ({rule})"
    ) == contradiction(path)


def test_a_prompt_is_held_to_the_same(rewritten: Rewrite) -> None:
    def position(tensors: Tensors, _: Metadata) -> None:
        tensors[C + "positions"][2] = 3

    def mask(tensors: Tensors, _: Metadata) -> None:
        tensors[C + "mask"][2, 3] = True

    def root(tensors: Tensors, _: Metadata) -> None:
        best = int(tensors[C + "logits"][-1].argmax())
        tensors[C + "logits"][-1, other(best)] = tensors[C + "logits"][-1].max() + 1

    assert (
        "case y, chunk0: positions[2] = 3, but by the prompt at L = 0 it is 2 (FWD-1)"
    ) == contradiction(rewritten(position))
    assert (
        "case y, chunk0: mask[2, 3] = True, but by the prompt at L = 0 it is False (FWD-1)"
    ) == contradiction(rewritten(mask))
    text = contradiction(rewritten(root))
    assert text.startswith("case y, chunk0: root = ")
    assert ", but by the last row of logits (of the highest the lowest id) it is " in text


def test_targets_that_are_no_argmax_of_their_logits(rewritten: Rewrite) -> None:
    """The lie may lie in the logits, too."""
    found = []

    def plant(tensors: Tensors, _: Metadata) -> None:
        found.append(int(tensors[E + "targets"][2]))
        tensors[E + "logits"][2, other(found[0])] = tensors[E + "logits"][2].max() + 1

    path = rewritten(plant)

    assert (
        f"case y, round0: targets[2] = {found[0]}, but by logits (of the highest the lowest id) it "
        f"is {other(found[0])} (ACC-1)"
    ) == contradiction(path)


def test_of_tied_logits_the_higher_id_is_no_target(rewritten: Rewrite) -> None:
    """ACC-1 leaves no choice, and so a tie has one truth: near ties are an engine's (NUM-2)."""

    def tie(tensors: Tensors, _: Metadata) -> None:
        row = tensors[E + "logits"][1]
        low, high = sorted((int(row.argmax()), other(row.argmax())))
        row[[low, high]] = row.max()
        tensors[E + "targets"][1] = high

    text = contradiction(rewritten(tie))

    assert text.startswith("case y, round0: targets[1] = ")
    assert text.endswith(" (ACC-1)")


def longer_path(tensors: Tensors, _: Metadata) -> None:
    """Round 1 of `y` accepts its root alone; here node 1 too, in arrays of fitting shapes."""
    at = "expect/y/round1/"
    tensors[at + "path"] = np.array([0, 1])
    for name in ("emitted", "moves", "cache_tokens", "cache_positions"):
        old = tensors[at + name]
        tensors[at + name] = np.concatenate([old, old[-1:]])
    for name in ("cache_c_kv", "cache_k_pe"):
        old = tensors[at + name]
        tensors[at + name] = np.concatenate([old, old[:, -1:]], axis=1)


def test_a_path_that_is_not_the_walk_over_its_targets(rewritten: Rewrite) -> None:
    assert (
        "case y, round1: path = [0, 1], but by the walk over targets it is [0] (ACC-1)"
    ) == contradiction(rewritten(longer_path))


@pytest.mark.parametrize("limit", [{"max_emitted": 2}, {"stop_at": 1}])
def test_a_walk_that_goes_on_past_its_limit(
    record: Callable[..., Path], tmp_path: Path, limit: dict[str, int]
) -> None:
    plan = Planted((-1, 0, 1), (0, 1, 2), **limit)
    with Bundle.open(record([CasePlan("cut", "", ("ACC-4",), (plan,), ((3, 5),))])) as bundle:
        tensors = {name: np.array(bundle[name]) for name in bundle}
        assert [0, 1] == tensors["expect/cut/round0/path"].tolist()
        right = int(tensors["expect/cut/round0/bonus"])
        tensors["expect/cut/round0/bonus"] = np.array(other(right))
        write_bundle(tmp_path / "cut.kdtr", tensors, bundle.metadata)

    assert (
        f"case cut, round0: bonus = {other(right)}, but by the walk over targets up to the round's "
        f"limit it is {right} (ACC-4)"
    ) == contradiction(tmp_path / "cut.kdtr")


@pytest.mark.parametrize("name", ["cache_c_kv", "cache_k_pe"])
def test_cached_rows_that_are_not_those_that_were_computed(rewritten: Rewrite, name: str) -> None:
    computed = name.removeprefix("cache_")

    def moved(tensors: Tensors, _: Metadata) -> None:  # slot 7 keeps row 1, the rejected sibling
        tensors[E + name][1, 7] = tensors[E + f"layer1/{computed}"][1]

    def older(tensors: Tensors, _: Metadata) -> None:
        tensors[E + name][0, 2, 0] += 0.5

    for plant, at in ((moved, "[1, 7, "), (older, "[0, 2, 0]")):
        text = contradiction(rewritten(plant))

        assert text.startswith(f"case y, round0: {name}{at}")
        assert f", but by the rows of {computed} that were committed it is " in text
        assert text.endswith(" (COMMIT-1)")


def test_scores_under_another_mask(rewritten: Rewrite) -> None:
    def seen(tensors: Tensors, _: Metadata) -> None:
        tensors[E + "layer1/scores"][3, 2, 7] = 0.25

    def unseen(tensors: Tensors, _: Metadata) -> None:
        tensors[E + "layer0/scores"][3, 2, 8] = -np.inf

    assert (
        "case y, round0: layer1/scores[3, 2, 7] = 0.25, but by mask[3, 7] = False it is -inf "
        "(MASK-2)"
    ) == contradiction(rewritten(seen))
    assert (
        "case y, round0: layer0/scores[3, 2, 8] = -inf, but by mask[3, 8] = True it is finite "
        "(MASK-2)"
    ) == contradiction(rewritten(unseen))


def test_an_embedding_of_another_token(rewritten: Rewrite) -> None:
    def plant(tensors: Tensors, _: Metadata) -> None:
        tensors[E + "embedding"][1] = tensors[E + "embedding"][2]

    text = contradiction(rewritten(plant))

    assert text.startswith("case y, round0: embedding[1, ")
    assert ", but by tokens and the model's embed_tokens it is " in text


def test_no_integer_of_a_record_can_be_another(small: Path, tmp_path: Path) -> None:
    """Every integer and every bool of a record follows from something: the first, and the last."""
    with Bundle.open(small) as bundle:
        tensors = {name: np.array(bundle[name]) for name in bundle}
        metadata = bundle.metadata
    of = ("expect/y/", "expect/drafted/")
    exact = [n for n, a in tensors.items() if n.startswith(of) and a.dtype.kind in "ib"]
    unseen = []
    for name in exact:
        for place in (0, -1):
            right = tensors[name]
            tensors[name] = wrong = right.copy()
            wrong.flat[place] = (
                not right.flat[place] if wrong.dtype == bool else right.flat[place] ^ 1
            )
            write_bundle(tmp_path / "one.kdtr", tensors, metadata)
            tensors[name] = right
            try:
                GoldenBundle.open(tmp_path / "one.kdtr").close()
                unseen.append((name, place))
            except BundleError:
                pass

    assert len(exact) > 60
    assert [] == unseen


# Experts, and how firm decisions are


def test_experts_that_the_scores_do_not_choose(rewritten: Rewrite) -> None:
    def plant(tensors: Tensors, _: Metadata) -> None:
        ids = tensors[E + "layer1/expert_ids"][2]
        ids[:] = sorted({*range(8)} - {*ids.tolist()})[:3]

    text = contradiction(rewritten(plant))

    assert text.startswith("case y, round0: layer1/expert_ids[2, ")
    assert ", but by layer1/router_scores and the correction bias it is " in text
    assert text.endswith(" (MOE-2)")


def test_scores_at_the_end_of_the_range_are_refused_without_a_warning(rewritten: Rewrite) -> None:
    def plant(tensors: Tensors, _: Metadata) -> None:
        tensors[E + "layer1/router_scores"][2] = 1.7e308

    assert "case y, round0: layer1/expert_" in contradiction(rewritten(plant))


@pytest.mark.parametrize("gap", [np.inf, 0.0, 1.5])
def test_a_gap_that_is_not_that_of_the_scores(rewritten: Rewrite, gap: float) -> None:
    right = []

    def plant(tensors: Tensors, _: Metadata) -> None:
        right.append(float(tensors[E + "layer1/expert_gap"][3]))
        tensors[E + "layer1/expert_gap"][3] = gap

    path = rewritten(plant)

    assert (
        f"case y, round0: layer1/expert_gap[3] = {gap}, but by layer1/router_scores and the "
        f"correction bias it is {right[0]} (MOE-2)"
    ) == contradiction(path)


@pytest.mark.parametrize("name", ["margin_float32", "margin_bfloat16", "layer1/expert_gap"])
@pytest.mark.parametrize("value", [np.nan, -0.5, -np.inf])
def test_a_gap_below_0_or_none(rewritten: Rewrite, name: str, value: float) -> None:
    def plant(tensors: Tensors, _: Metadata) -> None:
        tensors[E + name][2] = value

    assert (
        f"{E}{name}[2] = {value:.6g}; expected at least 0, or inf where nothing is decided; record "
        "the bundle again"
    ) == refusal(rewritten(plant))


@pytest.mark.parametrize("name", ["margin_float32", "margin_bfloat16"])
@pytest.mark.parametrize("value", [np.inf, 0.0])
def test_a_margin_that_the_gaps_do_not_allow(rewritten: Rewrite, name: str, value: float) -> None:
    def plant(tensors: Tensors, _: Metadata) -> None:
        tensors[E + name][1] = value

    text = contradiction(rewritten(plant))

    assert text.startswith(f"case y, round0: {name}[1] = {value:.6g}, but by ")
    assert text.endswith(" it is finite, above 0 (NUM-2)")


def test_what_a_margin_is_of(record: Callable[..., Path], small_model: SimpleNamespace) -> None:
    """Without a router, a token decides, and of a prompt the last row's alone."""
    config = small_model.config.replace(first_k_dense_replace=2)
    path = record([CasePlan("one", "dense", (), (Planted((-1,)),), ((1, 2, 3),))], config)
    with Bundle.open(path) as bundle:
        tensors = {name: np.array(bundle[name]) for name in bundle}
        metadata = bundle.metadata
    margin = tensors["expect/one/chunk0/margin_float32"]
    ordered = np.sort(tensors["expect/one/chunk0/logits"][2])
    for row, value, of in (
        (0, 5.0, "a row that chooses neither a token nor experts it is inf"),
        (
            2,
            np.inf,
            f"logits[2], whose two best are {ordered[-1] - ordered[-2]:.3g} apart, it is finite, "
            "above 0",
        ),
    ):
        kept, margin[row] = margin[row], value
        write_bundle(path.with_name("other.kdtr"), tensors, metadata)
        margin[row] = kept

        assert (
            f"case one, chunk0: margin_float32[{row}] = {value:.6g}, but by {of} (NUM-2)"
        ) == contradiction(path.with_name("other.kdtr"))


def test_an_exact_tie_has_a_margin_of_0(corpus: Path, tmp_path: Path) -> None:
    with Bundle.open(corpus / "token-ties.kdtr") as bundle:
        tensors = {name: np.array(bundle[name]) for name in bundle}
        metadata = bundle.metadata
    names = [n for n in tensors if n.endswith("/margin_float32") and "/round" in n]
    name = next(n for n in names if (tensors[n] == 0).any())
    row = int((tensors[name] == 0).argmax())
    tensors[name][row] = 3.0
    write_bundle(tmp_path / "ties.kdtr", tensors, metadata)

    text = contradiction(tmp_path / "ties.kdtr")

    assert f": margin_float32[{row}] = 3, but by logits[{row}], whose two best are 0 apart" in text
    assert text.endswith(", it is 0 (NUM-2)")


def test_thin_rows_that_are_counted_otherwise(rewritten: Rewrite) -> None:
    def plant(_: Tensors, metadata: Metadata) -> None:
        metadata["cases"][0]["thin"] = {"bfloat16": 0, "float32": 99}

    text = contradiction(rewritten(plant))

    assert text.startswith(
        "case y, metadata: thin = {'bfloat16': 0, 'float32': 99}, but by the margins it is "
    )


# The question


def asked_otherwise(
    small: Path, tmp_path: Path, alias: str, change: Callable[[CaseInput], CaseInput]
) -> Path:
    """The small bundle with another question in one case, whose id is that question's."""
    golden = GoldenBundle.open(small)
    case = next(case.inputs for case in golden.cases if case.inputs.alias == alias)
    changed, identity = change(case), golden.weights_sha256
    golden.close()
    with Bundle.open(small) as bundle:
        tensors = {name: np.array(bundle[name]) for name in bundle}
        metadata = {**bundle.metadata, "cases": [dict(c) for c in bundle.metadata["cases"]]}
    tensors.update({f"input/{alias}/{name}": a for name, a in changed.tensors().items()})
    entry = next(entry for entry in metadata["cases"] if entry["alias"] == alias)
    entry["id"] = changed.content_id(identity)
    path = tmp_path / "asked.kdtr"
    write_bundle(path, tensors, metadata)
    return path


def test_a_tree_whose_root_is_not_the_session_s(small: Path, tmp_path: Path) -> None:
    golden = GoldenBundle.open(small)
    root = golden.cases[0].inputs.rounds[1].tree.tokens[0]

    def reroot(case: CaseInput) -> CaseInput:
        first, second = case.rounds
        tokens = (other(root), *second.tree.tokens[1:])
        return replace(case, rounds=(first, RoundInput(DraftTree(tokens, second.tree.parents))))

    path = asked_otherwise(small, tmp_path, "y", reroot)
    with Bundle.open(path) as bundle:
        tensors = {name: np.array(bundle[name]) for name in bundle}
        metadata = bundle.metadata
    tensors["expect/y/round1/tokens"] = tensors["input/y/round1/tokens"]
    write_bundle(path, tensors, metadata)

    assert (
        f"case y, round1: the tree's root is token {other(root)}, but by the root of round0 it is "
        f"{root} (FWD-3)"
    ) == contradiction(path)


def test_a_root_that_is_set_and_not_the_first_tree_s(small: Path, tmp_path: Path) -> None:
    path = asked_otherwise(small, tmp_path, "from-root", lambda case: replace(case, root=6))

    assert (
        "case from-root, round0: the tree's root is token 5, but by the root of input it is 6 "
        "(FWD-3)"
    ) == contradiction(path)


@pytest.mark.parametrize("less", [1, -1])
def test_a_capacity_that_is_not_what_the_case_needs(small: Path, tmp_path: Path, less: int) -> None:
    """One slot less, and an engine has to refuse; one more, and a fault at the edge is hidden."""
    path = asked_otherwise(
        small, tmp_path, "y", lambda case: replace(case, max_len=case.max_len - less)
    )

    assert (
        f"case y, input: max_len = {13 - less}, but by the rows of its points it is 13 (SLOT-3)"
    ) == contradiction(path)


@pytest.mark.parametrize("name", ["parents", "tokens"])
def test_a_built_tree_that_is_not_the_one_to_verify(rewritten: Rewrite, name: str) -> None:
    def plant(tensors: Tensors, _: Metadata) -> None:
        built = tensors[f"expect/drafted/round0/build_{name}"]
        built[-1] = 0 if name == "parents" else other(built[-1])

    text = contradiction(rewritten(plant))

    assert text.startswith(f"case drafted, round0: build_{name}[5] = ")
    assert f", but by input {name} it is " in text


def test_a_tree_that_is_not_the_best_first_one(small: Path, tmp_path: Path) -> None:
    """The tree of another budget; what is recorded of it may stay."""

    def smaller(case: CaseInput) -> CaseInput:
        (entry,) = case.rounds
        return replace(case, rounds=(replace(entry, budget=4),))

    path = asked_otherwise(small, tmp_path, "drafted", smaller)

    assert (
        "case drafted, round0: the tree has 5 nodes besides the root, but the budget is 4 (TREE-3)"
    ) == contradiction(path)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("budget", lambda a: a * 0 - 1, "budget = -1; expected at least 0"),
        (
            "draft_logits",
            lambda a: np.where(np.arange(37) == 4, np.nan, a),
            "draft_logits[0, 4] = nan; expected a finite number or -inf",
        ),
        (
            "draft_logits",
            lambda a: np.where(np.arange(37) == 4, np.inf, a),
            "draft_logits[0, 4] = inf; expected a finite number or -inf",
        ),
        (
            "draft_logits",
            lambda a: np.zeros(a.shape, np.int64),
            f"draft_logits is int64; expected {Numbers.FLOATING.value}",
        ),
    ],
)
def test_drafts_that_a_build_must_refuse(
    rewritten: Rewrite, name: str, change: Callable[[np.ndarray], np.ndarray], text: str
) -> None:
    at = "input/drafted/round0/"
    path = rewritten(lambda tensors, _: tensors.update({at + name: change(tensors[at + name])}))

    assert f"{at}{text}" == refusal(path)


def test_a_budget_that_no_drafts_fill_needs_its_slots(record: Callable[..., Path]) -> None:
    """A build is refused by its budget, so the recorder opens the session with room for it."""
    round_ = RoundInput(DraftTree((5,), (-1,)), np.empty((0, 37), np.float32), budget=4)

    golden = GoldenBundle.open(record([CasePlan("none", "", ("SLOT-3",), (round_,), root=5)]))

    assert 5 == golden.cases[0].inputs.max_len
    golden.close()


# As a user meets it


def test_the_gate_refuses_before_it_asks_an_engine(
    kdtr: Callable[..., SimpleNamespace], rewritten: Rewrite, small: Path
) -> None:
    path = rewritten(longer_path)

    run = kdtr("gate", small, path, "--engine", "host")

    assert (2, "") == (run.code, run.out)
    assert (
        f"{path}: case y, round1: path = [0, 1], but by the walk over targets it is [0] (ACC-1)"
        f"{TO_DO}\n"
    ) in run.err
