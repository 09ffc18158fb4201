"""A fault of a run as a section of the page: what helps most comes first."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.drawing import Drawing, path_text
from kdtr.conformance.finding import Finding
from kdtr.conformance.report_experiments import Experiment
from kdtr.conformance.report_files.html_elements import Content, Element, element
from kdtr.conformance.report_files.html_numbers import numbers_around
from kdtr.conformance.report_files.run import Fault, Run
from kdtr.conformance.report_files.svg_mask import mask_pictures, mask_words
from kdtr.conformance.report_files.svg_slots import slot_picture, slots_tell
from kdtr.conformance.report_files.svg_tree import tree_legend, tree_picture
from kdtr.contract import rule

_PLACES = 60  # of a fault that are listed
_MARKED = re.compile(r"(\*\w[\w ]*\*|`[^`]+`)")


def fault_section(run: Run, fault: Fault, *, brief: bool = False) -> Element:
    """Everything about one fault; `fault-N` is its id. In brief without pictures and numbers."""
    first = fault.first
    ident = f"fault-{fault.number}"
    return element(
        "section",
        element("h2", f"{fault.number}. ", _rule_ids(fault), fault.title(), id=f"{ident}-title"),
        element("p", _verdict(fault), " in ", _place(run, first), class_="seen"),
        element("pre", first.summary, class_="said") if "\n" in first.summary else None,
        _facts(fault),
        element("div", _why(fault), class_="why"),
        None if brief else _pictures(ident, first),
        None if brief else _numbers(first),
        _rules(fault),
        _next(first),
        _block("See it again", command(first.reproduce)) if first.reproduce else None,
        None if brief else _elsewhere(run, fault),
        id=ident,
        class_=f"fault {'bad' if fault.is_bad else 'quiet'}",
        aria_labelledby=f"{ident}-title",
    )


def command(line: str) -> Element:
    """A line for a shell, to be copied; it breaks between words, and not within `--case`."""
    words = [[" " if i else "", element("span", word)] for i, word in enumerate(line.split(" "))]
    return element("pre", element("code", words), class_="command")


def verdict_word(word: str) -> Element:
    """A verdict with its sign: never by colour alone."""
    signs = {"pass": "✓", "fail": "✗", "error": "✗", "near tie": "≈", "excused": "!"}
    class_ = word.replace(" ", "-")
    return element("span", f"{signs.get(word, '·')} {word}", class_=f"verdict {class_}")


def _rule_ids(fault: Fault) -> Content:
    rules = fault.rules()
    return [element("span", rules[0], class_="rule"), " "] if rules else None


def _verdict(fault: Fault) -> Element:
    return verdict_word(fault.first.verdict.value)


def _place(run: Run, finding: Finding) -> Content:
    place = finding.place
    bundle = run.bundle_names().get(place.bundle, place.bundle)
    at_stage = "" if finding.stage == place.point else f", at the stage {finding.stage}"
    return [
        element("b", place.text(bundle)),
        f"{at_stage}: {finding.summary.split(chr(10), 1)[0]}",
    ]


def _facts(fault: Fault) -> Element | None:
    first = fault.first
    rows: list[tuple[str, Content]] = []
    if first.excuse is not None:
        link = first.excuse.link
        # A link that is not one of the web is shown and not followed.
        is_web = link.startswith(("https://", "http://"))
        shown: Content = element("a", link, href=link, rel="noreferrer") if is_web else link
        told = [first.excuse.reason, " (", first.excuse.entry, ") ", shown]
        rows.append(("expected because", told))
    rows += [
        (label, text)
        for label, text in (
            ("blame", first.blame),
            ("at", first.where),
            ("expected", first.expected),
            ("actual", first.actual),
        )
        if text
    ]
    if not rows:
        return None
    content = [[element("dt", label), element("dd", text)] for label, text in rows]
    return element("dl", content, class_="facts")


def _why(fault: Fault) -> Iterator[Content]:
    why = fault.explanations
    for number, hint in enumerate(why.rivals, start=1):
        label = "Looks like" if len(why.rivals) == 1 else f"Explanation {number}"
        yield element("p", element("b", f"{label}: "), hint.says, " ", _fit(hint))
    for one in why.tellings:
        yield element("p", element("b", f"To tell {one.label()}: "), one.experiment.says)
        yield command(one.experiment.command) if one.experiment.command else None
    for hint, experiment in why.partial:
        yield element("p", element("b", "Looks like: "), hint.says, " ", _fit(hint))
        yield from _to_be_sure(experiment)
    for ruled_out in why.ruled_out:
        text = f"{ruled_out.hint.says}: {ruled_out.against}"
        yield element("p", element("b", "Not: "), text, class_="ruled-out")


def _to_be_sure(experiment: Experiment | None) -> Iterator[Content]:
    if experiment is None:
        return
    yield element("p", element("b", "To be sure: "), experiment.says)
    yield command(experiment.command) if experiment.command else None


def _fit(hint: Hint) -> Element:
    text = "fits every element" if hint.fit >= 1 else f"fits {100 * hint.fit:.0f}%"
    if hint.seen_in:
        text += f"; {hint.would_tell()}"
    return element("span", f"({', '.join((text, *hint.rules))})", class_="note")


def _pictures(ident: str, finding: Finding) -> Element | None:
    drawing = finding.drawing
    if drawing is None:
        return None
    figures: list[Content] = []
    if not drawing.is_chunk:
        n = len(drawing.parents)
        told = f"Draft tree: {n} node{'' if n == 1 else 's'} at L = {drawing.committed_len}"
        tree = tree_picture(f"{ident}-tree", drawing)
        figures.append(_figure(told, tree, [_walks(drawing), _legend(drawing)]))
    if _mask_tells(drawing):
        figures.append(_masks(ident, drawing))
    if slots_tell(finding, drawing):
        told = "Slots of the prompt" if drawing.is_chunk else "Slots"
        figures.append(_figure(told, slot_picture(f"{ident}-slots", finding, drawing)))
    return element("div", figures, class_="pictures") if figures else None


def _walks(drawing: Drawing) -> Element | None:
    if drawing.shown_path is None or drawing.shown_path == drawing.path:
        return None
    told = f"{path_text(drawing.path)} is accepted; the engine's path is "
    return element("p", told, path_text(drawing.shown_path), class_="note")


def _mask_tells(drawing: Drawing) -> bool:
    """A causal mask as every prompt has it tells nothing; nor does that of a lone root."""
    shown = drawing.shown_mask
    differs = shown is not None and bool((shown != drawing.mask).any())
    return differs or not (drawing.is_chunk or len(drawing.parents) == 1)


def _masks(ident: str, drawing: Drawing) -> Element:
    grids = [
        element("figure", element("figcaption", caption), element("div", image, class_="scroll"))
        for caption, image in mask_pictures(f"{ident}-mask", drawing)
    ]
    legend = "● visible, blank hidden; ! visible but must be hidden, ? hidden but must be visible"
    if len(grids) == 1:
        legend = "● visible, blank hidden"
    notes = element("p", "; ".join(mask_words(drawing)), class_="note")
    return element(
        "figure",
        element("figcaption", element("b", "Mask: row sees column")),
        element("div", grids, class_="grids"),
        notes if len(grids) > 1 else None,
        element("p", legend, class_="legend"),
        class_="picture",
    )


def _figure(caption: str, image: Element, below: Content = None) -> Element:
    return element(
        "figure",
        element("figcaption", element("b", caption)),
        element("div", image, class_="scroll"),
        below,
        class_="picture",
    )


def _legend(drawing: Drawing) -> Element:
    keys = [
        element("span", element("i", class_=class_, aria_hidden="true"), text)
        for class_, text in tree_legend(drawing)
    ]
    return element("p", keys, class_="legend")


def _numbers(finding: Finding) -> Element | None:
    drawn = finding.stage == "mask" and finding.drawing is not None
    if finding.excerpt is None or drawn:
        return None
    return _block("Numbers", numbers_around(finding.excerpt))


def _rules(fault: Fault) -> Element | None:
    rules = [_rule(rule_id) for rule_id in fault.rules()]
    return _block("Rules", element("dl", rules)) if rules else None


def _rule(rule_id: str) -> Content:
    return [element("dt", rule_id), element("dd", _marked(rule(rule_id)))]


def _marked(sentence: str) -> Iterator[Content]:
    """A sentence of RULES.md with its *emphasis* and `code` as elements."""
    for part in _MARKED.split(sentence):
        tag = {"*": "em", "`": "code"}.get(part[:1]) if _MARKED.fullmatch(part) else None
        yield part if tag is None else element(tag, part[1:-1])


def _next(finding: Finding) -> Element | None:
    return _block("Next", element("p", finding.next_step)) if finding.next_step else None


def _elsewhere(run: Run, fault: Fault) -> Element | None:
    others = fault.group.findings[1:]
    if not others:
        return None
    places = [
        element("li", _place(run, finding), f", at {finding.where}" if finding.where else "")
        for finding in others[:_PLACES]
    ]
    if len(others) > _PLACES:
        places.append(element("li", f"and {len(others) - _PLACES} more"))
    summary = f"Seen in {len(others)} other case{'' if len(others) == 1 else 's'} or modes"
    return element("details", element("summary", summary), element("ul", places))


def _block(title: str, *content: Content) -> Element:
    return element("div", element("h3", title), content, class_="block")
