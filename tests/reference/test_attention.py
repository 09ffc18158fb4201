"""Absorbed attention: the expanded form's values, no read of the invisible, relative positions."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.reference.arithmetic import FAST, FIXED
from kdtr.reference.attention import attend, latents, project_out, queries
from kdtr.reference.expanded import attend_expanded
from kdtr.reference.rotary import rotary_tables, rotate
from kdtr.reference.tree import tree_mask
from kdtr.reference.weights import AttentionWeights

LAWS = settings(derandomize=True, deadline=None, max_examples=60, database=None)
UNIT = 2.0**-53

sizes = st.fixed_dictionaries(
    {letter: st.integers(1, 9) for letter in "hdcv"} | {"half": st.integers(1, 4)}
)


def draw_case(draw_tree, sizes, seed, n, committed_len):
    """Random operands of attend over a random tree behind committed_len slots."""
    rng = np.random.default_rng(seed)
    h, d, c, v, r = (*(sizes[letter] for letter in "hdcv"), 2 * sizes["half"])
    tree = draw_tree(rng, n, 50, 7)
    n = len(tree)
    s = committed_len + n
    return SimpleNamespace(
        q_nope=rng.standard_normal((n, h, d)),
        q_pe=rng.standard_normal((n, h, r)),
        c_kv=rng.standard_normal((s, c)),
        k_pe=rng.standard_normal((s, r)),
        visible=tree_mask(tree, committed_len),
        w_kc=rng.standard_normal((h, d, c)),
        w_vc=rng.standard_normal((h, c, v)),
        scale=(d + r) ** -0.5,
    )


def absorbed(case, arithmetic=FIXED, **changed):
    given = {**vars(case), **changed}
    given.pop("w_vc")
    return attend(arithmetic, **given)


@LAWS
@given(
    sizes=sizes,
    seed=st.integers(0, 2**32),
    n=st.integers(1, 12),
    committed_len=st.integers(0, 9),
    arithmetic=st.sampled_from([FIXED, FAST]),
)
def test_absorbed_equals_expanded(draw_tree, sizes, seed, n, committed_len, arithmetic):
    """MLA-3: to 1e-13 of the largest output; the sums have at most some 40 terms."""
    case = draw_case(draw_tree, sizes, seed, n, committed_len)

    _, out_latent = absorbed(case, arithmetic)
    out = arithmetic.contract("nhc,hcv->nhv", out_latent, case.w_vc)

    expanded = attend_expanded(arithmetic, **vars(case))
    assert expanded.shape == out.shape
    assert abs(out - expanded).max() <= 1e-13 * abs(case.c_kv).max() * abs(case.w_vc).sum(1).max()


@LAWS
@given(
    sizes=sizes, seed=st.integers(0, 2**32), n=st.integers(1, 12), committed_len=st.integers(0, 9)
)
def test_nan_in_invisible_rows_changes_no_bit(draw_tree, sizes, seed, n, committed_len):
    """MASK-3, for every row alone: all that it does not see is NaN."""
    case = draw_case(draw_tree, sizes, seed, n, committed_len)
    scores, out_latent = absorbed(case)

    for i, row in enumerate(case.visible):
        hidden = ~row[:, None]
        poisoned_scores, poisoned = absorbed(
            case,
            q_nope=case.q_nope[i : i + 1],
            q_pe=case.q_pe[i : i + 1],
            visible=row[None],
            c_kv=np.where(hidden, np.nan, case.c_kv),
            k_pe=np.where(hidden, np.nan, case.k_pe),
        )

        np.testing.assert_array_equal(poisoned[0], out_latent[i])
        np.testing.assert_array_equal(poisoned_scores[0], scores[i])


@LAWS
@given(sizes=sizes, seed=st.integers(0, 2**32), n=st.integers(2, 12))
def test_a_tree_row_has_the_bits_of_its_path_alone(draw_tree, sizes, seed, n):
    """FWD-4 in one layer: slots between those that a row sees do not enter its sums."""
    case = draw_case(draw_tree, sizes, seed, n, 3)
    _, out_latent = absorbed(case)
    seen = np.flatnonzero(case.visible[-1])

    _, alone = absorbed(
        case,
        q_nope=case.q_nope[-1:],
        q_pe=case.q_pe[-1:],
        c_kv=case.c_kv[seen],
        k_pe=case.k_pe[seen],
        visible=np.ones((1, len(seen)), dtype=bool),
    )

    np.testing.assert_array_equal(out_latent[-1], alone[0])


def test_scores_are_minus_infinity_exactly_where_invisible(draw_tree):
    sizes = {"h": 3, "d": 4, "c": 5, "v": 2, "half": 2}
    case = draw_case(draw_tree, sizes, 5, 9, 4)

    scores, _ = absorbed(case)

    expected = np.broadcast_to(~case.visible[:, None], scores.shape)
    np.testing.assert_array_equal(scores == -np.inf, expected)
    assert (~case.visible).any()
    assert np.isfinite(scores[~expected]).all()


def test_a_row_that_sees_itself_alone_returns_its_own_latent(draw_tree):
    case = draw_case(draw_tree, {"h": 3, "d": 4, "c": 5, "v": 2, "half": 2}, 6, 7, 0)
    n = len(case.q_nope)

    _, out_latent = absorbed(case, visible=np.eye(n, dtype=bool))

    expected = np.broadcast_to(case.c_kv[:, None], out_latent.shape)
    np.testing.assert_array_equal(out_latent, expected)


def test_scores_of_a_thousand_do_not_overflow(draw_tree):
    case = draw_case(draw_tree, {"h": 2, "d": 4, "c": 5, "v": 2, "half": 2}, 7, 7, 2)

    scores, out_latent = absorbed(case, scale=1e4)

    assert scores.max() > 1000
    assert np.isfinite(out_latent).all()


# Rotary embedding


@LAWS
@given(
    seed=st.integers(0, 2**32),
    query=st.integers(0, 10**6),
    key=st.integers(0, 10**6),
    shift=st.integers(0, 2**31),
    interleave=st.booleans(),
)
def test_a_score_depends_on_the_distance_alone(small, seed, query, key, shift, interleave):
    """Each table entry errs by at most 7 u and is used in a product and a sum: 9 u per factor."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, small.qk_rope_head_dim))

    def score(offset):
        cos, sin = rotary_tables(small, np.array([query, key]) + offset)
        turned_q = rotate(q, cos[0], sin[0], interleave=interleave)
        turned_k = rotate(k, cos[1], sin[1], interleave=interleave)
        return turned_q @ turned_k

    difference = abs(score(0) - score(shift))

    assert difference <= 2 * (9 + 9 + len(q)) * UNIT * abs(q).sum() * abs(k).sum()


