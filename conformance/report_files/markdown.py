"""A summary in Markdown, for the page of a CI job: the verdict, the faults, what is open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict

from kdtr.conformance.finding import CaseResult
from kdtr.conformance.plain_text import engine_name, printable
from kdtr.conformance.report import unshown_stages
from kdtr.conformance.report_files.not_checked import left_open
from kdtr.conformance.report_files.run import Fault, Run
from kdtr.conformance.report_table import modes_of
from kdtr.conformance.unshown import unshown_groups
from kdtr.conformance.xray_gate import XRAY
from kdtr.contract import rule

_IN_FULL = 20  # faults: GitHub drops a summary of more than 1 MiB
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$])")
_ORDER = ("pass", "near tie", "excused", "fail", "error", "blocked", "unsupported")


def markdown_summary(run: Run) -> bytes:
    """The file, in UTF-8."""
    return "\n".join(_lines(run)).encode("utf-8", "backslashreplace") + b"\n"


def _lines(run: Run) -> Iterator[str]:
    bad = [fault for fault in run.faults if fault.is_bad]
    faults = f": {len(bad)} fault{'' if len(bad) == 1 else 's'}" if bad else ""
    yield f"# {run.name} {'passed' if run.passed else 'FAILED'}{faults}"
    yield ""
    yield _text(run.verdict_line())
    yield ""
    yield from _table(run)
    for fault in run.faults[:_IN_FULL]:
        yield from _fault(run, fault)
    if len(run.faults) > _IN_FULL:
        yield f"{len(run.faults) - _IN_FULL} more faults and near ties are not told here."
        yield ""
    yield from _open(run)
    yield from _about(run)


def _table(run: Run) -> Iterator[str]:
    """A line per bundle, a column per mode: how many cases ended how."""
    results = run.gate.results
    modes = modes_of(results)
    yield f"| bundle | {' | '.join(map(_text, modes))} |"
    yield f"| --- |{' --- |' * len(modes)}"
    for bundle, name in run.bundle_names().items():
        of = [result for result in results if result.bundle == bundle]
        cells = [_cell([one for one in of if one.mode == mode]) for mode in modes]
        yield f"| {_text(name)} | {' | '.join(cells)} |"
    yield ""


def _cell(results: list[CaseResult]) -> str:
    words = [result.verdict.value for result in results]
    parts = [(word, words.count(word)) for word in _ORDER if word in words]
    return ", ".join(
        f"**{n} {word}**" if word in ("fail", "error") else f"{n} {word}" for word, n in parts
    )


def _fault(run: Run, fault: Fault) -> Iterator[str]:
    first = fault.first
    word = first.verdict.value
    rules = " ".join(fault.rules()[:1])
    yield f"## {fault.number}. {f'{rules}: ' if rules else ''}{_text(fault.title())}"
    yield ""
    bundle = run.bundle_names().get(first.place.bundle, first.place.bundle)
    seen = first.headline(bundle)
    said = first.summary.split("\n")
    yield f"**{word}** in {_text(seen)}: {_text(said[0])}"
    yield ""
    if len(said) > 1:  # what an engine wrote, line by line
        yield from _block("\n".join(map(printable, said)), "text")
        yield ""
    if first.excuse is not None:
        yield f"- expected because {_text(first.excuse)}"
    for label, text in (
        ("blame", first.blame),
        ("at", first.where),
        ("expected", first.expected),
        ("actual", first.actual),
    ):
        if text:
            yield f"- {label}: {_text(text)}"
    why = fault.explanations
    for number, hint in enumerate(why.rivals, start=1):
        which = f" {number}" if len(why.rivals) > 1 else ""
        yield f"- looks like{which}: {_text(hint)}"
    for one in why.tellings:
        yield f"- {one.label()}: {_text(one.experiment.says)}"
        if one.experiment.command:
            yield f"  {_code(one.experiment.command)}"
    for hint, _ in why.partial:
        yield f"- looks like: {_text(hint)}"
    for rule_id in fault.rules():
        yield f"- **{rule_id}** {_text(rule(rule_id))}"
    also = fault.group.also_in()
    if also:
        more = f" and {len(also) - 12} more" if len(also) > 12 else ""
        yield f"- also in {_text(', '.join(also[:12]))}{more}"
    if first.next_step:
        yield f"- next: {_text(first.next_step)}"
    if first.reproduce:
        yield ""
        yield from _block(printable(first.reproduce))
    yield ""


def _open(run: Run) -> Iterator[str]:
    sentences = list(left_open(run.gate.results))
    unshown = unshown_groups(unshown_stages(run.gate.results))
    if not sentences and not unshown:
        return
    yield "## Not checked"
    yield ""
    for sentence in sentences:
        yield f"- {_text(sentence)}"
    for one in unshown:
        yield f"- not shown: {_text(one.what)}; {_text(one.by)} would show {_text(one.tells)}"
    yield ""


def _about(run: Run) -> Iterator[str]:
    profile = asdict(run.info.profile)
    yield "## Run"
    yield ""
    yield f"- engine: {_text(engine_name(run.info))}, as {_code(run.header.engine)}"
    yield f"- profile: {_text(', '.join(f'{name} {value}' for name, value in profile.items()))}"
    versions = ", ".join(f"{name} {version}" for name, version in run.header.versions)
    yield f"- versions: {_text(versions)}"
    yield f"- started: {run.header.started}"
    for bundle in run.header.bundles:
        yield f"- {_code(bundle.path)}: SHA-256 {_code(bundle.sha256)}"
    if any(result.mode == XRAY for result in run.gate.results):
        yield "- x-ray models: generated, no file"
    yield ""
    yield from _block(printable(run.header.command))


def _text(text: object) -> str:
    """Foreign text as text: nothing in it is markup, and it stays on its line."""
    return _SPECIAL.sub(r"\\\1", printable(text))


def _code(text: str) -> str:
    """As a code span: its fence is longer than any run of backticks within."""
    shown = printable(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _block(shown: str, language: str = "sh") -> Iterator[str]:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    yield f"{fence}{language}"
    yield shown
    yield fence
