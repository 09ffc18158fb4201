"""Findings say why they look so: every planted fault by name, with everything shown and with logits
alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planted_faults import FAULTS
from planted_faults import make_engine as planted

from kdtr.conformance import Finding, GateResult
from kdtr.contract import rules

ENGINE = "planted_faults:make_engine"
Judge = Callable[..., GateResult]

# What the first hint says of each fault, and of which bundle and case, where that is not the one
# that planted_faults.py names.
SAYS = {
    "root_low": "the root is at L - 1 = 12, should be at L = 13",
    "position_by_index": "positions are L + index, as if the tree were a chain",
    "drafts_high": "every node but the root is one too high",
    "sibling_visible": "a node sees its earlier siblings",
    "visibility_transposed": "transposed: a node sees its descendants, not its ancestors",
    "first_mask_of_a_size": "that of round3, which had 13 nodes too",
    "stale_row_visible": "also reads slot 25, behind its own: the stale row of node 9 of round1",
    "rejected_row_kept": "every row also reads the row of a rejected node, node 1 of round0",
    "no_compaction": "the accepted rows were not moved: slot L + k holds node k, not path[k]",
    "only_c_kv_moves": "only c_kv was moved; k_pe stayed",
    "rotated_again": "the moved keys were rotated once more, by the position of their new slot",
    "last_move_skipped": "the last move is missing: the deepest accepted node was not moved",
    "rows_through_bfloat16": "rows were rounded to bfloat16 on the way: no pure copy",
    "rows_through_float16": "rows were rounded to float16 on the way: no pure copy",
    "one_layer_for_all": "every layer is written to the cache of layer 0",
    "pages_contiguous": "rows past the end of a page of 3 go astray",
    "prefill_rows_reversed": "the 13 rows of this forward are written back to front",
    "four_rows_written": "only the first 4 rows are written of 5: slot 17 holds",
    "lone_root_not_written": "the one row of this forward is not written: slot 13",
    "bonus_of_last_row": "the bonus is the target of the last row, node 3",
    "first_child_only": "of each node's children only the first can be accepted",
    "first_child_accepted": "the first child of the root is accepted, whatever its token",
    "length_grows_by_tree": "L grew by the whole tree of 4; should grow by accept_len = 3",
    "root_not_counted": "L grew by the 2 accepted drafts alone, the root was not counted",
    "root_from_path": "the next root is the last accepted token, that of node 3",
    "scale_from_latent": "the softmax scale is (kv_lora_rank + qk_rope_head_dim)^-0.5 = 80^-0.5",
    "no_embedding_at_zero": "the embedding of the row at position 0 is zero",
    "half_split_pairs": "rotated in pairs (i, i + r/2), should be (2i, 2i + 1)",
    "k_pe_of_wrong_columns": "k_pe is taken from columns 48..63 of kv_a, the end of the latent",
    "columns_swapped": "the columns of kv_a are taken as [k_pe 16 | c_kv 64]",
    "softmax_router": "router scores are by softmax, should be by sigmoid",
    "groups_ignored": "groups are ignored: the 3 best of all 8 experts are chosen",
    "groups_masked_with_zero": "the groups that were not chosen compete with 0",
    "weights_from_biased": "expert weights come from the biased scores",
    "scaled_twice": "expert weights are multiplied by routed_scaling_factor = 1.7 twice",
    "first_weight_for_all": "every chosen expert gets the weight of the first",
    "shared_expert_missing": "the shared expert is missing",
    "final_norm_twice": "the final norm is applied twice",
    "latent_eps_of_other_norms": "the q_a and kv_a norms take eps rms_norm_eps = 2e-05",
    "main_eps": "the input, post-attention and final norms take eps latent_norm_eps = 1e-06",
    "limit_ignored": "the round's limit is ignored (max_emitted = 2): the walk is 0-1-2-3",
    "no_stop_tokens": "the round's limit is ignored (stop tokens ",
    "no_max_emitted": "the round's limit is ignored (max_emitted = 2)",
    "last_maximum": "of equal top logits the highest id is taken",
    "writes_committed_row": "1 number of committed rows (slots 0) changed by up to 0.5",
    "flips_last_bit": "changed by one unit of the last place",
}
IN_CORPUS = {
    "groups_masked_with_zero": ("negative-bias", "trees"),
    "main_eps": ("base", "trees"),
    "limit_ignored": ("base", "limits"),
    "no_stop_tokens": ("base", "limits"),
    "no_max_emitted": ("base", "limits"),
    "last_maximum": ("token-ties", "ar"),
}


def test_every_planted_fault_has_its_words() -> None:
    assert set(FAULTS) == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_the_first_hint_names_the_fault(judge: Judge, tiny: Path, corpus: Path, name: str) -> None:
    finding = first_finding(judge, tiny, corpus, name)

    first = finding.looks_like[0]
    assert SAYS[name] in first.says
    assert 1.0 == first.fit
    assert len(finding.looks_like) <= 3
    assert set(first.rules) <= set(rules())


def first_finding(judge: Judge, tiny: Path, corpus: Path, name: str) -> Finding:
    fault = FAULTS[name]
    bundle, case, until = tiny, fault.case or "y-tree", fault.until
    if name in IN_CORPUS:
        bundle, case, until = corpus / f"{IN_CORPUS[name][0]}.kdtr", IN_CORPUS[name][1], None
    gate = judge(ENGINE, bundle, case, modes=["stepwise"], until=until, fault=name)
    return gate.findings[0]


class LogitsAlone:
    """An engine that shows no stage and no cache."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        verbs = {"prefill", "verify", "accept", "commit", "set_root"}
        self.info = replace(
            engine.info, stages=frozenset(), verbs=engine.info.verbs & frozenset(verbs)
        )

    def load(self, source: Any) -> Any:
        return self._engine.load(source)


