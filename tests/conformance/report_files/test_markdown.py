"""The summary of a CI job: what comes first, and foreign text that stays text."""

from __future__ import annotations

import re
from collections.abc import Callable

from markdown_it import MarkdownIt

from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.markdown import markdown_summary
from kdtr.contract import rule

from .conftest import finding
from .pages import Node, read_page


def summary(run: Run) -> list[str]:
    return markdown_summary(run).decode("utf-8").splitlines()


def test_the_verdict_comes_first_then_a_table_then_the_faults(run: Run) -> None:
    lines = summary(run)

    assert "# kdtr gate FAILED: 2 faults" == lines[0]
    assert lines[2].startswith("gate FAILED: 1 pass, 1 near tie, 1 blocked, 1 unsupported, 1 fail")
    assert "| bundle | stepwise | round | decode |" == lines[4]
    assert (
        "| b | 1 pass | 1 near tie, **1 fail**, **1 error**, 1 blocked | 1 unsupported |"
        == lines[6]
    )
    assert [
        "## 1. POS-1: positions are L + index",
        "## 2. answer: the engine raised KeyError: 'x'",
        "## 3. NUM-2: targets: a near tie",
        "## Not checked",
        "## Run",
    ] == [line for line in lines if line.startswith("## ")]


def test_a_fault_is_told_with_rule_and_reproduction(run: Run) -> None:
    lines = summary(run)

    assert "**fail** in b: y / round / round0: positions: 2 of 4 differ" in lines
    assert f"- **POS-1** {rule('POS-1')}" in lines
    at = lines.index(finding().reproduce)
    assert ("```sh", "```") == (lines[at - 1], lines[at + 1])


def test_what_is_open_is_told(run: Run) -> None:
    lines = summary(run)

    assert "- decode: not offered, needs decode()" in lines
    assert (
        "- 2 differences not checked: a thin choice of experts may explain them, and there are too "
        "many to try"
    ) in lines
    assert "- not shown: mask; trace would show a wrong layout of the tree" in lines


def test_engine_profile_versions_and_sums_are_told(run: Run) -> None:
    text = "\n".join(summary(run))

    assert "- engine: mine 1.2 on cpu, as `my_engine:make`" in text
    assert "- profile: weights float32, activations float32" in text
    assert "- versions: rules 1, kdtr 0.1.0" in text
    assert f"- `b.kdtr`: SHA-256 `{'ab' * 32}`" in text


def test_an_excuse_is_told(excused: Run) -> None:
    lines = summary(excused)

    assert "- expected because a known gap (e1, https://x.test/7)" in lines
    assert "**excused** in b: y / round / round0: positions: 2 of 4 differ" in lines


def test_many_faults_stay_below_what_a_job_may_show(run_of: Callable[..., Run]) -> None:
    loud = [
        finding(f"c{i}", summary="x" * 2000 + str(i), stage=f"s{i}", looks_like=())
        for i in range(200)
    ]

    text = markdown_summary(run_of(*loud))

    assert len(text) < 1 << 19
    assert b"\n180 more faults and near ties are not told here.\n" in text


def test_what_a_process_wrote_is_a_block(run_of: Callable[..., Run]) -> None:
    said = "the process ended\nTraceback ```\n  ValueError\x1b[1m"

    lines = summary(run_of(finding(summary=said, looks_like=())))

    at = lines.index("````text")
    assert ["the process ended", "Traceback ```", "  ValueError\\x1b[1m", "````"] == (
        lines[at + 1 : at + 5]
    )
    assert "**fail** in b: y / round / round0: positions: the process ended" in lines


def rendered(run: Run) -> Node:
    """As GitHub renders it, but that raw HTML is let through: nothing of an engine's may be any."""
    reader = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return read_page(reader.render(markdown_summary(run).decode("utf-8")).encode())


def test_text_of_an_engine_is_no_markup(hostile: Run) -> None:
    page = rendered(hostile)

    tags = {node.tag for node in page.all()}
    assert {"h1", "h2", "table", "ul", "pre", "code"} <= tags
    assert set() == tags & {"script", "img", "a", "em", "del", "hr", "blockquote"}
    assert 1 == len(page.all("table"))
    assert [
        "kdtr gate FAILED: 1 fault",
        "1. POS-1: <script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'`]]>--> | **x** "
        "[y](javascript:z)\\x1b[2J\\x00\\x07\\u202e\\ud800",
        "Run",
    ] == [node.text for node in page.all("h1") + page.all("h2")]


def test_rules_and_commands_are_rendered_as_they_are(run: Run) -> None:
    page = rendered(run)

    items = [node.text for node in page.all("li")]
    assert f"POS-1 {rule('POS-1')}" in items
    assert "at: row 2 (path 0-2)" in items
    assert finding().reproduce in [node.text for node in page.all("pre")]
    assert ["bundle", "stepwise", "round", "decode"] == [node.text for node in page.all("th")]
    assert "1 near tie, 1 fail, 1 error, 1 blocked" == page.all("td")[2].text


def test_text_of_an_engine_begins_no_line_but_in_a_block(hostile: Run) -> None:
    """GitHub reads commands from lines of what is printed, should one print the file."""
    outside = re.sub(r"^(`{3,})\w+\n.*?^\1$", "", "\n".join(summary(hostile)), flags=re.S | re.M)

    assert not [line for line in outside.splitlines() if line.startswith("::")]
