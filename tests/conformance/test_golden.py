"""What is recorded: the same bytes each time, cases that can catch something, margins, weights."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance import GateResult, GoldenBundle
from kdtr.conformance.bundle import GoldenCase
from kdtr.conformance.case import CasePlan, Drafted, Planted
from kdtr.conformance.cli import main
from kdtr.conformance.golden import Models, record_case, weights_sha256
from kdtr.conformance.golden_plant import planted_tree
from kdtr.conformance.seed_model import hash_below, hash_u64, seed_tensors
from kdtr.conformance.tiny_corpus import GOLDEN_TOKENS, PROMPT, TINY_SEED, tiny_plans
from kdtr.contract import STAGES, CaseError, DraftTree, ModelConfig, tensor_shapes
from kdtr.kdtr_format import Bundle

# Cases that start from PROMPT and emit all golden tokens.
WHOLE = ("ar", "y-tree", "chain", "star", "scattered", "orders", "wide")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `make golden`."""
    path = tmp_path_factory.mktemp("golden") / "tiny.kdtr"
    assert 0 == main(["golden", "--tiny", "--out", str(path)])
    return path


@pytest.fixture(scope="module")
def cases(whole: Path) -> dict[str, GoldenCase]:
    return {case.inputs.alias: case for case in GoldenBundle.open(whole).cases}


def rounds(case: GoldenCase, stage: str) -> list[np.ndarray]:
    """A stage of every round."""
    points = [point for point in case.inputs.points() if point.startswith("round")]
    found = [case.expectation(point).get(stage) for point in points]
    return [array for array in found if array is not None]


# The whole bundle. One group: it is recorded in one worker only, where that is asked for.


