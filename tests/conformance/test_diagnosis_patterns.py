"""Recognisers on arrays made by hand, and on garbage, which they must not recognise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance import Finding, GoldenBundle, Verdict
from kdtr.conformance.bundle import Expectation
from kdtr.conformance.diagnosis import diagnose
from kdtr.conformance.diagnosis_scene import Guess, Hint, Scene, weigh
from kdtr.conformance.finding import Place
from kdtr.contract import STAGE, EmitLimit, ModelConfig, Source, Stage, stage_order

L = 5
Y = (-1, 0, 0, 2)
TOKENS = (7, 3, 5, 4)
TARGETS = (5, 9, 4, 8)
# A model of which no forward is done again: patterns alone are recognised.
TOO_LARGE = ModelConfig.tiny().replace(hidden_size=10**6)


def scene(stage: str, actual: Any, expected: Any = None, **more: Any) -> Scene:
    """A Y-shaped tree at L = 5, path 0-2-3; `expected` is the truth if not given."""
    tensors = {f"p/{name}": array for name, array in truth().items()}
    expectation = Expectation(tensors, "p/", {})
    right = expectation.get(stage) if expected is None else np.asarray(expected)
    assert right is not None
    return Scene(
        STAGE[stage],
        None,
        right,
        np.asarray(actual),
        expectation,
        TOO_LARGE,
        bound=None if STAGE[stage].exact else np.full((*right.shape[:1], 1), 1e-6),
        **more,
    )


def truth() -> dict[str, np.ndarray]:
    mask = np.ones((4, L + 4), dtype=bool)
    mask[:, L:] = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    logits = np.zeros((4, 512))
    logits[np.arange(4), TARGETS] = 3.0
    logits[:, 100] = -5.0
    return {
        "parents": np.array(Y),
        "tokens": np.array(TOKENS),
        "positions": np.array([5, 6, 6, 7]),
        "mask": mask,
        "slots": np.arange(L, L + 4),
        "logits": logits,
        "targets": np.array(TARGETS),
        "path": np.array([0, 2, 3]),
        "bonus": np.array(8),
        "emitted": np.array([5, 4, 8]),
        "moves": np.array([[5, 5], [7, 6], [8, 7]]),
        "committed_len": np.array(L + 3),
        "root": np.array(8),
        "cache_tokens": np.array([1, 1, 1, 1, 1, 7, 5, 4]),
        "cache_positions": np.arange(8),
    }


def said(one: Scene) -> list[str]:
    return [hint.says for hint in diagnose(one)]


@pytest.mark.parametrize(
    ("stage", "actual", "words"),
    [
        ("positions", [5, 6, 7, 8], "L + index"),
        ("positions", [4, 5, 5, 6], "the root is at L - 1 = 4"),
        ("positions", [0, 1, 1, 2], "positions start at 0, without L"),
        ("positions", [5, 5, 5, 5], "every node is at L, whatever its depth"),
        ("positions", [9, 10, 10, 11], "every position is +4: L is taken as 9, should be 5"),
        ("positions", [5, 6, 7, 7], "node 2 has depth 2, should be 1"),
        ("slots", [5, 6, 6, 7], "slots are positions, L + depth: siblings share one"),
        ("slots", [0, 1, 2, 3], "slots start at 0"),
        ("slots", [8, 7, 6, 5], "slots are in reverse order"),
        ("slots", [5, 6, 7, 4], "all slots stay in one page of 4"),
        ("slots", [5, 6, 17, 18], "slots are right up to 6 and +10 from 7 on"),
        ("tokens", [7, 7, 7, 5], "every node has the row of its parent"),
        ("tokens", [4, 5, 3, 7], "the rows are in reverse order"),
        ("targets", [9, 4, 8, 5], "row i has the target of row i + 1"),
        ("targets", [513, 9, 4, 8], "a target lies beyond the vocabulary of 512"),
        ("path", [0, 1], "the first child of the root is accepted"),
        ("path", [0, 2], "the walk stops one node short"),
        ("path", [2, 3], "the accepted path lacks the root"),
        ("path", [0, 1, 2, 3], "every node of the tree is accepted"),
        ("bonus", 4, "the bonus is the last accepted token, that of node 3"),
        ("emitted", [7, 5, 4, 8], "the root is emitted too"),
        ("emitted", [5, 4], "the bonus is not emitted"),
        ("committed_len", 9, "L grew by the whole tree of 4"),
        ("committed_len", 7, "L grew by the 2 accepted drafts alone"),
        ("committed_len", 5, "L did not grow"),
        ("root", 7, "the next root is the root of this round"),
        ("moves", [[5, 5], [6, 6], [7, 7]], "nothing is moved"),
        ("moves", [[5, 5], [6, 7], [7, 8]], "source and destination are exchanged"),
        ("moves", [[5, 5], [7, 6]], "the last move is missing"),
        ("cache_tokens", [1, 1, 1, 1, 1, 7, 3, 5], "nodes 0..accept_len - 1 are kept"),
        ("cache_tokens", [1, 1, 1, 1, 1, 5, 4, 8], "the bonus among them; the root is missing"),
        ("cache_positions", [0, 1, 2, 3, 4, 5, 7, 8], "L + the index of the node, not its depth"),
    ],
)
def test_integers(stage: str, actual: Any, words: str) -> None:
    assert any(words in sentence for sentence in said(scene(stage, actual)))


BLOCKS = {
    "a node sees its earlier siblings": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]],
    "earlier and later": [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 1, 1]],
    "causal by index": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    "no ancestors beyond": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]],
    "a node does not see itself": [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]],
    "transposed": [[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]],
    "itself alone of the tree": np.eye(4),
    "every node sees every node": np.ones((4, 4)),
    "no node sees the root": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
}


@pytest.mark.parametrize("words", BLOCKS)
def test_blocks_of_the_tree(words: str) -> None:
    mask = truth()["mask"]
    mask[:, L:] = BLOCKS[words]

    first = diagnose(scene("mask", mask))[0]

    assert words in first.says
    assert (1.0, ("MASK-2",)) == (first.fit, first.rules)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (slice(0, L), "the prefix (columns 0..4) is not visible"),
        (slice(L - 1, L), "the last column of the prefix is not visible"),
        (slice(0, 1), "slot 0 is not visible"),
    ],
)
def test_columns_of_the_prefix(columns: slice, words: str) -> None:
    mask = truth()["mask"]
    mask[:, columns] = False

    assert words in said(scene("mask", mask))[0]


def test_a_block_one_column_too_far_left() -> None:
    mask = np.zeros((4, L + 4), dtype=bool)
    mask[:, : L - 1] = True
    mask[:, L - 1 : -1] = truth()["mask"][:, L:]

    assert "one column too far left" in said(scene("mask", mask))[0]


def test_one_wrong_bit_is_said_with_its_kind() -> None:
    mask = truth()["mask"]
    mask[1, L + 3] = True

    assert "1 wrong in all: row 1 sees the later node 3" in said(scene("mask", mask))


@pytest.mark.parametrize(
    ("limit", "right", "actual", "words"),
    [
        (EmitLimit(max_emitted=1), [0], [0, 2, 3], "is ignored (max_emitted = 1)"),
        (EmitLimit(frozenset({5})), [0], [0, 2, 3], "is ignored (stop tokens 5)"),
        (EmitLimit(frozenset({5}), 2), [0], [0, 2], "of the limit stop tokens 5 is ignored"),
        (EmitLimit(max_emitted=1), [0], [0, 2], "the token at which the limit cuts is accepted"),
    ],
)
def test_limits(limit: EmitLimit, right: list[int], actual: list[int], words: str) -> None:
    one = scene("path", actual, right, limit=limit)

    assert any(words in sentence for sentence in said(one))


# Numbers

RANDOM = np.random.default_rng(4)
ROWS = RANDOM.standard_normal((4, 512))


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (-ROWS, "all signs are flipped"),
        (1.7 * ROWS, "all numbers are times 1.7"),
        (0 * ROWS, "all numbers are zero"),
        (
            ROWS * [[1], [2], [3], [1]],
            "each row is the right one times a constant of its own, 1 to 3",
        ),
        (ROWS[[0, 0, 0, 2]], "every node has the row of its parent"),
        (ROWS[[1, 2, 3, 0]], "row i is that of row i + 1"),
        (ROWS[[0, 2, 1, 3]], "row 1 has that of row 2, row 2 has that of row 1"),
    ],
)
def test_rows_of_numbers(actual: np.ndarray, words: str) -> None:
    first = diagnose(scene("logits", actual, ROWS))[0]

    assert words in first.says
    assert 1.0 == first.fit


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([0], "only row 0, which sees the cache and itself differ: 1 of 4"),
        ([1, 2, 3], "every row but the first differ: 3 of 4"),
        ([3], "only rows of depth 2 and more"),
        ([1, 2], "only nodes that have siblings"),
        ([2], "only nodes that have an earlier sibling"),
        ([2, 3], "only nodes with an earlier sibling, and those below them"),
        ([1], "only row 1 of 4 differ"),
    ],
)
def test_which_rows_differ(rows: list[int], words: str) -> None:
    actual = ROWS.copy()
    actual[rows] += RANDOM.standard_normal((len(rows), 512))

    hints = diagnose(scene("logits", actual, ROWS))

    assert words in hints[0].says
    assert hints[0].fit < 1  # where, not why


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", ml_dtypes.bfloat16), ("float16", "f2")])
def test_numbers_of_another_dtype(name: str, dtype: Any) -> None:
    rounded = ROWS.astype(dtype).astype(np.float32)

    assert f"the numbers are {name} numbers" in said(scene("logits", rounded, ROWS))[0]


def test_a_head_of_its_own() -> None:
    expected = RANDOM.standard_normal((4, 4, 16))
    actual = expected.copy()
    actual[:, 2] += RANDOM.standard_normal((4, 16))
    one = scene("logits", actual[:, 0], expected[:, 0])
    heads = Scene(
        STAGE["q_pe"], 0, expected, actual, one.expectation, one.config, np.full((4, 1, 1), 1e-6)
    )

    assert "only head 2 of 4 differ" in said(heads)


# What must not be recognised


def test_garbage_is_not_explained(small: Path) -> None:
    """Random numbers at every stage of a real case: nothing fits every element."""
    opened = GoldenBundle.open(small)
    (case,) = (one for one in opened.cases if one.inputs.alias == "y")
    expectation, history = case.expectation("round0"), (case.expectation("chunk0"),)
    random = np.random.default_rng(1)
    judged = 0
    for stage, layer in stage_order(2):
        expected = expectation.get(stage.name, layer)
        if expected is None or stage.source is Source.BUILD or not expected.ndim:
            continue
        actual = garbage(random, expected)
        bound = None if stage.exact else per_row(stage, expected, 1e-6)
        one = Scene(
            stage, layer, expected, actual, expectation, opened.config, bound, history=history
        )

        hints = diagnose(one)

        assert all(hint.fit < 1 for hint in hints), (stage.name, hints)
        judged += 1
    assert judged > 25


def per_row(stage: Stage, expected: np.ndarray, bound: float) -> np.ndarray:
    """As the judge's bounds: the axes within a row are 1."""
    n = stage.row_axes
    return np.full((*expected.shape[:n], *(1 for _ in expected.shape[n:])), bound)


