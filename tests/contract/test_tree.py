"""What travels between the verbs: born valid, or refused with the node and the numbers."""

import pickle

import numpy as np
import pytest

from kdtr.contract import (
    NO_LIMIT,
    Acceptance,
    DraftTree,
    EmitLimit,
    InputError,
    KdtrError,
    Round,
    TreeError,
    Verified,
)

TREE_REFUSALS = {
    "no node": ((), (), "the tree has no node; expected at least the root, node 0"),
    "more tokens": (
        (7, 3, 5),
        (-1, 0),
        "the tree has 3 tokens and 2 parents; expected one parent per token",
    ),
    "more parents": (
        (7,),
        (-1, 0),
        "the tree has 1 tokens and 2 parents; expected one parent per token",
    ),
    "the root has a parent": (
        (7, 3),
        (0, 0),
        "parents[0] = 0, but node 0 is the root; expected -1",
    ),
    "two roots": (
        (7, 3, 5),
        (-1, 0, -1),
        "parents[2] = -1, but a tree has one root, node 0; expected 0 <= parents[2] <= 1",
    ),
    "two roots at once": (
        (7, 3),
        (-1, -1),
        "parents[1] = -1, but a tree has one root, node 0; expected parents[1] = 0",
    ),
    "a parent after its child": (
        (7, 3, 5, 6),
        (-1, 0, 3, 0),
        "parents[2] = 3, but a parent precedes its child; expected 0 <= parents[2] <= 1",
    ),
    "its own parent": (
        (7, 3, 5, 6),
        (-1, 0, 0, 3),
        "parents[3] = 3, but a parent precedes its child; expected 0 <= parents[3] <= 2",
    ),
    "the second node's parent": (
        (7, 3),
        (-1, 1),
        "parents[1] = 1, but a parent precedes its child; expected parents[1] = 0",
    ),
    "a parent below -1": (
        (7, 3),
        (-1, -2),
        "parents[1] = -2, but a parent precedes its child; expected parents[1] = 0",
    ),
    "a token below 0": ((7, -3), (-1, 0), "tokens[1] = -3; expected a token id >= 0"),
    "a root token below 0": ((-1,), (-1,), "tokens[0] = -1; expected a token id >= 0"),
    "siblings alike": (
        (7, 3, 5, 3),
        (-1, 0, 0, 0),
        "nodes 1 and 3 are both children of node 0 with token 3; "
        "expected siblings with different tokens",
    ),
    "real tokens": (
        (7.0, 3),
        (-1, 0),
        "tokens = (7.0, 3); expected integers",
    ),
    "real parents": (
        (7, 3),
        (-1, "0"),
        "parents = (-1, '0'); expected integers",
    ),
    "no sequence": (7, (-1,), "tokens = 7; expected a sequence of integers"),
    "no parents": ((7,), None, "parents = None; expected a sequence of integers"),
}


@pytest.mark.parametrize("name", TREE_REFUSALS)
def test_a_tree_that_breaks_a_rule_is_refused(name):
    tokens, parents, text = TREE_REFUSALS[name]

    with pytest.raises(TreeError) as refusal:
        DraftTree(tokens=tokens, parents=parents)

    assert text == str(refusal.value)
    assert isinstance(refusal.value, KdtrError)


@pytest.mark.parametrize(
    "parents",
    [(-1, 0, 0, 1, 1, 2), (-1, 0, 1, 1, 0, 4), (-1, 0, 1, 2, 3, 4), (-1, 0, 0, 0, 0, 0)],
    ids=["breadth first", "depth first", "chain", "star"],
)
def test_every_topological_order_is_legal(parents):
    tree = DraftTree(tokens=(9, 1, 2, 3, 4, 5), parents=parents)

    assert 6 == len(tree)


def test_a_token_may_repeat_off_the_siblings():
    """The root's own token, a cousin's, a parent's; token id 0."""
    tree = DraftTree(tokens=(0, 0, 3, 0, 0), parents=(-1, 0, 0, 1, 2))

    assert (0, 0, 3, 0, 0) == tree.tokens


@pytest.mark.parametrize(
    "convert",
    [
        np.array,
        list,
        iter,
        lambda v: np.array(v, dtype=np.int8),
        lambda v: [np.int64(x) for x in v],
    ],
    ids=["array", "list", "iterator", "int8", "scalars"],
)
def test_any_integers_become_tuples_of_python_integers(convert):
    tree = DraftTree(tokens=convert([7, 3, 5]), parents=convert([-1, 0, 0]))
    acceptance = Acceptance(path=convert([0, 2]), bonus=np.uint16(9))

    assert DraftTree(tokens=(7, 3, 5), parents=(-1, 0, 0)) == tree
    assert Acceptance(path=(0, 2), bonus=9) == acceptance
    assert {int} == {type(value) for value in (*tree.tokens, *tree.parents, *acceptance.path)}
    assert int is type(acceptance.bonus)


def test_trees_are_values():
    tree = DraftTree(tokens=[7, 3], parents=[-1, 0])

    assert {tree} == {DraftTree(tokens=(7, 3), parents=(-1, 0))}
    assert tree == pickle.loads(pickle.dumps(tree))


ACCEPTANCE_REFUSALS = {
    "empty": ((), 1, "path = (); expected a path that starts at the root, node 0"),
    "without the root": (
        (1, 2),
        1,
        "path = (1, 2); expected a path that starts at the root, node 0",
    ),
    "repeated": (
        (0, 2, 2),
        1,
        "path[2] = 2 after path[1] = 2; expected node ids that strictly increase",
    ),
    "descending": (
        (0, 3, 1),
        1,
        "path[2] = 1 after path[1] = 3; expected node ids that strictly increase",
    ),
    "a bonus below 0": ((0,), -1, "bonus = -1; expected a token id >= 0"),
    "a real path": ((0, 1.0), 1, "path = (0, 1.0); expected integers"),
}


