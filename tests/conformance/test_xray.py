"""X-rays: honest engines read clean, and faults are named, from logits alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xray_minimal
from hostile_engines import Hostile, changing

from kdtr.conformance import load_engine
from kdtr.conformance.mutants.planting import on_load
from kdtr.conformance.xray import XrayModel, XrayResult, run_xray, xray_models
from kdtr.conformance.xray_drive import ask
from kdtr.conformance.xray_fit import Precision
from kdtr.conformance.xray_judge import judge_attention
from kdtr.conformance.xray_models import RESERVED, attention_models
from kdtr.conformance.xray_reading import Reading, read_top_k
from kdtr.conformance.xray_sessions import scripts
from kdtr.contract import UnsupportedError

DTYPES = ("float32", "bfloat16", "float16")


@cache
def _models() -> dict[str, XrayModel]:
    """Each generated once."""

    def kept(model: XrayModel) -> XrayModel:
        tensors = model.tensors()
        return replace(model, generate=lambda: tensors)

    return {model.name: kept(model) for model in xray_models()}


def xray(engine: object, *names: str) -> XrayResult:
    chosen = [model for name, model in _models().items() if not names or name in names]
    return run_xray(engine, models=chosen)  # type: ignore[arg-type]


def sentences(result: XrayResult) -> list[str]:
    return [f"{one.stage}: {one.summary}" for one in result.findings]


# Honest engines


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_host_engine_reads_clean(dtype: str) -> None:
    result = xray(load_engine("host", {"dtype": dtype}))

    assert [] == sentences(result)
    assert result.passed
    assert {"pass"} == {model.verdict.value for model in result.models}


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_it_does_behind_the_least_of_verbs(dtype: str) -> None:
    result = xray(xray_minimal.make_engine(dtype=dtype))

    assert [] == sentences(result)
    assert result.passed


@pytest.mark.parametrize("arithmetic", ["fast", *DTYPES])
def test_the_reference_reads_clean(arithmetic: str) -> None:
    """`fast` is float64; the fixed order costs more and changes only last bits."""
    names = ("visible", "attention", "norms", "routing", "routing-raw", "routing-softmax")
    all_of_it = () if arithmetic == "fast" else names

    result = xray(load_engine("reference", {"arithmetic": arithmetic}), *all_of_it)

    assert [] == sentences(result)
    assert result.passed


def test_norms_that_sum_in_one_run_are_honest_at_the_widths_of_kimi_k2() -> None:
    engine = load_engine("host")

    def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        squares = np.add.accumulate(x * x, axis=-1, dtype=np.float32)[..., -1:]  # one by one
        return x / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(eps)) * weight

    engine.kernels.rms_norm = rms_norm  # type: ignore[attr-defined]  # of the host engine

    result = xray(engine, "k2")

    assert [] == sentences(result)
    assert result.models[0].headroom is not None
    assert 0.1 < result.models[0].headroom < 0.5


@pytest.mark.parametrize("factor", [0.99, 1.00002])
def test_the_bound_of_such_norms_hides_no_fault_of_scale(factor: float) -> None:
    """In float32, at the widths where norms widen the bound most, a scale that is off by 2 in
    100,000 is named. Scores of both signs show it twice, 2 * 4.2 * 2e-5, which is 7.6 bounds."""
    engine = load_engine("host")
    on_load(engine, lambda one: replace(one, softmax_scale=one.softmax_scale * factor))

    result = xray(engine, "k2")

    assert [f"scores: the softmax scale is {factor} times what it should be"] == sentences(result)
    assert ("MLA-4",) == result.findings[0].rules
    assert result.models[0].headroom is not None
    assert 5 < result.models[0].headroom


def test_the_bound_of_such_norms_hides_no_fault_of_rotation() -> None:
    engine = load_engine("host")
    on_load(engine, lambda one: replace(one, rotary_factor=1.00002))

    result = xray(engine, "k2")

    assert ["k_pe: cos and sin are 1.00002 times what they should be"] == sentences(result)
    assert ("MLA-5",) == result.findings[0].rules


# Faults

NAMED = {
    # planted fault: (model that shows it, finding)
    "sibling_visible": ("visible", "mask: a row also sees its earlier siblings"),
    "one_bit": ("visible", "mask: row 5 (path 0-5) also saw node 4"),
    "visibility_transposed": (
        "visible",
        "mask: the mask is transposed: a row sees its descendants instead of its ancestors",
    ),
    "first_mask_of_a_size": (
        "visible",
        "mask: a tree gets the mask of the first tree with as many nodes",
    ),
    "stale_row_visible": (
        "visible",
        "mask: a row also sees slot L+M behind the tree, once a rejected node was left there",
    ),
    "no_embedding_at_zero": (
        "visible",
        "embedding: the row at position 0 holds no token: its embedding is zero",
    ),
    "position_by_index": ("attention", "positions: positions = L + index, not L + depth"),
    "root_low": (
        "attention",
        "positions: every node is one too low against the prefix: the root is at L-1",
    ),
    "drafts_high": ("attention", "positions: every node but the root is one too high"),
    "chunks_from_zero": (
        "attention",
        "positions: every chunk of a prompt starts at position 0",
    ),
    "no_compaction": (
        "visible",
        "cache_c_kv: accepted rows are not moved: slots L.. hold nodes 0, 1, ..., whatever the "
        "path",
    ),
    "last_move_skipped": ("visible", "cache_c_kv: the last accepted row is not moved"),
    "length_grows_by_tree": (
        "visible",
        "cache_c_kv: accepted rows are moved, but L grows by the tree's size",
    ),
    "one_row_too_many": (
        "visible",
        "cache_c_kv: one row too many stays after a commit: L grows by accept_len + 1",
    ),
    "root_not_counted": (
        "visible",
        "cache_c_kv: the last accepted row is lost: L grows by accept_len - 1",
    ),
    "only_c_kv_moves": (
        "attention",
        "cache_k_pe: only c_kv is moved: the accepted rows have the keys (k_pe) that lay there",
    ),
    "rotated_again": (
        "attention",
        "cache_k_pe: moved rows are rotated once more, by their slot",
    ),
    "one_layer_for_all": (
        "layers",
        "cache_c_kv: in layer 0, 1 only: committed rows are read as layer 2 wrote them",
    ),
    "layer_1_sees_siblings": (
        "layers",
        "mask: in layer 1 only: a row also sees its earlier siblings",
    ),
    "layer_2_not_scaled": (
        "layers",
        "scores: in layer 2 only: the softmax scale is that of kv_lora_rank + qk_rope_head_dim = "
        "264, should be that of qk_nope_head_dim + qk_rope_head_dim = 20",
    ),
    "scale_of_576": (
        "k2",
        "scores: the softmax scale is that of kv_lora_rank + qk_rope_head_dim = 576, should be "
        "that of qk_nope_head_dim + qk_rope_head_dim = 192",
    ),
    "no_mscale": (
        "k2",
        "scores: the softmax scale is without YaRN's mscale^2, should be with YaRN's mscale^2",
    ),
    "odd_scale": ("k2", "scores: the softmax scale is 0.6 times what it should be"),
    "no_amplitude": ("half-split", "k_pe: cos and sin lack YaRN's factor"),
    "half_split_pairs": (
        "attention",
        "k_pe: rotation takes pairs (i, i + r/2), the model has (2i, 2i+1)",
    ),
    "backwards": (
        "attention",
        "k_pe: rotation turns backwards: the members of the pairs are swapped, or sin has the "
        "wrong sign",
    ),
    "k_pe_of_wrong_columns": (
        "attention",
        "k_pe: distances change no score: nothing is rotated, or q_pe or k_pe is zero",
    ),
    "heads_reversed": ("attention", "attn_out: w_vc: heads in reverse order"),
    "keys_of_next_head": ("attention", "scores: w_kc: head h has those of head h+1"),
    "final_norm_twice": ("norms", "final_hidden: the final norm is applied twice"),
    "latent_eps_of_other_norms": (
        "norms",
        "c_kv: the kv_a norm, the q_a norm use rms_norm_eps = 0.015625, should be "
        "latent_norm_eps = 1e-06",
    ),
    "main_eps": (
        "norms",
        "q_nope: the input norm, the post-attention norm, the final norm use latent_norm_eps = "
        "1e-06, should be rms_norm_eps = 0.015625",
    ),
    "gate_and_up": (
        "norms",
        "mlp_out: gate and up are exchanged: the MLP is gate silu(up), should be up silu(gate)",
    ),
    "softmax_router": (
        "routing",
        "router_scores: router scores are the softmax of the logits, should be the sigmoid",
    ),
    "groups_ignored": ("routing", "expert_ids: all groups stay eligible"),
    "groups_masked_with_zero": (
        "routing",
        "expert_ids: experts of dropped groups compete with 0, should be excluded with -inf",
    ),
    "highest_tie": ("routing-softmax", "expert_ids: ties go to the highest id"),
    "weights_from_biased": (
        "routing",
        "expert_weights: the correction bias is inside the expert weights",
    ),
    "normalised_raw": (
        "routing-raw",
        "expert_weights: expert weights are normalised, although norm_topk_prob is false",
    ),
    "scaled_twice": (
        "routing",
        "expert_weights: routed_scaling_factor = 2.5 is applied twice",
    ),
    "not_scaled": ("routing", "expert_weights: routed_scaling_factor = 2.5 is not applied"),
    "first_weight_for_all": (
        "routing",
        "expert_weights: every chosen expert gets the first one's weight",
    ),
    "shared_expert_missing": ("routing", "mlp_out: the shared experts are missing"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_is_named_from_logits_alone(fault: str, dtype: str) -> None:
    model, sentence = NAMED[fault]

    result = xray(xray_minimal.make_engine(fault=fault, dtype=dtype), model)

    integers = [text for text in sentences(result) if not text.startswith("root: ")]
    assert [sentence] == integers
    assert not result.passed


def test_a_fault_without_a_pattern_is_told_in_words() -> None:
    result = xray(xray_minimal.make_engine(fault="one_node_late"), "attention")

    assert ["positions: row 2 (path 0-2): node 2 was rotated at L+2, should be L+1"] == sentences(
        result
    )


def test_rounding_that_was_not_declared_is_told_as_that() -> None:
    result = xray(xray_minimal.make_engine(fault="bfloat16_scores"), "attention")

    (text,) = sentences(result)
    assert text.startswith("scores: right, but only to the rounding of bfloat16")


def test_a_fault_that_many_models_show_is_told_once() -> None:
    result = xray(xray_minimal.make_engine(fault="position_by_index"))

    (finding,) = result.findings
    assert "k2" == finding.place.case
    assert "row 2 (path 0-2), also in attention, half-split, layers" == finding.where
    assert "norms: not judged: it needs attention to be right" in [
        f"{model.name}: {model.note}" for model in result.models
    ]


def test_a_root_that_is_not_the_bonus_ends_the_session() -> None:
    result = xray(xray_minimal.make_engine(fault="root_from_path"), "visible")

    (text,) = sentences(result)
    assert text.startswith("root: after commit() the root is 49; expected 56, the bonus")


@pytest.mark.parametrize(
    ("verb", "value", "text"),
    [
        ("root", str, "root: root returned a str; expected an integer; and 4 more times"),
        ("root", float, "root: root returned a float; expected an integer; and 4 more times"),
        (
            "root",
            lambda _: None,
            "root: after prefill() there is no root (None); expected 127, whose logit is twice any "
            "other's; and 22 more times",
        ),
        (
            "committed_len",
            str,
            "committed_len: committed_len returned a str; expected an integer; and 4 more times",
        ),
        (
            "committed_len",
            lambda _: None,
            "committed_len: committed_len returned None; expected an integer; and 4 more times",
        ),
        ("prefill", lambda _: None, "root: prefill() returned None; expected an integer; and 4"),
        ("prefill", str, "root: prefill() returned a str; expected an integer; and 4 more times"),
        (
            "prefill",
            lambda token: (token + 1) % 128,
            "root: prefill() returned 0, the session's root is 127; expected one; and 4 more times",
        ),
        ("verify", lambda _: None, "verify: verify() returned None; expected a Verified; and 4"),
        ("verify", str, "verify: verify() returned a str; expected a Verified; and 4 more times"),
        (
            "verify",
            lambda v: replace(v, logits=v.logits.astype(np.longdouble)),
            f"verify: verify() logits is {np.dtype(np.longdouble)}; expected floating-point",
        ),
    ],
)
def test_answers_of_another_type_are_named(
    verb: str, value: Callable[[Any], Any], text: str
) -> None:
    """As text, 5 and '5' read the same."""
    result = xray(Hostile({verb: changing(value)}), "visible")

    (told,) = sentences(result)
    assert told.startswith(text)


def test_lost_rows_are_unreadable_and_no_crash() -> None:
    result = xray(xray_minimal.make_engine(fault="four_rows_written"), "visible")

    assert "logits: 47 of 91 rows cannot be read: 128 logits are inf or NaN" in sentences(result)


def test_logits_with_an_offset_are_told_as_that() -> None:
    engine = xray_minimal.make_engine()
    model = next(one for one in attention_models() if one.name == "visible")
    loaded = engine.load((model.config, _models()["visible"].tensors()))
    answers = ask(loaded, engine.info, scripts(), model.config.vocab_size).verified
    lifted = [replace(answer, logits=answer.logits + 0.5) for answer in answers]

    (finding,) = judge_attention(model, lifted, Precision("float32")).findings

    assert finding.summary.startswith("logit 125, of a token that nobody feeds, is never zero")


# Log-probabilities


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "name"), [("", "attention"), ("sibling_visible", "visible"), ("root_low", "k2")]
)
def test_top_k_log_probabilities_are_enough(fault: str, name: str, dtype: str) -> None:
    engine = xray_minimal.make_engine(fault=fault, dtype=dtype)
    model = next(one for one in attention_models() if one.name == name)
    loaded = engine.load((model.config, _models()[name].tensors()))
    answers = ask(loaded, engine.info, scripts(), model.config.vocab_size)

    def listed(row: np.ndarray) -> Reading:
        """The largest, down to the first reserved token among the ties at 0."""
        row = row.astype(np.float64)
        row = (row - row.max() - np.log(np.exp(row - row.max()).sum())).astype(np.float32)
        order = [*np.argsort(-row, kind="stable")[: np.count_nonzero(row > row[RESERVED])]]
        return read_top_k([(int(t), float(row[t])) for t in (*order, RESERVED)], len(row))

    judged = judge_attention(
        model,
        answers.verified,
        Precision.of(engine.info.profile),
        [[listed(row) for row in answer.logits] for answer in answers.verified],
    )

    wanted = {
        "": [],
        "sibling_visible": ["a row also sees its earlier siblings"],
        "root_low": ["every node is one too low against the prefix: the root is at L-1"],
    }
    assert wanted[fault] == [finding.summary for finding in judged.findings]


# The command


def test_the_command_tells_a_fault_and_how_to_see_it_again(
    kdtr: Callable[..., SimpleNamespace],
) -> None:
    options = ("--engine-option", "fault=root_low", "--model", "attention")
    run = kdtr("xray", "--engine", "xray_minimal:make_engine", *options)

    assert 1 == run.code
    assert "FAIL  attention / y-tree / round0: positions: every node is one too low" in run.out
    assert "POS-1     Node i is at position L + depth(i)" in run.out
    assert "--engine-option fault=root_low --model attention" in run.out
    assert "x-ray FAILED: 1 finding;" in run.out


def test_the_command_passes_an_honest_engine(kdtr: Callable[..., SimpleNamespace]) -> None:
    run = kdtr("xray", "--engine", "host", "--model", "visible", "--dtype", "float16")

    assert 0 == run.code
    assert "x-ray passed: 0 findings; 11648 logits of 91 rows" in run.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "EngineError: kdtr xray needs --engine NAME, --export DIR or both"),
        (("--engine", "host", "--model", "no"), "CaseError: no x-ray model no; there are visible"),
    ],
)
def test_what_the_command_refuses(
    kdtr: Callable[..., SimpleNamespace], words: tuple[str, ...], text: str
) -> None:
    run = kdtr("xray", *words)

    assert 2 == run.code
    assert text in run.err


def test_an_engine_without_verify_is_refused() -> None:
    engine = xray_minimal.make_engine()
    lame = SimpleNamespace(info=replace(engine.info, verbs=frozenset({"prefill"})))

    with pytest.raises(UnsupportedError, match="does not offer commit, verify"):
        xray(lame)


def test_models_are_exported_and_read_back(
    kdtr: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    run = kdtr("xray", "--export", tmp_path / "models", "--model", "visible", "--model", "norms")

    assert 0 == run.code
    assert ["norms", "norms.kdtr", "visible", "visible.gguf", "visible.kdtr"] == sorted(
        path.name for path in (tmp_path / "models").iterdir()
    )
    assert re.search(r"norms\.gguf not written: .*latent_norm_eps = 1e-06", run.out)
    engine = load_engine("host")
    for form in ("visible", "visible.kdtr"):
        model = engine.load(tmp_path / "models" / form)
        assert _models()["visible"].config == model.config


def test_a_model_that_does_not_close_is_an_error() -> None:
    """However clean its logits are: a run with an error is none that passed."""

    class Stuck:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def close(self) -> None:
            raise RuntimeError("device busy")

    class Engine:
        info = load_engine("host").info

        def load(self, source: object) -> Stuck:
            return Stuck(load_engine("host").load(source))  # type: ignore[arg-type]

    result = xray(Engine(), "visible")

    assert not result.passed
    assert ["ERROR"] == [model.verdict.name for model in result.models]
    assert ["close: close() raised RuntimeError: device busy"] == sentences(result)
