"""Campaigns over processes: nothing is lost, doubled or run twice, whatever dies."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kdtr.conformance.cli import main
from kdtr.contract import EngineError
from kdtr.property_tests.campaign_directory import Directory
from kdtr.property_tests.campaign_plan import CampaignError, Setup, Unit
from kdtr.property_tests.campaign_processes import Processes
from kdtr.property_tests.campaign_run import Request, run_campaign
from kdtr.property_tests.campaign_summary import Summary, summarise
from kdtr.property_tests.campaign_unit import Case, Outcome
from kdtr.property_tests.laws import laws

ENGINES = Path(__file__).parent / "engines"
KDTR = Path(sys.executable).with_name("kdtr")
UNRULY = "unruly_engines:make_engine"
LAWS = ("the_walk_follows_the_targets", "a_commit_then_a_verify_is_a_longer_prompt")
SMALL = Request("kdtr.reference:make_engine", laws=LAWS, cases=40, most=10)
EXCUSED_CASE = Case("excused", "near tie of tokens", {}, {}, 0, 0, 0, None, "")


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unruly engines can be imported here and in the workers."""
    monkeypatch.syspath_prepend(str(ENGINES))


def run(request: Request, out: Path, *, workers: int = 1, limit_s: float | None = None) -> Summary:
    def hire(setup: Setup) -> Processes:
        return Processes(setup, workers, limit_s)

    return run_campaign(request, out, hire, lambda state: None)


def unruly(does: str, cases: int = 20, **options: Any) -> Request:
    given = (("does", does), *options.items())
    return Request(UNRULY, given, laws=LAWS[:1], cases=cases, most=10)


