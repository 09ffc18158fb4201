"""Real faults in the host engine: the gate stops each, and its first finding names the class."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planted_faults import FAULTS, Fault

from kdtr.conformance import Finding, GateResult, GoldenBundle, Verdict, load_engine
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.engine_options import engine_option
from kdtr.conformance.finding import Place
from kdtr.conformance.gate import _reproduce
from kdtr.conformance.mutants.planting import physical, wrap
from kdtr.contract import rule

ENGINE = "planted_faults:make_engine"
IN_TINY = [name for name, fault in FAULTS.items() if fault.case]
Judge = Callable[..., GateResult]


@pytest.mark.parametrize("mode", ["stepwise", "round"])
@pytest.mark.parametrize("name", IN_TINY)
def test_the_first_finding_names_where_the_fault_is_seen(
    judge: Judge, tiny: Path, name: str, mode: str
) -> None:
    fault: Fault = FAULTS[name]

    gate = judge(ENGINE, tiny, fault.case, modes=[mode], until=fault.until, fault=name)

    assert not gate.passed
    (finding,) = gate.findings  # what follows is consequence, and is not reported
    assert Verdict.FAIL is finding.verdict
    assert (fault.case, mode, fault.until) == (
        finding.place.case,
        finding.place.mode,
        finding.place.point,
    )
    if mode == "stepwise" or fault.in_round == fault.first_seen_at:
        assert fault.first_seen_at == finding.stage
        assert fault.breaks in finding.rules
    else:
        assert fault.in_round == finding.stage


def first_finding(judge: Judge, tiny: Path, name: str, mode: str) -> Finding:
    fault = FAULTS[name]
    return judge(ENGINE, tiny, fault.case, modes=[mode], until=fault.until, fault=name).findings[0]


# To the element. The prompt of y-tree has 13 tokens, its first
# round accepts 0-2-3, its second the root alone.
@pytest.mark.parametrize("mode", ["stepwise", "round"])
@pytest.mark.parametrize(
    ("name", "summary", "where", "expected", "actual"),
    [
        ("root_low", "4 of 4 differ", "row 0 (path 0)", "13", "12"),
        ("position_by_index", "2 of 4 differ", "row 2 (path 0-2)", "14", "15"),
        ("sibling_visible", "1 of 68 differ", "row 2 (path 0-2), slot 14", "False", "True"),
    ],
)
def test_integers_are_named_exactly(
    judge: Judge,
    tiny: Path,
    mode: str,
    name: str,
    summary: str,
    where: str,
    expected: str,
    actual: str,
) -> None:
    finding = first_finding(judge, tiny, name, mode)

    assert summary == finding.summary
    assert where == finding.where
    assert expected == finding.expected
    assert actual == finding.actual
    assert FAULTS[name].breaks == finding.rules[0]


@pytest.mark.parametrize("mode", ["stepwise", "round"])
def test_the_bonus_of_the_last_row_is_the_target_of_node_3(
    judge: Judge, tiny: Path, mode: str
) -> None:
    targets = expectation(tiny, "y-tree", "round1", "targets")

    finding = first_finding(judge, tiny, "bonus_of_last_row", mode)

    assert str(targets[0]) == finding.expected  # the path is the root alone
    assert str(targets[3]) == finding.actual
    assert "differs" == finding.summary
    assert "" == finding.where  # a single number
    assert ("ACC-2", "ACC-4") == finding.rules


@pytest.mark.parametrize("mode", ["stepwise", "round"])
def test_no_compaction_leaves_node_1_where_node_2_belongs(
    judge: Judge, tiny: Path, mode: str
) -> None:
    rows = expectation(tiny, "y-tree", "round0", "layer0/c_kv")  # of the nodes
    cached = expectation(tiny, "y-tree", "round0", "cache_c_kv")
    channel = int(np.abs(rows[2] - rows[1]).argmax())

    finding = first_finding(judge, tiny, "no_compaction", mode)

    assert f"layer 0, slot 14, latent channel {channel}" == finding.where
    assert finding.expected.startswith(f"{cached[0, 14, channel]:.9g} within ")
    value, _, _ = finding.actual.partition(", off by ")
    assert float(value) == pytest.approx(rows[1, channel], rel=2.0**-20)
    assert "COMMIT-1" == finding.rules[0]
    # slots 14 and 15, in each of four layers of 64 latent channels
    assert " of 4096 out of bounds, the first row by " in finding.summary


@pytest.mark.parametrize("mode", ["stepwise", "round"])
def test_the_wrong_scale_shows_in_the_first_row_of_the_prompt(
    judge: Judge, tiny: Path, mode: str
) -> None:
    scores = expectation(tiny, "y-tree", "chunk0", "layer0/scores")

    finding = first_finding(judge, tiny, "scale_from_latent", mode)

    head = int(np.abs(scores[0, :, 0]).argmax())
    assert f"layer 0, row 0, head {head}, slot 0" == finding.where
    assert finding.expected.startswith(f"{scores[0, head, 0]:.9g} within ")
    value, _, _ = finding.actual.partition(", off by ")
    ratio = ((64 + 16) / (32 + 16)) ** -0.5
    assert float(value) == pytest.approx(scores[0, head, 0] * ratio, rel=2.0**-12)
    assert "MLA-4" == finding.rules[0]


def expectation(bundle: Path, case: str, point: str, name: str) -> np.ndarray:
    opened = GoldenBundle.open(bundle)
    (found,) = (one for one in opened.cases if one.inputs.alias == case)
    layer, _, stage = name.rpartition("/")
    array = found.expectation(point).get(stage, int(layer.removeprefix("layer")) if layer else None)
    assert array is not None
    return array


# What follows the first finding


def test_one_finding_per_case_and_mode_and_the_rest_is_blocked(judge: Judge, tiny: Path) -> None:
    gate = judge(ENGINE, tiny, "y-tree", "star", modes=["stepwise", "round"], fault="root_low")

    assert 4 == len(gate.results) == len(gate.findings)
    by_case = {(result.case, result.mode): result for result in gate.results}
    # chunk0 and round0 ran
    assert 2 == by_case["y-tree", "stepwise"].blocked == by_case["y-tree", "round"].blocked
    assert 1 == by_case["star", "stepwise"].blocked
    assert 2 == by_case["star", "round"].points


def test_a_fault_that_a_mode_does_not_use_leaves_it_green(judge: Judge, tiny: Path) -> None:
    """forward_tokens is given positions and mask: a wrong layout of trees is not its own."""
    gate = judge(ENGINE, tiny, "y-tree", until="round1", fault="position_by_index")

    by_mode = {result.mode: result.verdict for result in gate.results}
    assert Verdict.PASS is by_mode.pop("forward")
    assert dict.fromkeys(("stepwise", "round", "shipped"), Verdict.FAIL) == by_mode
    assert not gate.passed


# Faults that only some model shows


def test_groups_masked_with_zero(
    judge: Judge, kdtr: Callable[..., SimpleNamespace], tmp_path: Path, checkpoints: Path
) -> None:
    bundle = tmp_path / "v09.kdtr"
    directory = checkpoints / "v09-qlora-g4-negbias"
    kdtr("golden", "--checkpoint", directory, "--prompt", "1,2,3", "--decode", "1", "--out", bundle)

    gate = judge(ENGINE, bundle, fault="groups_masked_with_zero")

    assert not gate.passed
    by_mode = {(f.place.case, f.place.mode): f.stage for f in gate.findings}
    shown = {stage for (_, mode), stage in by_mode.items() if mode not in ("shipped", "script")}
    assert {"expert_ids"} == shown


@pytest.fixture(scope="module")
def tied(record: Callable[..., Path], small_model: SimpleNamespace) -> Path:
    """Tokens 18..35 have the logits of tokens 0..17: every top logit is one of two."""
    head = small_model.weights["lm_head.weight"].copy()
    head[18:36], head[36] = head[:18], 0
    weights = {**small_model.weights, "lm_head.weight": head}
    plan = CasePlan("tied", "ties", ("ACC-1",), (Planted((-1, 0), (0, 1)),), ((3, 0, 7),))
    return record([plan], weights=weights)


def test_an_honest_engine_takes_the_lowest_of_equal_logits(judge: Judge, tied: Path) -> None:
    gate = judge("host", tied)

    assert gate.passed
    assert {Verdict.PASS} == {result.verdict for result in gate.results}


def test_the_last_of_equal_maxima_is_no_near_tie(judge: Judge, tied: Path) -> None:
    """M029: the engine's own logits are equal, so it is the argmax that is wrong."""
    gate = judge(ENGINE, tied, fault="last_maximum", modes=["stepwise", "round"])

    assert not gate.passed
    assert [Verdict.FAIL, Verdict.FAIL] == [result.verdict for result in gate.results]
    assert {"root"} == {finding.stage for finding in gate.findings}


