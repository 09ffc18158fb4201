"""What a scenario must have so that a real fault cannot hide in it, as facts of the corpus.

Each rule says what hides a fault: a path that is a prefix of the node list, a single round, an
argmax without a tie, a configuration whose sizes are alike. Facts are read from the recorded
bundles, so a case that loses one on the next recording fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance import load_engine
from kdtr.conformance.bundle import Expectation, GoldenBundle, GoldenCase
from kdtr.conformance.case_index import Point, case_points, stage
from kdtr.conformance.quick_corpus import shipped_corpus
from kdtr.contract import DraftTree, ModelConfig

# Decisions are thin there on purpose.
THIN = ("token-ties", "expert-ties", "near-ties", "close-logits")


@dataclass(frozen=True, slots=True)
class RoundFact:
    """A round of the corpus: its place, its tree and what was accepted."""

    bundle: str
    case: str
    point: Point
    tree: DraftTree
    found: Expectation
    is_first: bool

    @property
    def path(self) -> tuple[int, ...]:
        assert self.point.path is not None
        return self.point.path

    @property
    def rejects(self) -> bool:
        return len(self.path) < len(self.tree)


@pytest.fixture(scope="module")
def bundles() -> Iterator[dict[str, GoldenBundle]]:
    opened = {Path(path).stem: GoldenBundle.open(path) for path in shipped_corpus()}
    yield opened
    for bundle in opened.values():
        bundle.close()


def _facts(bundle: GoldenBundle, case: GoldenCase) -> Iterator[RoundFact]:
    rounds = [point for point in case_points(case) if point.kind == "round"]
    for number, (point, entry) in enumerate(zip(rounds, case.inputs.rounds, strict=True)):
        found = case.expectation(point.name)
        yield RoundFact(bundle.path.stem, case.inputs.alias, point, entry.tree, found, number == 0)


@pytest.fixture(scope="module")
def rounds(bundles: dict[str, GoldenBundle]) -> list[RoundFact]:
    """Of every case of the corpus, in order."""
    return [
        fact
        for bundle in bundles.values()
        for case in bundle.cases
        for fact in _facts(bundle, case)
    ]


# Trees and paths


def _is_prefix(path: tuple[int, ...]) -> bool:
    return path == tuple(range(len(path)))


def test_every_model_accepts_paths_that_are_no_prefix_of_the_nodes(
    rounds: list[RoundFact], bundles: dict[str, GoldenBundle]
) -> None:
    """Where the path is a prefix, no row moves, and a commit without compaction is right."""
    moving = {fact.bundle for fact in rounds if not _is_prefix(fact.path)}

    assert set(bundles) == moving


def _ranks(fact: RoundFact) -> Iterator[tuple[int, int]]:
    """Of every accepted draft its place among its siblings, and how many they are."""
    for node in fact.path[1:]:
        siblings = [i for i, p in enumerate(fact.tree.parents) if p == fact.tree.parents[node]]
        if len(siblings) > 1:
            yield siblings.index(node), len(siblings)


def test_the_accepted_sibling_is_once_the_first_once_the_last_and_once_neither(
    rounds: list[RoundFact],
) -> None:
    places = {
        "first" if rank == 0 else "last" if rank == n - 1 else "between"
        for fact in rounds
        for rank, n in _ranks(fact)
    }

    assert {"first", "last", "between"} == places


def test_of_siblings_none_is_right_too(rounds: list[RoundFact]) -> None:
    """A miss: the root alone is accepted of a tree that has children."""
    assert {f.bundle for f in rounds if len(f.path) == 1 < len(f.tree)} >= {"base", "all-moe"}


def test_a_case_has_two_rounds_or_more(bundles: dict[str, GoldenBundle]) -> None:
    """What a round leaves behind is seen in the next one alone."""
    for bundle in bundles.values():
        for case in bundle.cases:
            assert len(case.inputs.rounds) >= 2, f"{bundle.path.stem}/{case.inputs.alias}"


def test_where_there_are_branches_the_first_round_rejects(rounds: list[RoundFact]) -> None:
    """Rows of rejected nodes lie behind L when the second round begins."""
    first = [fact for fact in rounds if fact.is_first and len(fact.tree) > 1]

    assert len(first) > len(THIN)
    assert [] == [f"{fact.bundle}/{fact.case}" for fact in first if not fact.rejects]


def test_a_round_follows_a_miss_and_one_follows_moved_rows(rounds: list[RoundFact]) -> None:
    pairs = [(x, y) for x, y in pairwise(rounds) if (x.bundle, x.case) == (y.bundle, y.case)]

    assert any(len(x.path) == 1 < len(x.tree) and len(y.tree) > 1 for x, y in pairs)
    assert any(not _is_prefix(x.path) and len(y.tree) > 1 for x, y in pairs)


def test_trees_go_past_a_word_of_32_and_of_64_bits_and_the_accepted_node_lies_there(
    rounds: list[RoundFact],
) -> None:
    last = max(node for fact in rounds for node in fact.path)

    assert last >= 128
    assert {f.bundle for f in rounds if len(f.tree) > 64} == {"base"}


def test_there_is_a_larger_tree_after_a_smaller_one_and_a_smaller_after_a_larger(
    rounds: list[RoundFact],
) -> None:
    """A buffer of the round before may be too small, or hold rows that do not count."""
    pairs = [(x, y) for x, y in pairwise(rounds) if (x.bundle, x.case) == (y.bundle, y.case)]
    sizes = {(len(x.tree) < len(y.tree)) - (len(x.tree) > len(y.tree)) for x, y in pairs}

    assert {-1, 0, 1} == sizes


def test_two_trees_of_one_size_in_a_row_differ_in_shape(rounds: list[RoundFact]) -> None:
    """What is captured by size alone is wrong there."""
    pairs = [(x, y) for x, y in pairwise(rounds) if (x.bundle, x.case) == (y.bundle, y.case)]

    assert any(len(x.tree) == len(y.tree) and x.tree.parents != y.tree.parents for x, y in pairs)


def test_trees_of_some_tens_of_nodes_ship_planted_and_built(
    rounds: list[RoundFact], bundles: dict[str, GoldenBundle]
) -> None:
    """Between the small ones and those of 65 and more: a word of 32 bits, a warp, a block."""
    sizes = {len(fact.tree) for fact in rounds}
    budgets = {
        entry.budget
        for bundle in bundles.values()
        for case in bundle.cases
        for entry in case.inputs.rounds
        if entry.budget is not None
    }

    assert len({size for size in sizes if 8 <= size <= 40}) >= 6
    assert max(sizes) > 64
    assert len({budget for budget in budgets if budget > 5}) >= 3


def test_prompts_lone_roots_and_trees_lie_past_position_256(
    rounds: list[RoundFact], bundles: dict[str, GoldenBundle]
) -> None:
    """A byte, or the significand of bfloat16, holds no larger position."""
    longest = max(
        sum(map(len, case.inputs.chunks)) for bundle in bundles.values() for case in bundle.cases
    )
    far = [f for f in rounds if np.asarray(f.found.get("positions")).min() > 256]

    assert longest > 256
    assert {True, False} == {len(fact.tree) == 1 for fact in far}


def test_a_tree_with_branches_stands_on_an_empty_cache(rounds: list[RoundFact]) -> None:
    first = [f for f in rounds if np.asarray(f.found.get("positions")).min() == 0]

    assert any(len(set(fact.tree.parents)) < len(fact.tree) for fact in first)  # siblings


def test_limits_bite_in_the_first_round_and_later_alone_and_together(
    bundles: dict[str, GoldenBundle],
) -> None:
    """By (whether in the first round, the limits there, the one that cut the path)."""
    found = set()
    for bundle in bundles.values():
        for case in bundle.cases:
            for number, entry in enumerate(case.inputs.rounds):
                expected = case.expectation(f"round{number}")
                stops, most = entry.limit.stop_tokens, entry.limit.max_emitted
                emitted = stage(expected, "emitted").tolist()
                if len(emitted) >= _walked(entry.tree, stage(expected, "targets").tolist()):
                    continue  # no limit, or none that cuts
                there = "both" if stops and most else "stop" if stops else "length"
                by = "stop" if emitted[-1] in stops else "length"
                assert by == "stop" or most == len(emitted)
                found.add((number == 0, there, by))

    for is_first in (True, False):
        assert {
            (is_first, "stop", "stop"),
            (is_first, "length", "length"),
            (is_first, "both", "length"),
        } <= found
    assert (False, "both", "stop") in found


def _walked(tree: DraftTree, targets: list[int]) -> int:
    """How many nodes the walk keeps without a limit, from ACC-1 alone."""
    node, kept = 0, 1
    while True:
        below = [i for i, parent in enumerate(tree.parents) if parent == node]
        right = [i for i in below if tree.tokens[i] == targets[node]]
        if not right:
            return kept
        node, kept = right[0], kept + 1


def test_a_round_that_is_told_to_stop_emits_token_0_before(
    bundles: dict[str, GoldenBundle],
) -> None:
    """In the first round and in a later one: 0 is no stop token, nor padding."""
    after_0 = {
        number == 0
        for bundle in bundles.values()
        for case in bundle.cases
        for number, entry in enumerate(case.inputs.rounds)
        if entry.limit.stop_tokens
        and 0 in stage(case.expectation(f"round{number}"), "emitted").tolist()[:-1]
    }

    assert {True, False} == after_0


# Numbers


def _decided(fact: RoundFact) -> np.ndarray:
    """Logits of the rows whose target decided something: those of the path."""
    logits = fact.found.get("logits")
    assert logits is not None
    return np.asarray(logits[list(fact.path)], np.float64)


def test_exact_ties_decide(rounds: list[RoundFact]) -> None:
    """Of equal top logits the lowest id is the target, of a row on an accepted path."""
    tied = [
        fact
        for fact in rounds
        if fact.bundle == "token-ties"
        and ((rows := _decided(fact)) == rows.max(axis=1, keepdims=True)).sum(axis=1).max() > 1
    ]

    assert any(len(fact.tree) > 1 for fact in tied)
    assert any(len(fact.tree) == 1 for fact in tied)


def test_both_tokens_of_a_tie_are_offered_as_siblings(rounds: list[RoundFact]) -> None:
    """Only then the path, and not the bonus alone, tells which of them was taken."""
    offered = 0
    for fact in rounds:
        if fact.bundle != "token-ties":
            continue
        for row, node in zip(_decided(fact), fact.path, strict=True):
            best = set(np.flatnonzero(row == row.max()).tolist())
            below = {
                token
                for token, parent in zip(fact.tree.tokens, fact.tree.parents, strict=True)
                if parent == node
            }
            offered += len(best) > 1 and best <= below

    assert offered


def test_some_targets_are_told_apart_by_float32_and_not_by_bfloat16(
    rounds: list[RoundFact],
) -> None:
    """An argmax of rounded logits is wrong there, and no near tie of a float32 engine."""
    chosen = 0
    for fact in rounds:
        if fact.bundle != "close-logits":
            continue
        clear = np.asarray(fact.found.get("margin_float32"))[list(fact.path)] > 1
        for row in _decided(fact)[clear]:
            coarse = row.astype(ml_dtypes.bfloat16).astype(np.float64)
            chosen += int(coarse.argmax() != row.argmax())

    assert chosen >= 3


def test_all_logits_of_deciding_rows_are_negative_in_one_model(rounds: list[RoundFact]) -> None:
    negative = {fact.bundle for fact in rounds if (_decided(fact) < 0).all()}

    assert negative == {"negative-logits"}


def test_token_0_and_the_last_id_are_fed_offered_and_accepted(
    rounds: list[RoundFact], bundles: dict[str, GoldenBundle]
) -> None:
    last = {name: bundle.config.vocab_size - 1 for name, bundle in bundles.items()}
    prompts = {
        (token, name)
        for name, bundle in bundles.items()
        for case in bundle.cases
        for chunk in case.inputs.chunks
        for token in chunk
    }
    for edge in (lambda name: 0, lambda name: last[name]):
        assert any((edge(name), name) in prompts for name in bundles)
        assert any(edge(f.bundle) in f.tree.tokens[1:] for f in rounds if len(f.tree) > 1)
        assert any(
            edge(f.bundle) in [f.tree.tokens[node] for node in f.path[1:]] for f in rounds
        ), "accepted as a draft"
        assert any(edge(f.bundle) == f.point.bonus for f in rounds), "the bonus"


# Configurations

# A published default of each field: transformers' DeepseekV3Config, and config.json of
# deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Instruct.
PUBLISHED: dict[str, set[Any]] = {
    "vocab_size": {129280, 163840},
    "hidden_size": {7168},
    "num_hidden_layers": {61},
    "num_attention_heads": {128, 64},
    "q_lora_rank": {1536, None},
    "kv_lora_rank": {512},
    "qk_nope_head_dim": {128},
    "qk_rope_head_dim": {64},
    "v_head_dim": {128},
    "intermediate_size": {18432},
    "first_k_dense_replace": {3},
    "moe_intermediate_size": {2048},
    "n_routed_experts": {256, 384},
    "num_experts_per_tok": {8},
    "n_group": {8},
    "topk_group": {4},
    "routed_scaling_factor": {2.5, 2.827, 1.0},
    "rms_norm_eps": {1e-6, 1e-5},
    "max_position_embeddings": {4096, 163840, 131072},
    "rope_theta": {10000.0, 50000.0},
}


def test_nothing_of_the_base_sits_at_a_published_value(bundles: dict[str, GoldenBundle]) -> None:
    """A constant that should have been read from the configuration would be right."""
    config = bundles["base"].config

    at = [name for name, values in PUBLISHED.items() if getattr(config, name) in values]

    assert [] == at


def test_switches_and_what_is_alone_at_its_default_in_the_base_vary_elsewhere(
    bundles: dict[str, GoldenBundle],
) -> None:
    """A switch has two values: the other one is another model's."""
    for name in ("scoring_func", "norm_topk_prob", "rope_interleave", "n_shared_experts"):
        assert len({getattr(bundle.config, name) for bundle in bundles.values()}) > 1, name
    assert len({bundle.config.latent_norm_eps for bundle in bundles.values()}) > 1
    assert len({bundle.config.q_lora_rank is None for bundle in bundles.values()}) > 1
    assert len({bundle.config.yarn for bundle in bundles.values()}) > 4


