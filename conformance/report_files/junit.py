"""A run as JUnit XML, as GitLab, Jenkins and the readers of GitHub Actions take it.

A suite for each bundle, a test case for each case and mode. What fails is a failure, what raises an
error; near ties pass and are told in the output; what was blocked, is not offered or is expected is
skipped, with the reason. No standard says what is allowed: this keeps to the schema of Jenkins'
xUnit plugin (junit-10.xsd), and to one of skipped, error and failure in a test case, as Ant's does.
Times of test cases are not measured, and so not told.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree as ET

from kdtr.conformance.finding import CaseResult, Finding, Verdict
from kdtr.conformance.plain_text import engine_name, printable, printable_lines
from kdtr.conformance.report_files.run import Header, Run

_WIDTH = 100  # of the text of a failure


def junit_xml(run: Run) -> bytes:
    """The file, in UTF-8."""
    bundles = dict.fromkeys(result.bundle for result in run.gate.results)
    names = run.bundle_names()
    suites = [
        _suite(run, names[bundle], [one for one in run.gate.results if one.bundle == bundle])
        for bundle in bundles
    ]
    if run.why_failed() and not any(fault.is_bad for fault in run.faults):
        suites.append(_verdict(run))
    root = ET.Element("testsuites", {"name": "kdtr gate"})
    for attribute in ("tests", "failures", "errors"):
        root.set(attribute, str(sum(int(suite.get(attribute, 0)) for suite in suites)))
    root.set("time", f"{run.header.seconds:.3f}")
    root.extend(suites)
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _suite(run: Run, name: str, results: list[CaseResult]) -> ET.Element:
    cases = [_case(run, name, result) for result in results]
    suite = _empty_suite(run, name, cases)
    properties = ET.SubElement(suite, "properties")
    about = {"engine": engine_name(run.info), **_about(run.header)}
    for one in run.header.bundles:
        if one.path == results[0].bundle:
            about["sha256"] = one.sha256
    for key, value in about.items():
        ET.SubElement(properties, "property", {"name": key, "value": printable(value)})
    suite.extend(cases)
    return suite


def _empty_suite(run: Run, name: str, cases: list[ET.Element]) -> ET.Element:
    """With its counts, and without its children."""
    suite = ET.Element("testsuite", {"name": printable(name), "tests": str(len(cases))})
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("timestamp", run.header.started.removesuffix("Z"))  # Ant's schema forbids a zone
    return suite


def _about(header: Header) -> dict[str, str]:
    return {"command": header.command, **dict(header.versions)}


def _case(run: Run, bundle: str, result: CaseResult) -> ET.Element:
    case = ET.Element(
        "testcase",
        {
            "classname": f"kdtr.{printable(bundle).replace('.', '_')}",
            "name": printable(f"{result.case} / {result.mode}"),
        },
    )
    bad = [finding for finding in result.findings if finding.verdict.is_bad]
    told = [finding for finding in result.findings if not finding.verdict.is_bad]
    if result.verdict is Verdict.EXCUSED:
        excuses = [str(one.excuse) for one in told if one.excuse is not None]
        _skipped(case, f"expected because {'; '.join(excuses) or 'of what came before it'}")
    elif result.verdict.is_bad:
        tag = "failure" if result.verdict is Verdict.FAIL else "error"
        first = next((one for one in bad if one.verdict is result.verdict), None)
        # Of x-ray models that show the same, one has the finding.
        told_elsewhere = f"{result.verdict.value}, as told with the finding of another case"
        attributes = {"message": told_elsewhere, "type": result.verdict.value}
        if first is not None:
            attributes = {"message": _message(first), "type": _type(first)}
        ET.SubElement(case, tag, attributes).text = _text(bad)
    elif result.verdict is Verdict.BLOCKED:
        _skipped(case, f"blocked by {result.blocked_by}")
    elif result.verdict is Verdict.UNSUPPORTED:
        needed = ", ".join(sorted(result.unshown))
        lacks = f"not offered{f', needs {needed}' if needed else ''}"
        _skipped(case, f"not loaded: {result.refused}" if result.refused else lacks)
    output = _text(told) if told else ""
    if result.not_checked:
        output += f"{result.not_checked} differences were not checked: too many choices to try\n"
    if output:
        ET.SubElement(case, "system-out").text = output
    return case


def _verdict(run: Run) -> ET.Element:
    """Nothing is bad and yet it failed: readers that count failures must see one."""
    case = ET.Element("testcase", {"classname": "kdtr.gate", "name": "verdict"})
    why = "; ".join(run.why_failed())
    ET.SubElement(case, "failure", {"message": why, "type": "verdict"}).text = run.verdict_line()
    suite = _empty_suite(run, "gate", [case])
    suite.append(case)
    return suite


def _skipped(case: ET.Element, message: str) -> None:
    ET.SubElement(case, "skipped", {"message": printable(message)})


def _message(finding: Finding) -> str:
    best = f"; looks like {finding.looks_like[0].says}" if finding.looks_like else ""
    where = f" at {finding.where}" if finding.where else ""
    return printable(f"{finding.stage}: {finding.summary}{where}{best}")


def _type(finding: Finding) -> str:
    return finding.rules[0] if finding.rules else finding.verdict.value


def _text(findings: Iterable[Finding]) -> str:
    """In full, with the line that shows it again."""
    lines = [line for one in findings for line in (*one.lines(_WIDTH), "")]
    return "\n".join(printable_lines(lines))