@pytest.mark.parametrize("mode", ["stepwise", "round"])
def test_one_bit_of_a_committed_row(judge: Judge, tiny: Path, mode: str) -> None:
    """SLOT-2 is judged bit for bit; within bounds it would pass."""
    gate = judge(ENGINE, tiny, "y-tree", modes=[mode], fault="flips_last_bit")

    (finding,) = gate.findings
    assert "untouched" == finding.stage
    assert ("1 of 13 differ", "slot 0", "True", "False") == (
        finding.summary,
        finding.where,
        finding.expected,
        finding.actual,
    )
    assert ("SLOT-2",) == finding.rules


@pytest.mark.parametrize("mode", ["stepwise", "round"])
def test_moved_rows_are_copies(judge: Judge, tiny: Path, mode: str) -> None:
    """A copy that loses its last bit stays within the bounds of the truth, but is no copy."""

    def lose_a_bit(original: Any, cache: Any, *rest: Any) -> Any:
        moves = original(cache, *rest)
        for _, destination in moves[moves[:, 0] >= 0].tolist():
            row = cache.rows[:, physical(cache, destination)]
            row[:] = (row.view(np.int32) & ~1).view(np.float32)
        return moves

    engine = load_engine("host", {"page_size": 3, "split_size": 5})
    wrap(engine, commit_rows=lose_a_bit)

    gate = judge(engine, tiny, "y-tree", modes=[mode])

    (finding,) = gate.findings
    assert ("copied", "round0") == (finding.stage, finding.place.point)
    assert ("COMMIT-1", "NUM-2") == finding.rules