def _widths(config: ModelConfig) -> dict[str, int]:
    """Sizes of axes that an array has beside others; counts of layers, heads and groups are not."""
    assert config.q_lora_rank is not None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_routed_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_attention_heads": config.num_attention_heads,
    }


def test_no_two_widths_of_the_base_are_equal(bundles: dict[str, GoldenBundle]) -> None:
    widths = _widths(bundles["base"].config)

    assert [] == [(x, y) for x, y in combinations(widths, 2) if widths[x] == widths[y]]


def test_no_two_fields_of_one_model_are_equal(bundles: dict[str, GoldenBundle]) -> None:
    """Counts of layers, heads and groups too; numbers that follow from several may be."""
    config = bundles["no-two-alike"].config

    numbers = {
        field.name: value
        for field in fields(config)
        if isinstance(value := getattr(config, field.name), int | float)
        and not isinstance(value, bool)
    }

    assert [] == [(x, y) for x, y in combinations(numbers, 2) if numbers[x] == numbers[y]]
    at = [name for name, values in PUBLISHED.items() if getattr(config, name) in values]
    assert [] == at


def test_weights_of_one_model_have_more_bits_than_float8_and_int4(
    bundles: dict[str, GoldenBundle],
) -> None:
    """Codes of 4 bits are held by both: an engine that keeps no more would pass."""
    weights = bundles["no-two-alike"].weights
    matrices = {name: array for name, array in weights.items() if array.ndim == 2}

    for name, array in matrices.items():
        coarse = array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert not np.array_equal(coarse, array.astype(np.float32)), name
        assert len(np.unique(np.abs(array.astype(np.float32)))) > 64, name


