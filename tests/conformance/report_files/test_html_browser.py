"""The page in a real browser: nothing complains, nothing overflows, paper holds all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.html_page import html_page

from .browser import NAMES, Browser, chromium

WIDTHS = [1280, 768, 360]
# Elements that reach past the window, but in boxes that scroll by themselves.
OVERFLOWING = """
[...document.querySelectorAll("body *")]
  .filter((e) => !e.closest(".scroll > *") && e.getBoundingClientRect().right > innerWidth + 1)
  .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)
"""
# Texts of pictures that are cut off at an edge.
CUT = """
[...document.querySelectorAll("svg")].flatMap((svg) => {
  const { width, height } = svg.viewBox.baseVal;
  return [...svg.querySelectorAll("text")]
    .filter((text) => {
      const box = text.getBBox();
      return box.x < 0 || box.y < 0 || box.x + box.width > width || box.y + box.height > height;
    })
    .map((text) => `${svg.id}: ${text.textContent}`);
})
"""
# Texts of slots that are wider than their slot.
TOO_WIDE = """
[...document.querySelectorAll("svg[id$=slots]")].flatMap((svg) => {
  const width = svg.querySelector("rect").getBBox().width;
  return [...svg.querySelectorAll("text[text-anchor=middle]")]
    .filter((text) => text.getBBox().width > width)
    .map((text) => text.textContent);
})
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    started = Browser(path, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    run: Run = request.getfixturevalue(request.param)
    path = tmp_path / "report.html"
    path.write_bytes(html_page(run))
    return path.as_uri()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("url", ["run", "hostile", "six_faults"], indirect=True)
def test_nothing_complains_and_nothing_overflows(browser: Browser, url: str, width: int) -> None:
    browser.open(url, width)

    assert [] == browser.complaints
    assert width >= browser.value("document.documentElement.scrollWidth")
    assert [] == browser.value(OVERFLOWING)


@pytest.mark.parametrize("url", ["run", "six_faults"], indirect=True)
def test_no_text_of_a_picture_is_cut(browser: Browser, url: str) -> None:
    browser.open(url)

    assert 0 < browser.value("document.querySelectorAll('svg text').length")
    assert [] == browser.value(CUT)
    assert [] == browser.value(TOO_WIDE)


@pytest.mark.parametrize("url", ["six_faults"], indirect=True)
def test_pictures_and_sections_have_names_for_who_cannot_see(browser: Browser, url: str) -> None:
    browser.open(url)

    nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]

    named: dict[str, list[str]] = {}
    for node in nodes:
        named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert len(named["image"]) == browser.value("document.querySelectorAll('svg').length")
    for role in ("image", "link", "region", "navigation", "heading", "button", "checkbox"):
        assert all(named[role]), role


@pytest.mark.parametrize("url", ["six_faults"], indirect=True)
def test_paper_has_a_page_for_each_fault_and_opens_all_details(browser: Browser, url: str) -> None:
    browser.open(url)

    paper = browser.paper()

    assert paper.startswith(b"%PDF")
    assert 8 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 14  # verdict, six faults, the rest
    assert browser.value("[...document.querySelectorAll('details')].every((one) => one.open)")


@pytest.mark.parametrize("url", ["run"], indirect=True)
def test_the_filter_leaves_what_fails(browser: Browser, url: str) -> None:
    browser.open(url)
    shown = "[...document.querySelectorAll('tr[data-bad]')].filter((one) => !one.hidden).length"

    before = browser.value(shown)
    browser.value("document.querySelector('.filter input').click()")

    assert (5, 2) == (before, browser.value(shown))


@pytest.mark.parametrize("url", ["run"], indirect=True)
def test_without_scripts_the_page_says_the_same(browser: Browser, url: str) -> None:
    try:
        browser.ask("Emulation.setScriptExecutionDisabled", value=True)
        browser.open(url)
        without = browser.value("document.querySelector('main').innerText")
        controls = browser.value("document.querySelectorAll('button, input').length")
    finally:
        browser.ask("Emulation.setScriptExecutionDisabled", value=False)
    browser.open(url)
    with_them = browser.value(
        "document.querySelectorAll('button, .filter').forEach((one) => one.remove()),"
        "document.querySelector('main').innerText"
    )

    assert 0 == controls
    assert with_them == without


@pytest.mark.parametrize("url", ["hostile"], indirect=True)
def test_a_script_that_an_engine_wrote_is_not_run(browser: Browser, url: str) -> None:
    browser.open(url)

    assert 1 == browser.value("document.scripts.length")
    assert 0 == browser.value("document.images.length")
    assert [] == browser.complaints  # its policy was not even asked
