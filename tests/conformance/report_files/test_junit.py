"""JUnit XML as its readers take it: what they may find where, and what counts as a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from kdtr.conformance import GateResult, Verdict
from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.junit import junit_xml

from .conftest import finding, result

# Of junit-10.xsd of Jenkins' xUnit plugin: children, and attributes; the first ones are required.
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase", "system-out", "system-err"},
    "properties": {"property"},
    "testcase": {"skipped", "error", "failure", "system-out", "system-err"},
}
REQUIRED = {
    "testsuite": {"name", "tests", "failures", "errors"},
    "testcase": {"name", "classname"},  # classname by Ant's, and GitLab shows it as the suite
    "property": {"name", "value"},
    "failure": {"message", "type"},  # type by Ant's
    "error": {"message", "type"},
    "skipped": {"message"},
}
OPTIONAL = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"skipped", "timestamp", "time", "hostname", "id", "package"},
    "testcase": {"time"},
}


def tree(run: Run) -> ET.Element:
    return ET.fromstring(junit_xml(run))


def case(run: Run, name: str) -> ET.Element:
    (found,) = [one for one in tree(run).iter("testcase") if one.get("name") == name]
    return found


@pytest.mark.parametrize("which", ["run", "hostile"])
def test_it_keeps_to_the_schema(which: str, request: pytest.FixtureRequest) -> None:
    root = tree(request.getfixturevalue(which))

    assert "testsuites" == root.tag
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
        required = REQUIRED.get(element.tag, set())
        assert required <= set(element.keys())
        assert set(element.keys()) <= required | OPTIONAL.get(element.tag, set())
    for one in root.iter("testcase"):
        assert 1 >= sum(child.tag in ("skipped", "error", "failure") for child in one)


def test_counts_are_those_of_the_cases(run: Run) -> None:
    root = tree(run)
    (suite,) = root

    told = ("tests", "failures", "errors", "skipped")
    assert ("6", "1", "1", "2") == tuple(suite.get(name) for name in told)
    assert ("6", "1", "1") == tuple(root.get(name) for name in told[:3])
    assert "2026-01-31T12:00:00" == suite.get("timestamp")


def test_a_finding_is_a_failure_with_its_rule_and_the_line_that_shows_it_again(run: Run) -> None:
    failure = case(run, "y / round").find("failure")

    assert failure is not None
    assert ("kdtr.b", "POS-1") == (case(run, "y / round").get("classname"), failure.get("type"))
    assert (
        "positions: 2 of 4 differ at row 2 (path 0-2); looks like positions are L + index"
        == failure.get("message")
    )
    assert failure.text is not None
    assert f"  again     {finding().reproduce}\n" in failure.text
    assert "Node i is at position L + depth(i)" in failure.text


def test_what_raises_is_an_error(run: Run) -> None:
    error = case(run, "loud / round").find("error")

    assert error is not None
    assert "answer: the engine raised KeyError: 'x'" == error.get("message")


def test_a_failure_that_is_told_elsewhere_is_one(run_of: Callable[..., Run]) -> None:
    results = [*run_of(finding()).gate.results, result("k2", "x-ray", Verdict.FAIL)]

    (failure,) = case(replace(run_of(), gate=GateResult(results)), "k2 / x-ray")

    assert ("failure", "fail, as told with the finding of another case") == (
        failure.tag,
        failure.get("message"),
    )


def test_a_near_tie_passes_and_is_told(run: Run) -> None:
    near_tie = case(run, "tie / round")

    assert ["system-out"] == [child.tag for child in near_tie]
    assert near_tie[0].text is not None
    assert near_tie[0].text.startswith("NEAR TIE  tie / round / round0: targets: a near tie\n")
    assert near_tie[0].text.endswith("2 differences were not checked: too many choices to try\n")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("late / round", "blocked by y / round"),
        ("ar / decode", "not offered, needs decode()"),
    ],
)
def test_what_did_not_run_is_skipped_with_its_reason(run: Run, name: str, reason: str) -> None:
    (skipped,) = case(run, name)

    assert ("skipped", reason) == (skipped.tag, skipped.get("message"))


def test_what_is_expected_is_skipped_and_told(excused: Run) -> None:
    skipped, output = case(excused, "y / round")

    assert "expected because a known gap (e1, https://x.test/7)" == skipped.get("message")
    assert output.text is not None
    assert "positions: 2 of 4 differ" in output.text


def test_a_run_that_shows_nothing_has_a_failure(run_of: Callable[..., Run]) -> None:
    tie = finding(verdict=Verdict.NEAR_TIE)

    root = tree(run_of(tie))
    empty = tree(replace(run_of(), gate=GateResult()))

    assert ("1", "1") == (root.get("failures"), empty.get("failures"))
    (failure,) = empty.iter("failure")
    assert "nothing was compared" == failure.get("message")


def test_names_are_unique_and_no_class_has_a_dot_of_its_own(run_of: Callable[..., Run]) -> None:
    other = result("y", "round")
    other.bundle = "deep/v1.2.kdtr"
    run = run_of(finding(), finding(mode="stepwise"))
    run = replace(run, gate=GateResult([*run.gate.results, other]))

    names = [(one.get("classname"), one.get("name")) for one in tree(run).iter("testcase")]

    assert [
        ("kdtr.b", "y / round"),
        ("kdtr.b", "y / stepwise"),
        ("kdtr.v1_2", "y / round"),
    ] == names


def test_text_of_an_engine_is_text(hostile: Run) -> None:
    (failure,) = tree(hostile).iter("failure")

    assert "<script>alert(1)</script>" in (failure.get("message") or "")
    assert "\\x1b[2J\\x00\\x07\\u202e\\ud800" in (failure.text or "")