def test_correction_biases_are_negative_somewhere_and_never_all_alike(
    bundles: dict[str, GoldenBundle],
) -> None:
    """Positive ones hide a closed group that competes with 0."""
    biases = {
        name: np.concatenate(
            [
                np.asarray(array, np.float64).ravel()
                for tensor, array in bundle.weights.items()
                if tensor.endswith("e_score_correction_bias")
            ]
        )
        for name, bundle in bundles.items()
    }

    assert (biases["negative-bias"] < -1).all()
    assert all(len(np.unique(bias)) > 1 for name, bias in biases.items() if name != "expert-ties")


# Memory that nobody may read


def test_slots_that_no_row_has_written_are_not_numbers() -> None:
    """A page is NaN when it is handed out: what is read beyond L + M spoils every logit."""
    session = _after_a_rejection()

    written = session.committed_len + 4
    rows = session._cache.rows[:, _physical(session, written)]

    assert np.isnan(rows).all()


def test_rows_of_rejected_nodes_stay_behind_the_committed_ones() -> None:
    """They are numbers, of another token: a row that is not moved or not masked looks like one."""
    session = _after_a_rejection()

    behind = session._cache.rows[:, _physical(session, session.committed_len)]
    kept = session._cache.rows[:, _physical(session, session.committed_len - 1)]

    assert np.isfinite(behind).all()
    assert not np.allclose(behind, kept)