@pytest.mark.parametrize("name", ACCEPTANCE_REFUSALS)
def test_an_acceptance_that_is_no_path_is_refused(name):
    path, bonus, text = ACCEPTANCE_REFUSALS[name]

    with pytest.raises(InputError) as refusal:
        Acceptance(path=path, bonus=bonus)

    assert text == str(refusal.value)


def test_a_real_bonus_is_refused():
    with pytest.raises(InputError, match=r"^bonus = .*1\.5"):
        Acceptance(path=(0,), bonus=1.5)


@pytest.mark.parametrize("path", [(0,), (0, 1, 5)])
def test_accept_len_counts_the_root(path):
    assert len(path) == Acceptance(path=path, bonus=0).accept_len


LIMIT_REFUSALS = {
    "a stop token below 0": (
        {"stop_tokens": {5, -1}},
        "stop_tokens = [-1, 5]; expected token ids >= 0",
    ),
    "real stop tokens": (
        {"stop_tokens": (2.0,)},
        "stop_tokens = (2.0,); expected integers",
    ),
    "none at all": ({"max_emitted": 0}, "max_emitted = 0; expected at least 1, or None"),
    "below none": ({"max_emitted": -3}, "max_emitted = -3; expected at least 1, or None"),
}


@pytest.mark.parametrize("name", LIMIT_REFUSALS)
def test_a_limit_that_nothing_can_meet_is_refused(name):
    arguments, text = LIMIT_REFUSALS[name]

    with pytest.raises(InputError) as refusal:
        EmitLimit(**arguments)

    assert text == str(refusal.value)


def test_a_limit_of_numpy_integers_is_one_of_python_integers():
    limit = EmitLimit(stop_tokens=np.array([2, 5, 2]), max_emitted=np.int32(3))

    assert EmitLimit(stop_tokens=frozenset({2, 5}), max_emitted=3) == limit
    assert {int} == {type(token) for token in limit.stop_tokens}


def test_no_limit_is_no_stop_token_and_no_number():
    assert EmitLimit() == NO_LIMIT
    assert (frozenset(), None) == (NO_LIMIT.stop_tokens, NO_LIMIT.max_emitted)


def test_a_round_is_a_value_and_a_verified_is_not():
    """Verified holds an array: equality would be elementwise."""
    tree, acceptance = DraftTree((7,), (-1,)), Acceptance((0,), 3)

    assert Round(tree, acceptance, (3,)) == Round(tree, acceptance, (3,))
    assert Verified(None, (3,)) != Verified(None, (3,))


@pytest.mark.parametrize(
    "values",
    [{7, 3}, frozenset((7, 3)), b"ab", "ab", bytearray(b"ab"), {7: 1, 3: 2}, memoryview(b"ab")],
    ids=["set", "frozenset", "bytes", "str", "bytearray", "dict", "memoryview"],
)
def test_what_has_no_order_or_is_text_is_no_sequence(values):
    with pytest.raises(TreeError, match=r"^tokens = .*; expected a sequence of integers"):
        DraftTree(tokens=values, parents=(-1, 0))
    with pytest.raises(InputError, match=r"^path = .*; expected a sequence of integers"):
        Acceptance(path=values, bonus=1)


@pytest.mark.parametrize("values", [b"ab", "ab", {7: 1}], ids=["bytes", "str", "dict"])
def test_stop_tokens_may_be_a_set_but_no_text_or_map(values):
    assert frozenset((7, 3)) == EmitLimit({7, 3}).stop_tokens
    with pytest.raises(InputError, match=r"^stop_tokens = .*; expected a sequence of integers"):
        EmitLimit(values)


def test_a_bool_is_no_integer():
    with pytest.raises(TreeError, match=r"^tokens = \(7, True\); expected integers"):
        DraftTree(tokens=(7, True), parents=(-1, 0))
    with pytest.raises(TreeError, match=r"^parents = \(-1, False\); expected integers"):
        DraftTree(tokens=(7, 1), parents=(-1, False))
    with pytest.raises(InputError, match="expected integers"):
        Acceptance(path=(0, True), bonus=1)
    with pytest.raises(InputError, match="expected integers"):
        Acceptance(path=(0,), bonus=True)
    with pytest.raises(InputError, match="expected integers"):
        EmitLimit(max_emitted=True)


def test_a_message_does_not_hold_a_million_numbers():
    with pytest.raises(TreeError) as refusal:
        DraftTree(tokens=[1.5] * 10**6, parents=[-1])

    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["large", "small"])
def test_an_integer_that_cannot_be_printed_is_refused(value):
    """Python prints 4300 digits at most: an error with it would be another error."""
    long = "an integer of 16610 bits; expected at most 1024 bits"

    for what, error, make in (
        ("tokens", TreeError, lambda: DraftTree((1, value), (-1, 0))),
        ("parents", TreeError, lambda: DraftTree((1, 2), (-1, value))),
        ("path", InputError, lambda: Acceptance((0, value), 1)),
        ("bonus", InputError, lambda: Acceptance((0,), value)),
        ("stop_tokens", InputError, lambda: EmitLimit(frozenset({value}))),
        ("max_emitted", InputError, lambda: EmitLimit(max_emitted=value)),
    ):
        with pytest.raises(error) as caught:
            make()
        assert f"{what} = {long}" == str(caught.value)