def test_recording_twice_gives_the_same_bytes(
    tmp_path: Path, kdtr: Callable[..., SimpleNamespace]
) -> None:
    """Here and in a process with other hash seeds and one BLAS thread."""
    words = ["golden", "--tiny", "--prompt", "3,1,4", "--tree", "-1,0,0,2:0,2,3", "--decode", "2"]
    here, there = tmp_path / "here.kdtr", tmp_path / "there.kdtr"

    run = kdtr(*words, "--out", here)
    other = subprocess.run(
        [sys.executable, "-m", "kdtr.conformance.cli", *words, "--out", there],
        env={**os.environ, "PYTHONHASHSEED": "7", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    sha256 = hashlib.sha256(here.read_bytes()).hexdigest()
    assert f"{sha256}  {here}\n" == run.out
    assert f"{sha256}  {there}\n" == other.stdout
    assert here.read_bytes() == there.read_bytes()


def test_every_case_is_recorded_in_its_order(cases: dict[str, GoldenCase]) -> None:
    assert [plan.alias for plan in tiny_plans()] == list(cases)


@pytest.mark.parametrize("alias", WHOLE)
def test_every_tree_emits_the_tokens_of_plain_decoding(
    cases: dict[str, GoldenCase], alias: str
) -> None:
    """LOSSLESS, on 24 tokens, prefill's root included."""

    def emitted(case: GoldenCase) -> list[int]:
        root = case.expectation("chunk0").get("root")
        return [int(root), *np.concatenate(rounds(case, "emitted")).tolist()]  # type: ignore[arg-type]

    assert PROMPT == cases[alias].inputs.chunks[0]
    assert GOLDEN_TOKENS == 24 == len(emitted(cases["ar"]))
    assert emitted(cases["ar"]) == emitted(cases[alias])
    assert len(set(emitted(cases["ar"]))) > 12  # no loop of a few tokens


@pytest.mark.parametrize("alias", ["best-first", "chunks"])
def test_other_cases_of_the_prompt_emit_a_part_of_them(
    cases: dict[str, GoldenCase], alias: str
) -> None:
    ahead = np.concatenate(rounds(cases["ar"], "emitted")).tolist()
    emitted = np.concatenate(rounds(cases[alias], "emitted")).tolist()

    shared = min(len(ahead), len(emitted))
    assert ahead[:shared] == emitted[:shared]


def test_the_first_round_of_every_tree_rejects_nodes(cases: dict[str, GoldenCase]) -> None:
    for alias, case in cases.items():
        if alias != "ar":
            assert len(rounds(case, "path")[0]) < len(rounds(case, "tokens")[0]), alias


@pytest.mark.parametrize(
    "alias", ["y-tree", "star", "scattered", "orders", "wide", "best-first", "chunks", "from-root"]
)
def test_some_accepted_path_is_no_prefix_of_the_nodes(
    cases: dict[str, GoldenCase], alias: str
) -> None:
    """Otherwise compaction would have nothing to move."""
    paths = [path.tolist() for path in rounds(cases[alias], "path")]

    assert any(path != [*range(len(path))] for path in paths)


def test_the_accepted_child_is_not_always_the_same_among_its_siblings(
    cases: dict[str, GoldenCase],
) -> None:
    places = {path.tolist()[1] for path in rounds(cases["star"], "path") if len(path) > 1}

    assert {1, 2, 3, 4, 5} == places


def test_planted_paths_are_the_ones_planned(cases: dict[str, GoldenCase]) -> None:
    for plan in tiny_plans():
        for planned, path in zip(plan.rounds, rounds(cases[plan.alias], "path"), strict=True):
            if isinstance(planned, Planted):
                assert planned.path == tuple(path.tolist()), plan.alias


def test_padding_like_tokens_are_among_the_misses(cases: dict[str, GoldenCase]) -> None:
    """Token 0 and the last token id: engines treat them as padding."""
    tokens = {token for case in cases.values() for t in rounds(case, "tokens") for token in t}

    assert {0, 511} <= {int(token) for token in tokens}


def test_every_stage_is_somewhere(whole: Path) -> None:
    with Bundle.open(whole) as bundle:
        found = {name.rpartition("/")[2] for name in bundle if name.startswith("expect/")}

    beside = {"expert_gap", "margin_float32", "margin_bfloat16"}
    assert {stage.name for stage in STAGES} - {"untouched", "copied"} | beside == found


def test_every_moe_row_has_a_margin_and_every_decision_of_tiny_is_firm(
    whole: Path, judge: Callable[..., GateResult]
) -> None:
    """No near tie for a float32 engine: what it decides is asserted everywhere."""
    with Bundle.open(whole) as bundle:
        gaps = [bundle[name] for name in bundle if name.endswith("/expert_gap")]
    firm = min(float(gap.min()) for gap in gaps)

    gate = judge("host", whole, modes=["round", "decode"])

    assert firm > 0
    assert gate.passed
    assert [] == gate.findings


def test_the_weights_are_exactly_on_the_bfloat16_grid(whole: Path) -> None:
    config = ModelConfig.tiny()
    seed = seed_tensors(config, TINY_SEED)
    bundle = GoldenBundle.open(whole)

    assert config == bundle.config
    assert set(tensor_shapes(config)) == set(bundle.weights) == set(seed)
    for name, array in bundle.weights.items():
        assert ml_dtypes.bfloat16 == array.dtype, name
        assert np.array_equal(seed[name], array.astype(np.float32)), name
        assert len(np.unique(seed[name])) > 1, name
    bundle.close()


# Seeds


def plain_hash(seed: int, stream: str, n: int) -> list[int]:
    """splitmix64 of seed + FNV-1a(stream) + index, written from the docstring in plain integers."""
    mask = 2**64 - 1
    fnv = 14695981039346656037
    for byte in stream.encode():
        fnv = ((fnv ^ byte) * 1099511628211) & mask
    state = (seed + fnv) & mask
    values = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        values.append(z ^ (z >> 31))
    return values


@pytest.mark.parametrize("stream", ["", "a", "model.norm.weight", "ü 中"])
@pytest.mark.parametrize("seed", [0, 1, TINY_SEED, 2**63, 2**64 - 1])
def test_the_hash_is_the_documented_one(seed: int, stream: str) -> None:
    assert plain_hash(seed, stream, 50) == hash_u64(seed, stream, 50).tolist()


def test_the_hash_is_splitmix64() -> None:
    """Its published first values for seed 1234567: the stream's own state is taken off."""
    fnv_of_nothing = 0xCBF29CE484222325

    values = hash_u64((1234567 - fnv_of_nothing) % 2**64, "", 3).tolist()

    assert [6457827717110365317, 3203168211198807973, 9817491932198370423] == values


@pytest.mark.parametrize("bound", [1, 2, 15, 512, 2**32 - 1])
def test_integers_below_a_bound(bound: int) -> None:
    expected = [((value >> 32) * bound) >> 32 for value in plain_hash(7, "s", 40)]

    assert expected == hash_below(7, "s", 40, bound).tolist()
    assert all(0 <= value < bound for value in expected)


@pytest.mark.parametrize(("bits", "most"), [(4, 7), (8, 127)])
def test_weights_are_small_integers_times_a_power_of_two(bits: int, most: int) -> None:
    for name, array in seed_tensors(ModelConfig.tiny(), 3, matrix_bits=bits).items():
        values = array - 1 if "norm" in name else array
        step = np.abs(values[values != 0]).min()
        codes = values / step
        assert np.array_equal(codes, np.rint(codes)), name
        assert np.abs(codes).max() <= (most if array.ndim == 2 else 7), name
        assert np.abs(codes).max() > 7 or bits == 4 or array.ndim == 1, name
        assert 0.5 == np.frexp(step)[0], name


# Case ids


@pytest.fixture(scope="module")
def small_reference(small_model: SimpleNamespace) -> SimpleNamespace:
    models = Models(small_model.config, small_model.weights)
    return SimpleNamespace(models=models, identity=weights_sha256(small_model.weights))


def case_id(reference: SimpleNamespace, identity: str | None = None, **changes: object) -> str:
    plan = {
        "alias": "a",
        "why": "w",
        "rules": ("MASK-2",),
        "rounds": (Planted((-1, 0, 0), (0, 2)), Drafted((0, 1), budget=3)),
        "chunks": ((3, 5, 8), (1,)),
    }
    inputs, _, _ = record_case(reference.models, CasePlan(**{**plan, **changes}))  # type: ignore[arg-type]
    return inputs.content_id(identity or reference.identity)


def test_a_case_id_does_not_change_with_words(small_reference: SimpleNamespace) -> None:
    first = case_id(small_reference)
    plan = CasePlan("a", "w", ("MASK-2",), (Planted((-1,)),), root=3)
    inputs, _, _ = record_case(small_reference.models, plan)
    renamed = replace(inputs, alias="b", why="other", rules=(), case_id="0")

    assert 12 == len(first)
    assert first == case_id(small_reference)
    assert first == case_id(small_reference, why="other", rules=())
    assert inputs.content_id("weights") == renamed.content_id("weights")


@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": ((3, 5, 8, 1),)},
        {"chunks": ((3, 5), (8, 1))},
        {"chunks": ((3, 5, 8), (2,))},
        {"rounds": (Planted((-1, 0, 0), (0, 1)), Drafted((0, 1), budget=3))},
        {"rounds": (Planted((-1, 0, 0), (0, 2)), Drafted((0, 1), budget=4))},
        {"rounds": (Planted((-1, 0, 0), (0, 2)), Drafted((1, 0), budget=3))},
        {"rounds": (Planted((-1, 0, 0), (0, 2)),)},
        {"rounds": (Planted((-1, 0, 0), (0, 2), max_emitted=1), Drafted((0, 1), budget=3))},
        {"rounds": (Planted((-1, 0, 0), (0, 2), stop_at=1), Drafted((0, 1), budget=3))},
        {"chunks": (), "root": 3},
        {"identity": "other weights"},
    ],
    ids=map(str, range(11)),
)
def test_a_case_id_changes_with_anything_an_engine_is_asked(
    small_reference: SimpleNamespace, changes: dict[str, object]
) -> None:
    assert case_id(small_reference) != case_id(small_reference, **changes)  # type: ignore[arg-type]