# Where the prompt's root alone is wrong, many faults would make it so. What is not listed here is
# not seen in the case without a trace or a snapshot.
TOO_LITTLE = "wrong forwards that are known here would decide so"
IN_SMALL = {
    name: re.split(r"\d", SAYS[name])[0]
    for name in (
        *("root_low", "position_by_index", "drafts_high", "sibling_visible"),
        *("visibility_transposed", "no_compaction", "only_c_kv_moves", "rotated_again"),
        *("last_move_skipped", "rows_through_bfloat16", "first_child_only"),
        *("length_grows_by_tree", "root_not_counted", "root_from_path", "scale_from_latent"),
        *("k_pe_of_wrong_columns", "columns_swapped"),
        *("softmax_router", "groups_ignored", "weights_from_biased", "scaled_twice"),
        *("first_weight_for_all", "shared_expert_missing", "final_norm_twice"),
        "latent_eps_of_other_norms",
    )
} | {
    "one_layer_for_all": "every layer holds the rows of the last layer",
    "no_embedding_at_zero": TOO_LITTLE,
    "half_split_pairs": TOO_LITTLE,
    "prefill_rows_reversed": TOO_LITTLE,
    "writes_committed_row": "suspect what its commit left, or what was written over committed rows",
}


@pytest.mark.parametrize("name", IN_SMALL)
def test_logits_alone_tell_the_fault_too(judge: Judge, small: Path, name: str) -> None:
    """Such a finding may come a point later, and says the same: the forward is done wrongly."""
    engine = LogitsAlone(planted(name))

    gate = judge(engine, small, "y", modes=["stepwise"])

    (finding,) = gate.findings
    hints = finding.looks_like
    assert hints, finding
    assert IN_SMALL[name] in hints[0].says
    if IN_SMALL[name] == TOO_LITTLE:
        assert hints[0].fit < 1


def test_a_token_that_two_faults_explain_is_certain_for_none(judge: Judge, small: Path) -> None:
    """The target of the last row is here the last accepted token, too."""
    engine = LogitsAlone(planted("bonus_of_last_row"))

    gate = judge(engine, small, "y", modes=["stepwise"])

    hints = gate.findings[0].looks_like
    assert any(SAYS["bonus_of_last_row"] in hint.says for hint in hints)
    assert all(hint.fit < 1 for hint in hints)


@pytest.mark.parametrize("name", ["sibling_visible", "root_low"])
def test_a_hint_from_logits_says_where_it_would_be_seen(
    judge: Judge, small: Path, name: str
) -> None:
    stage = FAULTS[name].first_seen_at
    engine = LogitsAlone(planted(name))

    gate = judge(engine, small, "y", modes=["stepwise"], until="round0")

    assert str(gate.findings[0].looks_like[0]).endswith(f"; the stage {stage} would tell")


def test_no_hint_for_an_honest_engine(judge: Judge, tiny: Path) -> None:
    gate = judge("host", tiny, "y-tree", until="round1")

    assert gate.passed
    assert [] == [hint for finding in gate.findings for hint in finding.looks_like]


def test_hints_as_a_person_reads_them(kdtr: Callable[..., SimpleNamespace], tiny: Path) -> None:
    run = kdtr(
        *("gate", tiny, "--engine", ENGINE, "--engine-option", "fault=root_low"),
        *("--case", "y-tree", "--mode", "stepwise"),
    )

    lines = run.out.splitlines()
    at = next(i for i, line in enumerate(lines) if "looks like" in line)
    assert [
        "  looks like the root is at L - 1 = 12, should be at L = 13, and so every node",
        "             is one too low (fits every element, POS-1)",
    ] == lines[at : at + 2]