# Faults that the corpus shows


@pytest.mark.parametrize(
    ("name", "stage"),
    [("main_eps", "k_pe"), ("latent_eps_of_other_norms", "q_nope")],
)
def test_an_eps_of_the_other_norms_is_far_out_of_bounds(
    judge: Judge, corpus: Path, name: str, stage: str
) -> None:
    """NORM-1: the base model's rms_norm_eps is large enough that nobody can take it for 1e-6."""
    gate = judge(ENGINE, corpus / "base.kdtr", "trees", fault=name)

    assert not gate.passed
    for result in gate.results:
        assert Verdict.FAIL is result.verdict, result.mode
        assert result.headroom is not None
        assert result.headroom > (5 if result.mode == "shipped" else 50), result.mode
        assert ("cache_c_kv" if result.mode == "shipped" else stage) == result.findings[0].stage


def test_an_engine_that_ignores_the_limit_of_a_round(judge: Judge, corpus: Path) -> None:
    gate = judge(ENGINE, corpus / "base.kdtr", "limits", fault="limit_ignored")

    by_mode = {result.mode: result for result in gate.results}
    assert Verdict.PASS is by_mode["forward"].verdict  # no walk there
    for mode in ("stepwise", "round", "shipped"):
        (finding,) = by_mode[mode].findings
        assert (Verdict.FAIL, "round0", "path") == (
            finding.verdict,
            finding.place.point,
            finding.stage,
        )
        assert "ACC-4" in finding.rules


@pytest.mark.parametrize("kind", ["stop_tokens", "max_emitted"])
def test_each_kind_of_limit_is_asked_for(judge: Judge, corpus: Path, kind: str) -> None:
    gate = judge(ENGINE, corpus / "base.kdtr", "limits", modes=["round"], fault=f"no_{kind}")

    (finding,) = gate.findings
    assert "path" == finding.stage
    assert {"max_emitted": "round0", "stop_tokens": "round1"}[kind] == finding.place.point