def test_a_score_depends_on_the_distance(small):
    q = np.ones(small.qk_rope_head_dim)
    cos, sin = rotary_tables(small, np.arange(3))

    turned = rotate(q, cos, sin, interleave=True)

    assert abs(turned[0] @ turned[1] - turned[0] @ turned[2]) > 0.1


def test_rotation_turns_pairs_counterclockwise_and_returns_them_half_split():
    """MLA-7, by hand: pair (1, 2) by a quarter turn, pair (3, 4) by a half turn."""
    cos, sin = np.array([0.0, -1.0]), np.array([1.0, 0.0])

    interleaved = rotate(np.array([1.0, 2.0, 3.0, 4.0]), cos, sin, interleave=True)
    halves = rotate(np.array([1.0, 3.0, 2.0, 4.0]), cos, sin, interleave=False)

    assert [-2, -3, 1, -4] == interleaved.tolist()
    assert [-2, -3, 1, -4] == halves.tolist()


def test_position_zero_only_reorders(small):
    x = np.arange(1.0, 1 + small.qk_rope_head_dim)
    cos, sin = rotary_tables(small, np.array([0]))

    interleaved = rotate(x, cos[0], sin[0], interleave=True)
    halves = rotate(x, cos[0], sin[0], interleave=False)

    assert [*x[0::2], *x[1::2]] == interleaved.tolist()
    assert x.tolist() == halves.tolist()


# Projections


def draw_projections(config, seed):
    rng = np.random.default_rng(seed)
    c, h, low = config, config.num_attention_heads, config.q_lora_rank
    return AttentionWeights(
        q_a=None if low is None else rng.standard_normal((c.hidden_size, low)),
        q_a_norm=None if low is None else rng.standard_normal(low),
        q=rng.standard_normal((low or c.hidden_size, h * c.qk_head_dim)),
        kv_a=rng.standard_normal((c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)),
        kv_a_norm=rng.standard_normal(c.kv_lora_rank),
        w_kc=rng.standard_normal((h, c.qk_nope_head_dim, c.kv_lora_rank)),
        w_vc=rng.standard_normal((h, c.kv_lora_rank, c.v_head_dim)),
        o=rng.standard_normal((h * c.v_head_dim, c.hidden_size)),
    )


def normed(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("low_rank", [None, 14])
def test_queries_and_latents_in_plain_matrix_products(low_rank, small):
    """MLA-1, MLA-2: nope before rope in each head, a norm on the latent part only."""
    config = small.replace(q_lora_rank=low_rank, latent_norm_eps=0.3)
    weights, rng = draw_projections(config, 8), np.random.default_rng(9)
    x = rng.standard_normal((5, config.hidden_size))
    cos, sin = rotary_tables(config, np.array([0, 3, 1, 9, 40]))

    q_nope, q_pe = queries(FIXED, config, weights, x, cos, sin)
    c_kv, k_pe = latents(FIXED, config, weights, x, cos, sin)

    low = x if low_rank is None else normed(x @ weights.q_a, weights.q_a_norm, 0.3)
    q = (low @ weights.q).reshape(5, config.num_attention_heads, -1)
    d, c = config.qk_nope_head_dim, config.kv_lora_rank
    kv = x @ weights.kv_a
    turn = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(q_nope, q[..., :d], **turn)
    np.testing.assert_allclose(
        q_pe, rotate(q[..., d:], cos[:, None], sin[:, None], interleave=True), **turn
    )
    np.testing.assert_allclose(c_kv, normed(kv[:, :c], weights.kv_a_norm, 0.3), **turn)
    np.testing.assert_allclose(k_pe, rotate(kv[:, c:], cos, sin, interleave=True), **turn)


def test_heads_are_joined_in_order_before_the_output_projection(small):
    weights = draw_projections(small, 10)
    out_latent = np.random.default_rng(11).standard_normal(
        (4, small.num_attention_heads, small.kv_lora_rank)
    )

    out = project_out(FIXED, weights, out_latent)

    heads = [out_latent[:, h] @ weights.w_vc[h] for h in range(small.num_attention_heads)]
    expected = np.concatenate(heads, axis=1) @ weights.o
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