def test_the_identity_of_weights_is_names_dtypes_shapes_and_bytes() -> None:
    one = {"a": np.arange(6, dtype=np.float32), "b": np.zeros(2)}
    first = weights_sha256(one)

    assert first == weights_sha256(dict(reversed(one.items())))
    assert first == weights_sha256({**one, "a": np.repeat(one["a"], 2)[::2]})  # strides
    assert first != weights_sha256({**one, "a": one["a"].reshape(2, 3)})
    assert first != weights_sha256({**one, "a": one["a"].astype(np.float64)})
    assert first != weights_sha256({**one, "a": one["a"].view(np.int32)})
    assert first != weights_sha256({"c" if name == "a" else name: one[name] for name in one})
    assert first != weights_sha256({**one, "a": one["a"] + 1})


# Recording


def test_ids_in_the_bundle_are_those_of_the_inputs(small: Path) -> None:
    bundle = GoldenBundle.open(small)
    identity = weights_sha256(bundle.weights)

    for case in bundle.cases:
        assert case.inputs.case_id == case.inputs.content_id(identity)
    bundle.close()


def test_the_capacity_is_exactly_what_the_case_needs(small: Path) -> None:
    """SLOT-3: six tokens, three accepted, then a tree of four."""
    bundle = GoldenBundle.open(small)
    needed = {case.inputs.alias: case.inputs.max_len for case in bundle.cases}
    bundle.close()

    assert {"y": 13, "ar": 8, "drafted": 8, "from-root": 4} == needed