def garbage(random: np.random.Generator, expected: np.ndarray) -> np.ndarray:
    if expected.dtype == bool:
        return random.random(expected.shape) < 0.5
    if expected.dtype.kind in "iu":
        return random.integers(100, 500, expected.shape)
    scale = np.abs(expected[np.isfinite(expected)]).max()
    noise = scale * random.standard_normal(expected.shape)
    return np.where(np.isfinite(expected), noise, expected)


@pytest.mark.parametrize("size", [2.0, 30.0])
def test_random_rounding_is_not_explained(small: Path, size: float) -> None:
    """An engine a little out of bounds, at random, is no known fault."""
    opened = GoldenBundle.open(small)
    (case,) = (one for one in opened.cases if one.inputs.alias == "y")
    expectation, history = case.expectation("round0"), (case.expectation("chunk0"),)
    random = np.random.default_rng(2)
    for name, layer in (("q_pe", 0), ("scores", 0), ("mlp_out", 1), ("logits", None)):
        expected = expectation.get(name, layer)
        assert expected is not None
        bound = per_row(STAGE[name], expected, 1e-6)
        error = np.where(
            np.isfinite(expected), size * 1e-6 * random.standard_normal(expected.shape), 0
        )
        one = Scene(
            STAGE[name],
            layer,
            expected,
            expected + error,
            expectation,
            opened.config,
            bound,
            history=history,
        )

        assert all(hint.fit < 1 for hint in diagnose(one)), name


