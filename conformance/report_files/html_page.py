"""One page for a run, in one file: nothing is loaded, and nothing in it needs a script.

A small script adds comfort where scripts run: a filter, buttons that copy, paper with all details.
A policy in the page forbids everything else, so that no text of an engine can act.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib import resources

from kdtr.conformance.plain_text import engine_name
from kdtr.conformance.report import unshown_stages
from kdtr.conformance.report_files.html_elements import Content, Element, element, page_text, raw
from kdtr.conformance.report_files.html_fault import command, fault_section
from kdtr.conformance.report_files.html_verdicts import stage_table, verdict_table
from kdtr.conformance.report_files.not_checked import left_open
from kdtr.conformance.report_files.run import Fault, Run
from kdtr.conformance.unshown import unshown_groups

_IN_FULL = 50  # faults: a page of some 15 kB for each must still open at once


def html_page(run: Run) -> bytes:
    """The page, in UTF-8."""
    verdict = "passed" if run.passed else "FAILED"
    title = f"{run.name} {verdict}: {run.info.name}"
    return page_text(element("html", _head(title), element("body", _body(run)), lang="en"))


def _head(title: str) -> Element:
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_sum(_script())}'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content="kdtr"),  # known again by earlier_report.py
        element("title", title),
        raw("style", _style()),
    )


def _body(run: Run) -> Iterator[Content]:
    bad = [fault for fault in run.faults if fault.is_bad]
    quiet = [fault for fault in run.faults if not fault.is_bad]
    yield element("header", _verdict(run, bad), class_="passed" if run.passed else "failed")
    yield element(
        "main",
        _contents(run, bad),
        _told(run, bad),
        _section("verdicts", "Verdicts", verdict_table(run)),
        _open(run),
        _told(run, quiet),
        _compared(run),
        _section("run", "Run", _about(run)),
    )
    yield raw("script", _script())


def _told(run: Run, faults: list[Fault]) -> list[Element]:
    return [fault_section(run, fault, brief=fault.number > _IN_FULL) for fault in faults]


def _verdict(run: Run, bad: list[Fault]) -> Iterator[Content]:
    word = "✓ passed" if run.passed else "✗ FAILED"
    told = f": {len(bad)} fault{'' if len(bad) == 1 else 's'}" if bad else ""
    yield element("h1", f"{run.name} {word}{told}")
    yield element("p", element("b", engine_name(run.info)), f", as {run.header.engine}")
    line = run.verdict_line()
    yield element("p", line)
    yield [element("p", element("b", why)) for why in run.why_failed() if why not in line]


def _contents(run: Run, bad: list[Fault]) -> Element | None:
    """Every fault in a line: what is wrong, which rule it breaks, where it is seen."""
    if not bad:
        return None
    names = run.bundle_names()
    entries = []
    for fault in bad:
        place, n = fault.first.place, len(fault.group.findings)
        where = f"{names.get(place.bundle, place.bundle)}: {place.case} / {place.mode}"
        more = f" and {n - 1} more" if n > 1 else ""
        rules = fault.rules()
        entries.append(
            element(
                "li",
                element("span", rules[0], class_="rule") if rules else None,
                " ",
                element("a", fault.title(), href=f"#fault-{fault.number}"),
                element("span", f" {where}{more}", class_="note"),
            )
        )
    listed = element("ol", entries)
    return element("nav", element("h2", "Faults", id="faults"), listed, aria_labelledby="faults")


def _open(run: Run) -> Element | None:
    sentences = list(left_open(run.gate.results))
    unshown = unshown_groups(unshown_stages(run.gate.results))
    if not sentences and not unshown:
        return None
    listed = element("ul", [element("li", sentence) for sentence in sentences])
    content: list[Content] = [listed] if sentences else []
    if unshown:
        lines = [
            element("tr", [element("td", text) for text in (one.what, one.by, one.tells)])
            for one in unshown
        ]
        names = ("not shown", "shown by", "one would learn")
        head = element("tr", [element("th", name, scope="col") for name in names])
        table = element("table", element("thead", head), element("tbody", lines))
        content.append(element("div", table, class_="scroll"))
    return _section("open", "Not checked: neither passed nor failed", content)


def _compared(run: Run) -> Element | None:
    table = stage_table(run)
    if table is None:
        return None
    return _section("compared", "Compared, by stage", table)


def _about(run: Run) -> Iterator[Content]:
    header = run.header
    yield command(header.command)
    facts: list[tuple[str, str]] = [
        ("engine", engine_name(run.info)),
        ("profile", ", ".join(f"{k} {v}" for k, v in asdict(run.info.profile).items())),
        ("verbs", ", ".join(sorted(run.info.verbs))),
        ("stages shown", ", ".join(sorted(run.info.stages)) or "none"),
        *((f"convention {k}", str(v)) for k, v in sorted(run.info.conventions.items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in header.versions)),
        ("started", f"{header.started}, {header.seconds:.1f} s"),
    ]
    pairs = [[element("dt", name), element("dd", text)] for name, text in facts]
    yield element("dl", pairs, class_="facts")
    if not header.bundles:
        return
    head = [element("th", name, scope="col") for name in ("bundle", "bytes", "SHA-256")]
    lines = [
        element(
            "tr",
            element("td", one.path),
            element("td", one.n_bytes, class_="right"),
            element("td", element("code", one.sha256)),
        )
        for one in header.bundles
    ]
    table = element("table", element("thead", element("tr", head)), element("tbody", lines))
    yield element("div", table, class_="scroll")


def _section(ident: str, title: str, *content: Content) -> Element:
    heading = element("h2", title, id=f"{ident}-title")
    return element("section", heading, content, id=ident, aria_labelledby=f"{ident}-title")


@cache
def _style() -> str:
    return _file("page.css")


@cache
def _script() -> str:
    return _file("page.js")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sum(text: str) -> str:
    """As a policy names a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