def test_a_twin_of_the_target_comes_first_among_the_siblings_off_the_path() -> None:
    """Of targets 4, 5 and 6: node 1 is 5's twin, 3 that of 6, 5 has none in a vocabulary of 20."""
    plan = Planted((-1, 0, 0, 2, 2, 4), (0, 2, 4), tied=10)

    tree = planted_tree("here", plan, (4, 5, 6, 12), vocab_size=20)

    assert (4, 15, 5, 16, 6) == tree.tokens[:5]
    assert tree.tokens[5] not in (12, 22)


def test_ranks_below_the_budget_need_their_tokens(record: Callable[..., Path]) -> None:
    """They are planted by decoding on, beyond the nodes that the tree will have."""
    bundle = GoldenBundle.open(
        record([CasePlan("b", "", ("TREE-4",), (Drafted((0, 1), budget=0),), root=5)])
    )

    assert 1 == len(bundle.cases[0].inputs.rounds[0].tree) == bundle.cases[0].inputs.max_len
    bundle.close()


def test_an_explicit_tree_is_taken_as_it_is(
    record: Callable[..., Path], small_reference: SimpleNamespace
) -> None:
    session = small_reference.models.truth.open(max_len=10)
    root = session.prefill([3, 5])
    tree = DraftTree((root, 0, 1), (-1, 0, 0))

    bundle = GoldenBundle.open(record([CasePlan("e", "", (), (tree,), ((3, 5),))]))

    assert tree == bundle.cases[0].inputs.rounds[0].tree
    bundle.close()


@pytest.mark.parametrize("aliases", [(), ("a", "a")])
def test_cases_need_names_of_their_own(
    record: Callable[..., Path], aliases: tuple[str, ...]
) -> None:
    plans = [CasePlan(alias, "", (), (Planted((-1,)),), root=1) for alias in aliases]

    with pytest.raises(CaseError, match=f"cases {', '.join(aliases) or 'none'}; expected some"):
        record(plans)


# Checkpoints


@pytest.mark.parametrize(
    "name",
    [
        "v01-qlora-g1",
        "v04-noqlora-g4-halfrope",
        "v05-qlora-g4-yarn-v3",
        "v09-qlora-g4-negbias",
        "v12-qlora-g2-wide",
    ],
)
def test_a_checkpoint_from_end_to_end(
    kdtr: Callable[..., SimpleNamespace], checkpoints: Path, tmp_path: Path, name: str
) -> None:
    bundle = tmp_path / "new folder" / "golden.kdtr"

    golden = kdtr(
        *("golden", "--checkpoint", checkpoints / name, "--out", bundle, "--decode", "2"),
        *("--prompt", "1,2,3,5,8", "--tree", "-1,0,0,2:0,2,3", "--tree", "-1,0,0,0:0,3"),
    )
    gate = kdtr("gate", "--engine", "host", bundle)

    assert 0 == golden.code, golden.err
    assert 0 == gate.code, gate.out
    assert f"gate passed: {5 + 4 + 2 + 9} pass; " in gate.out  # ar, trees, both scripts, x-ray
    opened = GoldenBundle.open(bundle)
    assert name == opened.model_name
    assert ["prompt0-ar", "prompt0-trees"] == [case.inputs.alias for case in opened.cases]
    opened.close()