@pytest.mark.parametrize("stage", ["positions", "mask", "slots", "path", "targets", "logits"])
def test_wrong_shapes_raise_nothing(stage: str) -> None:
    for shape in ((), (0,), (2,), (3, 1), (4, 9, 2)):
        diagnose(scene(stage, np.zeros(shape, dtype=int)))


# The hint itself


def test_a_guess_that_explains_most_is_told_with_its_share() -> None:
    predicted = 2 * ROWS
    actual = predicted.copy()
    actual[0, :100] = 0.0
    one = scene("logits", actual, ROWS)

    ranked = weigh(one, Guess("twice", (), predicted))

    assert ranked is not None
    assert 0.94 < ranked.hint.fit < 0.96
    assert "twice (fits 95%)" == str(ranked.hint)


def test_a_guess_that_changes_nothing_explains_nothing() -> None:
    assert weigh(scene("logits", 2 * ROWS, ROWS), Guess("nothing", (), ROWS)) is None


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Hint("why", ("POS-1",)), "why (fits every element, POS-1)"),
        (Hint("why", (), 0.5), "why (fits 50%)"),
        (Hint("why", seen_in="mask"), "why (fits every element); the stage mask would tell"),
        (Hint("why", seen_in="cache_c_kv"), "why (fits every element); snapshot() would tell"),
    ],
)
def test_the_words_of_a_hint(hint: Hint, text: str) -> None:
    assert text == str(hint)


def test_a_finding_prints_its_hints_below_its_rules() -> None:
    finding = Finding(
        Verdict.FAIL,
        Place("b", "c", "round", "round0"),
        "positions",
        "differs",
        rules=("POS-1",),
        looks_like=(Hint("one"), Hint("two", (), 0.5)),
        next_step="then",
    )

    assert [
        "  looks like one (fits every element)",
        "  looks like two (fits 50%)",
        "  next      then",
    ] == finding.lines()[-3:]


def test_nothing_of_a_diagnosis_stops_the_gate(
    judge: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Scene) -> tuple[Hint, ...]:
        raise RuntimeError("no")

    monkeypatch.setattr("kdtr.conformance.judge_stage.diagnose", broken)

    gate = judge("planted_faults:make_engine", tiny, "y-tree", modes=["round"], fault="root_low")

    (finding,) = gate.findings
    assert "no diagnosis: it raised RuntimeError: no" == finding.looks_like[0].says