def rows(out: Path) -> list[dict[str, Any]]:
    found = [
        row
        for path in sorted((out / "shards").iterdir())
        for row in pq.read_table(path).to_pylist()
    ]
    return sorted(found, key=lambda row: (row["unit"], row["ordinal"]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that ran without trouble."""
    out = tmp_path_factory.mktemp("campaign") / "whole"
    run(SMALL, out)
    return out


def test_a_campaign_gives_the_cases_asked_for_and_says_so(whole: Path) -> None:
    summary = summarise(Directory(whole))

    assert summary.passed
    assert 40 == summary.cases == len(rows(whole))
    assert {(law, "held"): 20 for law in LAWS} == dict(summary.laws)
    assert {"complete": 4} == dict(summary.ended)
    told = "\n".join(summary.lines())
    assert "cases     40 of 40 asked for" in told
    assert "units     4 complete; 0 missing; seed 0, 10 examples each" in told


def test_a_shard_says_on_what_and_by_what_it_was_made(whole: Path) -> None:
    path = whole / "shards" / f"{LAWS[0]}-00001.parquet"

    head = json.loads(pq.read_schema(path).metadata[b"kdtr"])

    assert {"law": LAWS[0], "index": 1, "seed": 0, "examples": 10} == head["key"]["unit"]
    assert "reference (fixed, append)" == head["key"]["info"]["name"]
    assert "float64" == head["key"]["info"]["profile"]["accumulation"]
    assert {"kdtr", "rules", "sources", "hypothesis", "numpy", "ml_dtypes", "blas"} == set(
        head["key"]["versions"]
    )
    assert ("complete", 10) == (head["verdict"], head["held"])


def test_a_campaign_goes_on_where_it_was_cut(whole: Path, tmp_path: Path) -> None:
    """A shard is missing and a write was killed: the rest stays untouched."""
    out = tmp_path / "cut"
    subprocess.run(["cp", "-a", whole, out], check=True)
    lost = out / "shards" / f"{LAWS[1]}-00001.parquet"
    lost.rename(lost.with_name(f".{lost.name}.0123abcd"))
    before = {path.name: path.stat().st_mtime_ns for path in (out / "shards").glob("*.parquet")}
    assert [Unit(LAWS[1], 1, 0, 10)] == summarise(Directory(out)).missing

    summary = run(SMALL, out)

    after = {path.name: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}
    assert {lost.name} == after.keys() - before.keys()
    assert before == {name: after[name] for name in before}
    assert summary.passed
    assert rows(whole) == rows(out)


def test_a_killed_campaign_leaves_no_workers_and_resumes(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = [KDTR, "campaign", "--engine", SMALL.engine, "--cases", "40", "--unit", "10"]
    laws = [word for law in LAWS for word in ("--law", law)]
    process = subprocess.Popen([*command, *laws, "--workers", "1", "--out", out])
    deadline = time.monotonic() + 120
    while not any((out / "shards").glob("*.parquet")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()

    summary = run(SMALL, out)

    assert summary.passed
    assert rows(whole) == rows(out)
    assert [] == [pid for pid in workers if Path(f"/proc/{pid}/exe").exists()]


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 1}, "campaign.json: seed = 0; expected 1, as this campaign runs"),
        ({"cases": 50}, "campaign.json: cases = 40; expected 50"),
        ({"laws": LAWS[:1]}, "campaign.json: laws = "),
        (
            {"options": (("cache", "scratch"),)},
            "campaign.json: engine.options.cache = None; expected",
        ),
    ],
)
def test_the_directory_of_another_campaign_is_refused(
    whole: Path, change: dict[str, Any], text: str
) -> None:
    request = Request(**{**{f: getattr(SMALL, f) for f in SMALL.__slots__}, **change})

    with pytest.raises(CampaignError, match=text):
        run(request, whole)


def test_a_shard_of_another_campaign_is_refused_by_name(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "mixed"
    subprocess.run(["cp", "-a", whole, out], check=True)
    path = out / "shards" / f"{LAWS[0]}-00000.parquet"
    table = pq.read_table(path)
    head = json.loads(table.schema.metadata[b"kdtr"])
    head["key"]["info"]["version"] = "0.0.9"
    pq.write_table(table.replace_schema_metadata({"kdtr": json.dumps(head)}), path)

    with pytest.raises(CampaignError, match=rf"{path}: info.version = 0.0.9; expected 0.1.0"):
        summarise(Directory(out))
    path.write_bytes(b"PAR1, but not really")
    with pytest.raises(CampaignError, match=rf"{path}: not a shard of a campaign"):
        run(SMALL, out)


def test_two_campaigns_do_not_share_a_directory(tmp_path: Path) -> None:
    with (
        Directory(tmp_path).locked(),
        pytest.raises(CampaignError, match="another campaign writes there"),
    ):
        run(SMALL, tmp_path)


@pytest.mark.parametrize(
    ("does", "verdict", "why"),
    [
        ("SIGSEGV", "crashed", r"its process ended by signal 11 \(SIGSEGV\), 2 times"),
        ("exit", "crashed", "its process ended by exit code 7, 2 times"),
        ("hang", "timeout", "no end after 0.7 s, 2 times; the limit is --unit-timeout"),
    ],
)
def test_a_unit_that_takes_its_worker_with_it_twice_is_noted_and_the_rest_runs(
    does: str, verdict: str, why: str, tmp_path: Path
) -> None:
    """The third load of a process is within its first unit; the engine holds 10 examples."""
    summary = run(unruly(does, cases=10), tmp_path, limit_s=0.7 if does == "hang" else None)

    assert not summary.passed
    assert {verdict: 1} == dict(summary.ended)
    (bad,) = summary.bad
    assert re.fullmatch(why, bad.why)
    text = (tmp_path / "failures" / f"{bad.unit.id}.txt").read_text()
    assert f"--seed 0 --unit 10 --unit-id {bad.unit.id}" in text


def test_a_crash_that_happens_once_costs_nothing(tmp_path: Path) -> None:
    steady = run(unruly("", cases=20), tmp_path / "steady")

    shaken = run(unruly("SIGKILL", once=str(tmp_path / "once")), tmp_path / "shaken", workers=2)

    assert (tmp_path / "once").exists()
    assert steady.passed
    assert shaken.passed
    assert rows(tmp_path / "steady") == rows(tmp_path / "shaken")


@pytest.mark.parametrize(("name", "value"), [("rules", "0"), ("blas", "another kernel")])
def test_a_unit_that_ran_by_other_laws_or_sums_is_refused(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine of a cluster with another kdtr or another processor."""
    from kdtr.property_tests import campaign_run

    ours = campaign_run.versions()
    monkeypatch.setattr(campaign_run, "versions", lambda: {**ours, name: value})
    told = f"versions.{name} = {ours[name]}; expected {value}, as at the start"

    with pytest.raises(EngineError, match=re.escape(told)):
        run(unruly("", cases=10), tmp_path)


def test_an_engine_that_ends_its_process_when_it_loads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match="the process that loads it ended by exit code 7, 2 times"
    ):
        run(unruly("exit", at_load=0), tmp_path)

    assert not (tmp_path / "campaign.json").exists()


def test_a_failure_is_told_with_its_rules_a_bundle_and_a_line_that_reproduces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(UNRULY, (("does", "wrong"),), laws=LAWS[1:], cases=10, most=10)

    summary = run(request, tmp_path / "out")

    (bad,) = summary.bad
    assert ("failed", 1) == (bad.verdict, summary.laws[LAWS[1], "failed"])
    text = (tmp_path / "out" / "failures" / f"{bad.unit.id}.txt").read_text()
    assert "Failing test case: test_a_commit_then" in text
    assert set(laws()[LAWS[1]].rules) <= set(text.split())
    (bundle,) = (tmp_path / "out" / "failures").glob("*.kdtr")
    assert f"bundle  {bundle}: the truth" in text
    line = next(line for line in text.splitlines() if line.startswith("unit "))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    code = main(shlex.split(line)[2:])
    again = capsys.readouterr().out
    assert 1 == code
    assert again.startswith(f"failed  {bad.unit.id}: ")
    assert text.partition("bundle")[0] in again
    assert bundle.read_bytes() == (tmp_path / "kdtr-failures" / bundle.name).read_bytes()


def test_a_campaign_of_what_the_engine_lacks_gives_no_cases_and_does_not_pass(
    tmp_path: Path,
) -> None:
    """No verb of it is offered but those that every engine has."""
    request = Request(UNRULY, (("does", "bare"),), laws=LAWS[:1], cases=10, most=10)

    summary = run(request, tmp_path)

    assert not summary.passed
    assert {"skipped": 1} == dict(summary.ended)
    told = "\n".join(summary.lines())
    assert f"early     {LAWS[0]}, 1 units: {UNRULY} does not offer accept" in told


def test_what_was_excused_is_no_proof(tmp_path: Path) -> None:
    """Other laws make up for the cases; the law of which no example held fails, by its name."""
    request = Request(UNRULY, laws=LAWS, cases=20, most=10)
    run(request, tmp_path)
    outcome = Outcome(Unit(LAWS[1], 0, 0, 10), "exhausted", "0 held", 10 * (EXCUSED_CASE,))
    directory = Directory(tmp_path)
    directory.keep(outcome, directory.manifest())
    assert 10 == summarise(directory).cases

    summary = run(request, tmp_path)

    assert not summary.passed
    assert [] == summary.missing
    assert {(LAWS[0], "held"): 20, (LAWS[1], "excused"): 10} == dict(summary.laws)
    told = "\n".join(summary.lines())
    assert "cases     20 of 20 asked for; 10 excused and 0 discarded besides" in told
    assert f"unshown   no example held: {LAWS[1]}" in told


def test_the_report_merges_the_shards_and_names_what_is_missing(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cut"
    subprocess.run(["cp", "-a", whole, out], check=True)
    os.unlink(out / "shards" / f"{LAWS[1]}-00000.parquet")

    codes = main(["campaign-report", str(whole)]), main(["campaign-report", str(out)])

    told = capsys.readouterr().out
    assert (0, 1) == codes
    assert "units     4 complete; 0 missing" in told
    assert "units     3 complete; 1 missing" in told
    assert "cases     30 of 40 asked for" in told


def test_a_directory_without_a_campaign_has_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["campaign-report", str(tmp_path)])
    assert "no campaign.json; expected a directory that" in capsys.readouterr().err


@pytest.mark.parametrize("does", ["half a pair", "base"])
def test_whatever_an_engine_raises_ends_a_unit_and_not_the_campaign(
    tmp_path: Path, does: str
) -> None:
    summary = run(unruly(does, at_load=3), tmp_path)

    (head,) = summary.bad
    assert "failed" == head.verdict
    written = (tmp_path / "failures" / f"{head.unit.id}.txt").read_text(encoding="utf-8")
    assert ("boom \\ud800" if does == "half a pair" else "no Exception") in written
    assert "@failures/" not in "\n".join(summary.lines())


def test_files_of_others_in_the_directory_stay(tmp_path: Path) -> None:
    for name in (".pre-commit-config.yaml", ".env.local"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".foo.d").mkdir()

    run(SMALL, tmp_path)

    assert ["mine", "mine"] == [
        (tmp_path / name).read_text() for name in (".pre-commit-config.yaml", ".env.local")
    ]
    assert (tmp_path / ".foo.d").is_dir()


def test_a_twin_that_is_no_other_is_refused(tmp_path: Path) -> None:
    twins = Request(
        "kdtr.engine:make_engine",
        (("page_size", 3),),
        twin_options=(("page_size", 3),),
        laws=("cache_layouts_are_indistinguishable",),
        cases=10,
        most=10,
    )

    with pytest.raises(EngineError, match="change nothing; expected a second configuration"):
        run(twins, tmp_path)
