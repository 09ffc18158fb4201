"""Other engines' trees, masks, links and verdicts, translated from their spelling into ours."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kdtr.contract import DraftTree, TreeError
from kdtr.reference import accept, commit_moves, depths, emitted, path, positions, visibility
from kdtr.reference.arithmetic import FIXED
from kdtr.reference.attention import attend

DATA = Path(__file__).resolve().parents[1] / "data" / "peers"
FILES = (
    "eagle/tree_buffers.json",
    "flashmla/dense_decode.json",
    "llama.cpp/tree_as_llama_batch.json",
    "medusa/tree_buffers.json",
    "sglang/build_tree_kernel_efficient.json",
    "sglang/reconstruct_indices_from_tree_mask.json",
    "sglang/tree_speculative_sampling_target_only.json",
    "sglang/verify_tree_greedy.json",
    "vllm/rejection_sampler_greedy.json",
)
# What a peer can say and our contract cannot, with the reason.
NOT_EXPRESSIBLE = {
    "sglang/tree_speculative_sampling_target_only.json: threshold_0_0": (
        "a threshold of 0 accepts a node's first child whatever the target says; ACC-1 follows the "
        "target alone"
    ),
    "flashmla/dense_decode.json: zero_len, requests 1 and 3": (
        "a query over no key at all returns 0 and lse +inf; by MASK-1 every row sees itself"
    ),
    "vllm/rejection_sampler_greedy.json: root token": (
        "vLLM keeps no root among its drafts, and the canonical form writes -1; a DraftTree's root "
        "is a token id, so the tests give it one"
    ),
}


def load(name):
    return json.loads((DATA / name).read_text())


def cases(name):
    """(case name, native, canonical tree, request) for every request of every case."""
    return [
        pytest.param(case["native"], tree, request, id=f"{case['name']}-{request}")
        for case in load(name)["cases"]
        for request, tree in enumerate(case["canonical"])
    ]


def tree_of(parents, tokens=None):
    """Where a peer's tree has no tokens, every node gets one of its own."""
    tokens = range(len(parents)) if tokens is None else tokens
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


def leaves(tree):
    return [i for i in range(len(tree)) if i not in tree.parents]


def links(tree):
    """SGLang's spelling: each node's first child and next sibling, in ascending order, or -1."""
    n = len(tree)
    children = [[i for i in range(n) if tree.parents[i] == node] for node in range(n)]
    first = [child[0] if child else -1 for child in children]
    following = {i: after for child in children for i, after in pairwise(child)}
    return first, [following.get(i, -1) for i in range(n)]


def parents_from_links(first, following):
    parents = [-1] * len(first)
    for node, child in enumerate(first):
        while child != -1:
            parents[child] = node
            child = following[child]
    return parents


def path_matrix(tree, order):
    """Medusa's and EAGLE's retrieve_indices: a row per leaf, padded with -1."""
    width = max(depths(tree)) + 1
    return [[*path(tree, i), *[-1] * (width - len(path(tree, i)))] for i in order]


def test_every_file_is_tested():
    found = sorted(str(file.relative_to(DATA)) for file in DATA.rglob("*.json"))

    assert sorted(FILES) == found


# Trees.


