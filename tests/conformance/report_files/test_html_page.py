"""The page: well-formed, self-contained, readable without a script, deaf to an engine's text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest

from kdtr.conformance import GateResult, Verdict
from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.drawing import Drawing
from kdtr.conformance.finding import Excuse
from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.html_page import html_page
from kdtr.contract import rule

from .conftest import DRAWING, finding
from .pages import Node, read_page

RunOf = Callable[..., Run]
EVERY = ["run", "hostile", "six_faults", "passing"]


@pytest.fixture
def passing(run: Run) -> Run:
    return replace(run, gate=GateResult(run.gate.results[:1]))


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Node:
    run: Run = request.getfixturevalue(request.param)
    return read_page(html_page(run))


def section(page: Node, ident: str) -> Node:
    (found,) = [node for node in page.all() if node.attributes.get("id") == ident]
    return found


@pytest.mark.parametrize("page", EVERY, indirect=True)
def test_ids_are_unique_and_links_and_labels_resolve(page: Node) -> None:
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    links = [node.attributes["href"] for node in page.all("a")]
    labels = [
        name for node in page.all() for name in node.attributes.get("aria-labelledby", "").split()
    ]

    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert set(labels) <= set(ids)


@pytest.mark.parametrize("page", EVERY, indirect=True)
def test_nothing_is_loaded_and_nothing_foreign_can_act(page: Node) -> None:
    names = {name for node in page.all() for name in node.attributes}
    (script,) = page.all("script")
    (policy,) = [m for m in page.all("meta") if "http-equiv" in m.attributes]

    assert not {"src", "srcset", "action", "data", "background", "style"} & names
    assert not [name for name in names if name.startswith("on")]
    assert not page.all("img") + page.all("link") + page.all("iframe") + page.all("base")
    ours = resources.files("kdtr.conformance.report_files").joinpath("page.js")
    assert ours.read_text() == "".join(script.parts)
    assert policy.attributes["content"].startswith("default-src 'none'; ")


def test_what_would_tell_is_named_as_on_a_terminal(run_of: RunOf) -> None:
    hint = Hint("the cache was left", ("COMMIT-3",), seen_in="cache_c_kv")

    page = html_page(run_of(finding(looks_like=(hint,)))).decode()

    assert "(fits every element; snapshot() would tell, COMMIT-3)" in page
    assert "cache_c_kv would tell" not in page


@pytest.mark.parametrize("page", EVERY, indirect=True)
def test_pictures_have_titles_and_descriptions(page: Node) -> None:
    for picture in page.all("svg"):
        assert "img" == picture.attributes["role"]
        title, description = picture.children[:2]
        assert ("title", "desc") == (title.tag, description.tag)
        assert title.text
        assert description.text


@pytest.mark.parametrize("page", EVERY, indirect=True)
def test_headings_go_down_by_one(page: Node) -> None:
    levels = [int(node.tag[1]) for node in page.all() if re.fullmatch("h[1-6]", node.tag)]

    assert 1 == levels.count(1)
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_what_an_engine_says_is_text(hostile: Run) -> None:
    text = read_page(html_page(hostile)).text

    assert "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'`]]>-->" in text
    assert "\\x1b[2J\\x00\\x07\\u202e\\ud800" in text


def test_the_faults_are_listed_first_and_told_before_the_verdicts(run: Run) -> None:
    page = read_page(html_page(run))

    (head,) = page.all("h1")
    assert "kdtr gate ✗ FAILED: 2 faults" == head.text
    (nav,) = page.all("nav")
    assert [
        "POS-1 positions are L + index b: y / round",
        "answer: the engine raised KeyError: 'x' b: loud / round",
    ] == [item.text for item in nav.all("li")]
    idents = [node.attributes.get("id") for node in page.all("section")]
    assert ["fault-1", "fault-2", "verdicts", "open", "fault-3", "compared", "run"] == idents


def test_a_fault_tells_what_where_why_and_how_to_see_it_again(run: Run) -> None:
    fault = section(read_page(html_page(run)), "fault-1")

    facts = fault.all("dl", "facts")[0]
    assert ["at", "expected", "actual"] == [node.text for node in facts.all("dt")]
    assert "Looks like: positions are L + index (fits every element, POS-1)" in fault.text
    assert rule("POS-1") in fault.text
    assert [finding().reproduce] == [node.text for node in fault.all("code")]


def test_what_a_process_wrote_keeps_its_lines(run_of: RunOf) -> None:
    said = "the process ended\nTraceback\n  ValueError"

    fault = section(read_page(html_page(run_of(finding(summary=said, looks_like=())))), "fault-1")

    assert [said] == ["".join(node.parts) for node in fault.all("pre", "said")]
    assert "positions: the process ended" == fault.all("p", "seen")[0].text[-28:]


def test_a_run_that_compared_nothing_says_so_once(run_of: RunOf) -> None:
    page = read_page(html_page(replace(run_of(), gate=GateResult())))

    (head,) = page.all("header")
    assert 1 == head.text.count("nothing was compared")
    assert [] == page.all("section", "fault")


def test_an_error_breaks_no_rule(run: Run) -> None:
    fault = section(read_page(html_page(run)), "fault-2")

    assert ["See it again"] == [node.text for node in fault.all("h3")]


def test_marks_of_a_sentence_are_marks(run_of: RunOf) -> None:
    fault = section(read_page(html_page(run_of(finding(rules=("NUM-2", "NORM-1"))))), "fault-1")

    assert ["near tie"] == [node.text for node in fault.all("em")]
    assert "is otherwise a near tie, reported" in fault.text


def test_the_pictures_of_a_fault(run: Run) -> None:
    fault = section(read_page(html_page(run)), "fault-1")

    tree, mask, slots = fault.all("svg")
    assert "node 3: token 6, position 7, the engine has 8, on the accepted path, differs" in (
        tree.children[1].text
    )
    assert 2 == tree.text.count("✗")
    assert "8 (+1)" in tree.text
    assert 4 * 5 == len(mask.all("rect"))
    assert "commit must leave: node 0 in slot 5, node 2 in slot 6, node 3 in slot 7" in (
        slots.children[1].text
    )


def test_a_wrong_mask_is_drawn_three_times(run_of: RunOf) -> None:
    wrong = DRAWING.mask.copy()
    wrong[2, 5 + 3] = True  # the child of node 2
    wrong[3, 1] = False  # a committed slot
    drawing = replace(DRAWING, shown_mask=wrong, shown_positions=DRAWING.positions)
    run = run_of(finding(drawing=drawing, stage="mask"))

    page = read_page(html_page(run))

    captions = [node.text for node in page.all("figcaption")]
    assert ["expected", "actual", "difference"] == captions[2:5]
    expected, actual, difference = page.all("svg")[1:4]
    assert (1, 1) == (len(difference.all("rect", "extra")), len(difference.all("rect", "missing")))
    assert (0, 1) == (len(expected.all("rect", "part")), len(actual.all("rect", "part")))
    assert "row 2 sees node 3 (its descendant); row 3 does not see slot 1 of the prefix" in (
        difference.children[1].text
    )


def test_of_a_large_tree_what_matters_is_drawn(run_of: RunOf) -> None:
    """A star of 65 nodes: node 62 is accepted, and goes from slot 67 to slot 6."""
    mask = np.zeros((65, 70), dtype=bool)
    mask[:, :6] = True
    mask[range(65), range(5, 70)] = True
    star = Drawing(
        tokens=tuple(range(65)), parents=(-1, *[0] * 64), positions=(5, *[6] * 64), mask=mask,
        path=(0, 62), rows=(40,), slots=tuple(range(5, 70)),
    )  # fmt: skip

    page = read_page(html_page(run_of(finding(drawing=star, stage="logits"))))

    tree, _, slots = page.all("svg")
    assert ["0", "40", "62"] == [node.text for node in tree.all("text", "id")]
    assert "62 nodes are not drawn" in tree.children[1].text
    names = [node.text for node in slots.all("text", "small")]
    assert ["3", "4", "5", "6", "45", "67"] == names[1:7]
    assert "61 slots are not drawn" in names
    assert 1 == len([arrow for arrow in slots.all("path", "moved") if "L" in arrow.attributes["d"]
                     and "head" not in arrow.attributes["class"]])  # fmt: skip


def test_a_walk_that_differs_is_drawn_and_told(run_of: RunOf) -> None:
    drawing = replace(DRAWING, shown_path=(0, 1), shown_positions=DRAWING.positions, rows=(0,))

    page = read_page(html_page(run_of(finding(drawing=drawing, stage="path"))))

    tree, _, slots = page.all("svg")
    assert 2 == len(tree.all("circle", "engines"))
    assert "0-2-3 is accepted; the engine's path is 0-1" in page.text
    assert "by the engine's path: node 0 in slot 5, node 1 in slot 6; wrong in slots 6, 7" in (
        slots.children[1].text
    )


def test_a_walk_of_no_nodes_is_drawn_too(run_of: RunOf) -> None:
    wild = (0, -5, 10**12, *range(100_000))
    drawing = replace(DRAWING, shown_path=wild, shown_positions=DRAWING.positions, rows=(0,))

    text = html_page(run_of(finding(drawing=drawing, stage="path")))

    slots = read_page(text).all("svg")[2]
    marked = [node.text.split()[-1] for node in slots.all("text") if node.text.startswith("✗ ")]
    assert ["-5", "100000000", "0"] == marked  # in slots 6, 7 and 8
    assert 2 == slots.text.count("no node")
    assert len(text) < 100_000


def test_a_move_from_another_slot_is_marked_where_it_goes(run_of: RunOf) -> None:
    moves = ((5, 5), (6, 6), (8, 7))  # the second must come from slot 7
    drawing = replace(DRAWING, shown_moves=moves, shown_positions=DRAWING.positions)

    page = read_page(html_page(run_of(finding(drawing=drawing, stage="moves"))))

    assert page.all("svg")[2].children[1].text.endswith("node 3 in slot 7; wrong in slots 6")


def test_slots_that_the_engine_says_otherwise_are_drawn_below(run_of: RunOf) -> None:
    drawing = replace(DRAWING, shown_slots=(5, 6, 8, 7))

    page = read_page(html_page(run_of(finding(drawing=drawing, stage="slots"))))

    told = page.all("svg")[2].children[1].text
    assert "the engine says: node 0 in slot 5, node 1 in slot 6, node 2 in slot 8" in told
    assert "wrong in slots 7, 8. commit must leave" in told


def test_a_prompt_has_no_tree_and_its_slots_only_where_they_tell(run_of: RunOf) -> None:
    prompt = replace(DRAWING, is_chunk=True, parents=(-1, 0, 1, 2), path=(0, 1, 2, 3))

    numbers = read_page(html_page(run_of(finding(drawing=prompt, stage="logits"))))
    positions = read_page(html_page(run_of(finding(drawing=prompt))))

    assert [] == numbers.all("svg")
    (slots,) = positions.all("svg")
    assert "written by the prefill: row 0 in slot 5" in slots.children[1].text


def test_the_numbers_of_a_fault(run: Run) -> None:
    fault = section(read_page(html_page(run)), "fault-1")

    (table,) = fault.all("table")
    rows = [[cell.text for cell in row.all("th") + row.all("td")] for row in table.all("tr")]
    assert [
        ["slot", "3", "4", "5"],
        ["expected", "0.5", "0.25", "-inf"],
        ["actual", "0.5", "✗ 0.75", "-inf"],
        ["error", "+0", "+0.5", ""],
    ] == rows
    assert ["row 0✓ in bounds", "row 1✗ 50 times its bound"] == [
        node.text for node in fault.all("ul", "fares")[0].all("li")
    ]


def test_verdicts_link_to_their_faults(run: Run) -> None:
    table = section(read_page(html_page(run)), "verdict-table")

    assert [("≈ near tie", "#fault-3"), ("✗ fail", "#fault-1"), ("✗ error", "#fault-2")] == [
        (link.text, link.attributes["href"]) for link in table.all("a")
    ]


def test_what_is_open_is_told(run: Run) -> None:
    told = section(read_page(html_page(run)), "open").text

    for words in (
        "decode: not offered",
        "1 case blocked by y / round",
        "2 differences not checked",
    ):
        assert words in told


def test_engine_profile_sums_versions_and_command_are_told(run: Run) -> None:
    told = section(read_page(html_page(run)), "run").text

    for words in ("kdtr gate b.kdtr --engine", "mine 1.2 on cpu", "ab" * 32, "rules 1", "float32"):
        assert words in told


@pytest.mark.parametrize(("link", "is_link"), [("https://x.test/7", True), ("javascript:1", False)])
def test_an_excuse_is_told_and_only_links_of_the_web_are_links(
    run_of: RunOf, link: str, is_link: bool
) -> None:
    excuse = Excuse("e1", "a known gap", link)

    page = read_page(html_page(run_of(finding(verdict=Verdict.EXCUSED, excuse=excuse))))

    fault = section(page, "fault-1")
    assert f"expected becausea known gap (e1) {link}" in fault.text
    assert is_link == (link in [node.attributes["href"] for node in page.all("a")])
    assert [] == page.all("nav")  # where faults are listed


def test_two_runs_differ_in_their_header_alone(run: Run) -> None:
    later = replace(run, header=replace(run.header, started="2027-02-03T04:05:06Z"))

    one, other = html_page(run), html_page(later)

    assert one != other
    assert one == other.replace(b"2027-02-03T04:05:06Z", run.header.started.encode())


def test_each_of_six_faults_is_named_by_its_rule_and_its_place(six_faults: Run) -> None:
    page = read_page(html_page(six_faults))

    (nav,) = page.all("nav")
    assert {
        "POS-1": "all-moe",
        "MASK-2": "half-split",
        "ACC-1": "latent-eps",
        "COMMIT-1": "no-q-lora",
        "MOE-3": "softmax",
        "MLA-7": "yarn",
    } == {
        item.all("span", "rule")[0].text: item.all("span", "note")[0].text.partition(":")[0]
        for item in nav.all("li")
    }


def test_a_run_of_six_faults_stays_small(six_faults: Run) -> None:
    assert len(html_page(six_faults)) < 200_000


def test_a_run_of_very_many_faults_stays_readable(run_of: RunOf) -> None:
    many = [finding(f"c{i}", stage=f"s{i}", looks_like=()) for i in range(300)]

    text = html_page(run_of(*many))
    page = read_page(text)

    assert len(text) < 2_000_000
    assert 300 == len(page.all("section", "fault"))
    assert 3 * 50 == len(page.all("svg"))
    assert finding("c299").reproduce in section(page, "fault-300").text


# The page's colours


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block))


def luminance(colour: str) -> float:
    """Relative, as WCAG 2.2 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", [0, 1, 2])  # light, dark, print
@pytest.mark.parametrize("text", ["ink", "soft", "good", "bad", "tie", "link", "path"])
def test_text_stands_out_from_every_ground_it_is_on(scheme: int, text: str) -> None:
    css = resources.files("kdtr.conformance.report_files").joinpath("page.css").read_text()
    found = colours(re.findall(r":root \{(.*?)\}", css, re.DOTALL)[scheme])
    grounds = ["paper", "well", *{"bad": ["bad-well"], "path": ["path-well"]}.get(text, [])]

    for ground in grounds:
        light, dark = sorted((luminance(found[text]), luminance(found[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {ground}"