# The line that reproduces


@pytest.mark.parametrize("name", ["root_low", "no_compaction", "scale_from_latent"])
def test_the_reproduction_line_reproduces(
    kdtr: Callable[..., SimpleNamespace], tiny: Path, name: str
) -> None:
    fault = FAULTS[name]
    options = ("--engine-option", f"fault={name}", "--engine-option", "page_size=16")
    first = kdtr("gate", tiny, "--engine", ENGINE, *options, "--case", fault.case)
    lines = [line.split("  again     ")[1] for line in first.out.splitlines() if "  again " in line]
    words = shlex.split(lines[0])

    again = kdtr(*words[1:])

    assert 1 == first.code == again.code
    assert "kdtr" == words[0]
    assert point_of(first.out) == point_of(again.out)
    assert f"--engine-option fault={name} --engine-option page_size=16" in lines[0]
    assert f"--case {fault.case} --mode stepwise --until {fault.until}" in lines[0]


def test_the_reproduction_line_reproduces_in_a_shell(
    kdtr: Callable[..., SimpleNamespace], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = str(Path(__file__).parent / "engines")
    monkeypatch.setenv("PYTHONPATH", engines)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    first = kdtr(
        *("gate", tiny, "--engine", ENGINE, "--engine-option", "fault=sibling_visible"),
        *("--case", "y-tree", "--mode", "round"),
    )
    (line,) = (
        line.split("  again     ")[1] for line in first.out.splitlines() if "  again " in line
    )

    again = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)

    assert 1 == again.returncode
    assert finding_of(first.out) == finding_of(again.stdout)


def point_of(out: str) -> list[str]:
    """Its lines up to what other modes have a say in."""
    lines = finding_of(out)
    return lines[: next(i for i, line in enumerate(lines) if "  looks like" in line)]


def finding_of(out: str) -> list[str]:
    """The first finding's lines."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("FAIL"))
    end = next(i for i in range(start, len(lines)) if not lines[i])
    return lines[start:end]


def test_a_finding_as_a_person_reads_it(kdtr: Callable[..., SimpleNamespace], tiny: Path) -> None:
    run = kdtr(
        *("gate", tiny, "--engine", ENGINE, "--engine-option", "fault=position_by_index"),
        *("--case", "y-tree", "--mode", "round"),
    )

    assert f"FWD-1 {rule('FWD-1')}" in " ".join(run.out.split())
    assert [
        "FAIL  y-tree / round / round0: positions: 2 of 4 differ",
        "  at        row 2 (path 0-2)",
        "  expected  14",
        "  actual    15",
        "  tree      4 nodes at L = 13; * accepted path, > where it differs",
        "        position  engine's  depth  token  node",
        "     *        13        13      0     89  0",
        "              14        14      1    242  ├ 1",
        "    >*        14   (+1) 15      1    377  └ 2",
        "    >*        15   (+1) 16      2     87    3",
        "  mask      as it must be",
        f"  POS-1     {rule('POS-1')}",
        "  FWD-1     Prefill of P tokens uses positions L..L+P-1 under a causal mask,",
        "            keeps all P rows, grows L by P and makes the target of the last row",
        "            the root; prefill in chunks of any size gives the same cache and",
        "            root.",
        "  looks like positions are L + index, as if the tree were a chain (fits every",
        "             element, POS-1)",
        f"  again     kdtr gate {tiny} --engine {ENGINE} --engine-option fault=position_by_index"
        " --case y-tree --mode round --until round0",
    ] == finding_of(run.out)


@pytest.mark.parametrize("value", ["'16'", "16", "host", "(1, 2)", "None", "' a b '"])
def test_options_survive_the_reproduction_line(value: str) -> None:
    key, given = engine_option("--engine-option", f"key={value}")
    line = _reproduce(Place("b.kdtr", "c", "round", "round0"), "e:f", {key: given})
    words = shlex.split(line)

    again: Any = engine_option("", words[words.index("--engine-option") + 1])

    assert ("key", given) == again