@pytest.mark.parametrize(
    ("native", "canonical", "request_"), cases("sglang/build_tree_kernel_efficient.json")
)
def test_sglang_tree_from_the_candidate_bank(native, canonical, request_):
    """Scores, tokens and parents per draft step, flattened: the best of them are the nodes."""
    topk = native["topk"]
    scores = np.concatenate([np.ravel(step[request_]) for step in native["score_list"]])
    bank = [token for step in native["token_list"] for token in step[request_]]
    above = [entry for step in native["parents_list"][:-1] for entry in step[request_]]
    expected, n = native["expected"], native["num_verify_tokens"]
    best = sorted(np.argsort(-scores, kind="stable")[: n - 1].tolist())
    parents = [-1] + [1 + best.index(above[i // topk]) if i >= topk else 0 for i in best]
    tokens = [native["bonus_tokens"][request_], *(bank[i] for i in best)]

    tree = tree_of(parents, tokens)

    mine = slice(n * request_, n * (request_ + 1))
    where = positions(tree, native["seq_lens"][request_])
    assert native["derived_top_scores_index"][request_] == best
    assert (canonical["parents"], canonical["tokens"]) == (list(tree.parents), list(tree.tokens))
    assert canonical["positions"] == expected["positions"][mine] == list(where)
    assert expected["draft_tokens"][mine] == list(tree.tokens)
    assert canonical["mask"] == visibility(tree).astype(int).tolist()
    first, following = links(tree)
    assert canonical["next_token"] == expected["retrieve_next_token"][request_] == first
    assert canonical["next_sibling"] == expected["retrieve_next_sibling"][request_] == following
    assert expected["retrieve_index"][request_] == [n * request_ + i for i in range(n)]


@pytest.mark.parametrize(
    ("native", "canonical", "request_"), cases("sglang/reconstruct_indices_from_tree_mask.json")
)
def test_sglang_tree_from_its_mask(native, canonical, request_):
    n = native["num_branch_token"]
    mask = np.array(native["tree_mask_flat"]).reshape(-1, n, n)[request_]
    # A row's deepest other node is its parent: the last by depth, which the row sums give.
    depth = mask.sum(axis=1)
    ancestors = [[j for j in np.flatnonzero(mask[i]) if j != i] for i in range(n)]
    parents = [max(above, key=lambda j: depth[j]) if above else -1 for above in ancestors]

    tree = tree_of(parents)

    first, following = links(tree)
    expected = native["expected"]
    assert canonical["parents"] == list(tree.parents)
    assert mask.tolist() == canonical["mask"] == visibility(tree).astype(int).tolist()
    assert expected["positions"] == canonical["positions"]
    assert expected["positions"] == list(positions(tree, native["seq_lens"][request_]))
    assert expected["retrieve_next_token"][request_] == canonical["next_token"] == first
    assert expected["retrieve_next_sibling"][request_] == canonical["next_sibling"] == following
    assert expected["retrieve_index"][request_] == list(range(n))


def choices_tree(native):
    """Rank paths sorted by (length, value) are the nodes; a prefix is the parent."""
    choices = sorted((tuple(c) for c in native["choices"]), key=lambda c: (len(c), c))
    number = {(): 0} | {choice: i for i, choice in enumerate(choices, start=1)}
    parents = [-1] + [number[choice[:-1]] for choice in choices]
    return tree_of(parents, native["tree_indices"])


@pytest.mark.parametrize(("native", "canonical", "request_"), cases("medusa/tree_buffers.json"))
def test_medusa_buffers(native, canonical, request_):
    tree = choices_tree(native)

    assert canonical["parents"] == list(tree.parents)
    assert canonical["depths"] == native["position_ids"] == list(depths(tree))
    assert native["retrieve_indices"] == path_matrix(tree, reversed(leaves(tree)))


@pytest.mark.parametrize(("native", "canonical", "request_"), cases("eagle/tree_buffers.json"))
def test_eagle_buffers(native, canonical, request_):
    tree = choices_tree(native)

    rows = path_matrix(tree, leaves(tree))

    padding_last = sorted(rows, key=lambda row: [len(tree) if i == -1 else i for i in row])
    assert canonical["parents"] == list(tree.parents)
    assert canonical["depths"] == native["position_ids"] == list(depths(tree))
    assert native["retrieve_indices"] == padding_last


@pytest.mark.parametrize(
    ("native", "canonical", "request_"), cases("llama.cpp/tree_as_llama_batch.json")
)
def test_llama_cpp_sequences(native, canonical, request_):
    """One sequence per leaf: a cell is seen if it has the query's first id and is not later."""
    tree, length = tree_of(canonical["parents"]), canonical["seq_len"]
    where = positions(tree, length)
    sequences = [
        [s for s, leaf in enumerate(leaves(tree)) if i in path(tree, leaf)]
        for i in range(len(tree))
    ]

    seen = [
        [mine[0] in other and where[j] <= where[i] for j, other in enumerate(sequences)]
        for i, mine in enumerate(sequences)
    ]

    accepted = canonical["accepted_nodes"]
    moves = commit_moves(accepted, length)
    after = native["after_accept"]
    assert native["leaves"] == leaves(tree)
    assert native["batch_seq_ids"] == sequences
    assert native["n_past"] == length
    assert native["batch_pos"] == canonical["positions"] == list(where)
    assert seen == visibility(tree).tolist()
    assert accepted == list(path(tree, accepted[-1]))
    assert after["seq_keep"] in sequences[accepted[-1]]  # any of its leaves will do
    assert after["seq_rm"]["p0"] == moves[-1][1] + 1  # the first position that is not kept


# Verdicts.

SAMPLING = "sglang/tree_speculative_sampling_target_only.json"


def argmax_rows(native, request_):
    """The target of every node, from the test's rule for the logits."""
    logits = np.ones((len(native["candidates"][request_]), native["vocab"]))
    listed = [
        (node, token) for b, node, token in native["target_logits"]["entries"] if b == request_
    ]
    logits[[node for node, _ in listed], [token for _, token in listed]] = 10.0
    for node in set(range(len(logits))) - {node for node, _ in listed}:
        logits[node, 18] = 10.0
    return logits.argmax(axis=1).tolist()


def sglang_tree(native, request_):
    """From first child and next sibling to parents."""
    parents = parents_from_links(
        native["retrieve_next_token"][request_], native["retrieve_next_sibling"][request_]
    )
    return tree_of(parents, native["candidates"][request_])


@pytest.mark.parametrize(
    ("native", "canonical", "request_"),
    [
        *cases("sglang/verify_tree_greedy.json"),
        *(case for case in cases(SAMPLING) if not case.id.startswith("threshold_0_0")),
    ],
)
def test_sglang_greedy_verdict(native, canonical, request_):
    tree, targets = sglang_tree(native, request_), argmax_rows(native, request_)

    acceptance = accept(tree, targets)

    n, expected = len(tree), native["expected"]
    predicted = [-1] * n
    for node in acceptance.path:
        predicted[node] = targets[node]
    rows = [n * request_ + node for node in acceptance.path]
    padded = rows + [-1] * (native["num_spec_step"] - len(rows))
    assert canonical["parents"] == list(tree.parents)
    assert native["target_predict"][request_] == canonical["target_argmax"] == targets
    assert canonical["accepted_nodes"] == list(acceptance.path)
    assert canonical["bonus_token"] == acceptance.bonus
    assert canonical["accepted_drafts"] == acceptance.accept_len - 1
    assert expected["accept_token_num"][request_] == acceptance.accept_len - 1
    assert expected["accept_index"][request_] == padded
    assert expected["predicts"][n * request_ : n * (request_ + 1)] == predicted


def test_sglang_threshold_zero_is_not_our_walk():
    """The named exception: without it, the first request would leave the target's path."""
    (case,) = (c for c in load(SAMPLING)["cases"] if c["name"] == "threshold_0_0")
    canonical = case["canonical"][0]
    tree = sglang_tree(case["native"], 0)

    acceptance = accept(tree, canonical["target_argmax"])

    assert f"{SAMPLING}: threshold_0_0" in NOT_EXPRESSIBLE
    assert [0, 1, 2] == canonical["accepted_nodes"]
    assert (0, 3, 4, 5) == acceptance.path


@pytest.mark.parametrize(
    ("native", "canonical", "request_"), cases("vllm/rejection_sampler_greedy.json")
)
def test_vllm_greedy_verdict(native, canonical, request_):
    drafts = native["spec_token_ids"][request_]
    tree = tree_of(range(-1, len(drafts)), [99, *drafts])

    acceptance = accept(tree, native["target_argmax_then_bonus"][request_])

    tokens = list(emitted(tree, acceptance))
    sampled = native["expected"]["sampled_token_ids"][request_]
    assert canonical["parents"] == list(tree.parents)
    assert canonical["accepted_nodes"] == list(acceptance.path)
    assert canonical["accepted_drafts"] == acceptance.accept_len - 1
    assert canonical["bonus_token"] == acceptance.bonus
    assert canonical["emitted"] == tokens
    assert sampled == tokens + [-1] * (len(sampled) - len(tokens))


def test_vllm_canonical_root_is_not_a_token():
    tokens = load("vllm/rejection_sampler_greedy.json")["cases"][0]["canonical"][0]["tokens"]

    with pytest.raises(TreeError) as refusal:
        tree_of(range(-1, len(tokens) - 1), tokens)

    assert "tokens[0] = -1; expected a token id >= 0" == str(refusal.value)


# Attention.


def flashmla(name):
    with np.load(DATA / "flashmla" / name) as file:
        return {key: file[key] for key in file.files}


def gamma(n, unit):
    """The relative error of n roundings (Higham, Accuracy and Stability, 3.1)."""
    return n * unit / (1 - n * unit)


FLASHMLA = load("flashmla/dense_decode.json")["cases"]


@pytest.mark.parametrize("case", FLASHMLA, ids=[case["name"] for case in FLASHMLA])
def test_flashmla_dense_decode(case):
    """Absorbed queries over a paged cache with NaN behind every length: w_kc is the identity.

    The peer computed in float32, so the bound is its own: a score is a dot product of d terms and
    a scaling; the softmax turns an error of its exponents into a relative one of its weights, on
    top of exp (2 ulp), the sum and the division; the output is a dot product of s terms.
    """
    data = flashmla(case["file"])
    q, keys, dv = data["q"].astype(np.float64), data["blocked_k"].astype(np.float64), case["dv"]
    scale, heads_per_key = 1 / np.sqrt(case["d"]), case["h_q"] // case["h_kv"]
    compared, unit = 0, 2.0**-24
    for b, length in enumerate(case["cache_seqlens"]):
        rows = keys[data["block_table"][b]].reshape(-1, case["h_kv"], case["d"])
        first_unseen = [
            length - case["s_q"] + 1 + j if case["causal"] else length for j in range(case["s_q"])
        ]
        if length == 0:
            assert "flashmla/dense_decode.json: zero_len, requests 1 and 3" in NOT_EXPRESSIBLE
            assert (case["name"], True) == ("zero_len", b in (1, 3))
            continue
        visible = np.arange(len(rows)) < np.array(first_unseen)[:, None]
        for h in range(case["h_q"]):
            query, row = q[b, :, [h]].swapaxes(0, 1), rows[:, h // heads_per_key]
            assert np.isnan(row[length:]).all()

            scores, out = attend(
                FIXED,
                query[..., :dv],
                query[..., dv:],
                row[:, :dv],
                row[:, dv:],
                visible,
                np.eye(dv)[None],
                scale,
            )

            clean = np.nan_to_num(row)
            top = scores.max(axis=-1)
            lse = top + np.log(np.exp(scores - top[..., None]).sum(axis=-1))
            p = np.exp(scores - lse[..., None])
            score_error = (
                gamma(case["d"] + 2, unit)
                * scale
                * np.einsum("nhd,sd->nhs", abs(query), abs(clean)).max(axis=-1)
            )
            lse_bound = score_error + gamma(length + 3, unit) + 2 * unit * abs(lse)
            relative = 2 * score_error + gamma(2 * length + 6, unit)
            out_bound = relative[..., None] * np.einsum("nhs,sc->nhc", p, abs(clean[:, :dv]))
            assert (abs(out[:, 0] - data["out"][b, :, h]) <= out_bound[:, 0]).all()
            assert (abs(lse[:, 0] - data["lse"][b, h]) <= lse_bound[:, 0]).all()
            assert out_bound.max() < 1e-4 * abs(clean).max()  # the bound itself says something
            compared += 1
    assert case["h_q"] * sum(length > 0 for length in case["cache_seqlens"]) == compared


def test_flashmla_rows_without_keys_are_the_named_exception():
    data = flashmla("dense_decode_zero_len.npz")

    empty = data["cache_seqlens"] == 0

    assert [False, True, False, True] == empty.tolist()
    assert np.isposinf(data["lse"][empty]).all()
    assert (data["out"][empty] == 0).all()


@pytest.mark.parametrize("name", NOT_EXPRESSIBLE)
def test_an_exception_names_a_file(name):
    assert name.split(": ")[0] in FILES