def _after_a_rejection() -> Any:
    """A session of 5 committed tokens, the page of slot 4 + M begun by a tree whose drafts miss."""
    bundle = GoldenBundle.open(shipped_corpus()[0])
    engine: Any = load_engine("host", {"page_size": 16})
    session = engine.load((bundle.config, bundle.weights)).open(max_len=32)
    root = session.prefill([1, 2, 3, 4])
    vocab = bundle.config.vocab_size
    target = session.verify(DraftTree((root,), (-1,))).targets[0]
    wrong = [token for token in range(vocab) if token != target][:3]
    session.round(DraftTree((root, *wrong), (-1, 0, 0, 0)))
    return session


def _physical(session: Any, slot: int) -> int:
    cache = session._cache
    page = int(cache.page_table[slot // cache.page_size])
    return page * int(cache.page_size) + slot % int(cache.page_size)


# The facts are read from what is recorded


def test_a_fact_is_what_the_reference_found(rounds: list[RoundFact]) -> None:
    (fact,) = (f for f in rounds if (f.bundle, f.case, f.point.name) == ("base", "trees", "round0"))

    assert (0, 2, 3) == fact.path == tuple(stage(fact.found, "path").tolist())
    assert fact.rejects
    assert [(1, 2)] == [*_ranks(fact)]
