"""The gate over a process engine that goes wrong in one case: that verdict, and all the others."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from left_behind import group_lives, in_folder, watched

from kdtr.conformance import GateResult, load_engine, run_gate

HERE = Path(__file__).parent
N_NODES = 6  # of the tree of `drafted`, the one case that is spoiled
TIMEOUT_S = 20.0


@pytest.fixture
def judge(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., GateResult]:
    """judge(fault, timeout_s=, isolate=): the gate's result; no process and no file is left."""

    def judge(fault: str, timeout_s: float = TIMEOUT_S, isolate: bool = False) -> GateResult:
        in_folder(monkeypatch, tmp_path)
        pids = watched(monkeypatch)
        honest = [str(Path(sys.executable).with_name("kdtr")), "serve-engine", "--engine", "host"]
        between = [sys.executable, str(HERE / "engines/stdio_between.py"), fault, str(N_NODES)]
        name = f"stdio:{shlex.join([*between, *honest])}"
        engine = load_engine(name, {"timeout_s": timeout_s, "isolate": isolate})
        try:
            result = run_gate(engine, [small], engine_name="e")
        finally:
            engine.close()  # type: ignore[attr-defined]  # of process engines
        assert pids
        assert [] == [pid for pid in pids if group_lives(pid)]
        assert [] == list(tmp_path.iterdir())
        return result

    return judge


SPOILED = {("drafted", "round"), ("drafted", "shipped")}


@pytest.mark.parametrize(
    ("fault", "traced", "shipped"),
    [
        (
            "crash",
            "round(): the engine was ended by signal 11 (SIGSEGV) before it replied; its stderr "
            "ends with: illegal memory access in verify_attn",
            None,
        ),
        (
            "half_a_line",
            "round(): the engine exited with code 1 within a reply, after 20 bytes without a "
            "newline: ",
            None,
        ),
        ("half_a_file", "round(): the file of the reply: ", None),
        ("lies", "shape", "round(): the reply is no acceptance: path[2] = 1 after path[1] = 2"),
        ("nonsense", "round(): the engine wrote to stdout what is no reply: ", None),
    ],
    ids=["crash", "half_a_line", "half_a_file", "lies", "nonsense"],
)
def test_one_case_goes_wrong_and_the_others_are_judged(
    judge: Callable[..., GateResult], fault: str, traced: str, shipped: str | None
) -> None:
    result = judge(fault)

    assert SPOILED == {(one.case, one.mode) for one in result.results if one.verdict.is_bad}
    others = [one for one in result.results if (one.case, one.mode) not in SPOILED]
    assert {"PASS", "UNSUPPORTED"} >= {one.verdict.name for one in others}
    assert {"y", "ar", "from-root", "state"} <= {one.case for one in others}
    said = {finding.place.mode: finding for finding in result.findings}
    assert traced in said["round"].summary
    assert (shipped or traced) in said["shipped"].summary
    if fault == "lies":
        assert ("FAIL", "mask") == (said["round"].verdict.name, said["round"].stage)
    else:
        assert "ERROR" == said["round"].verdict.name
    if fault == "half_a_line":
        assert "out of memory" in said["round"].summary
    for finding in result.findings:  # a broken exchange has nothing to do with the tree
        shows_tree = any(line.startswith(("  tree", "  mask")) for line in finding.lines())
        assert shows_tree is (fault == "lies")


def test_a_hang_costs_its_time_and_no_more(judge: Callable[..., GateResult]) -> None:
    began = time.monotonic()

    result = judge("hang", timeout_s=4)

    assert SPOILED == {(one.case, one.mode) for one in result.results if one.verdict.is_bad}
    assert {
        "round(): no reply within timeout_s = 4 s; the engine was stopped; its stderr ends with: "
        "waiting for the device"
    } == {finding.summary for finding in result.findings}
    assert time.monotonic() - began < 120
