"""Experiments that tell two explanations of one finding apart, and the command that runs one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.drive import MODE
from kdtr.conformance.finding import CaseResult, Finding, Verdict
from kdtr.conformance.xray_gate import XRAY
from kdtr.contract import EngineInfo


class Kind(Enum):
    """What an explanation blames: experiments tell kinds apart."""

    PAGE = "page"
    LAYOUT = "layout"
    CACHE = "cache"
    WALK = "walk"
    ROUNDING = "rounding"
    OTHER = "other"


_KINDS = {
    "POS": Kind.LAYOUT,
    "MASK": Kind.LAYOUT,
    "TREE": Kind.LAYOUT,
    "COMMIT": Kind.CACHE,
    "SLOT": Kind.CACHE,
    "ACC": Kind.WALK,
    "NUM": Kind.ROUNDING,
}
_PAGE_SIZES = ("64", "16")  # another one than the engine has now


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to do and what it tells; `command` runs it, where one command can."""

    says: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """What there is to experiment with.

    options  of the engine's factory, as far as it names them
    results  of this gate: what has run need not be run again
    """

    info: EngineInfo
    options: frozenset[str] = frozenset()
    results: Sequence[CaseResult] = ()

    def right_by_hand(self, finding: Finding) -> bool | None:
        """Whether the finding's case passed in the mode `forward`; None where that does not tell.

        There positions and mask are given, and nothing is walked.
        """
        place = finding.place
        if place.mode == "forward" or not place.point.startswith("round"):
            return None
        for one in self.results:
            if (one.bundle, one.case, one.mode) == (place.bundle, place.case, "forward"):
                decided = one.verdict is Verdict.PASS or one.verdict.is_bad
                return one.verdict is Verdict.PASS if decided else None
        return None

    def branched(self, finding: Finding) -> str:
        """A case with branches that the finding's case blocks, or ""."""
        place = finding.place
        cases = (
            one.case
            for one in self.results
            if one.branched and (one.bundle, one.mode) == (place.bundle, place.mode)
        )
        return next(cases, "")


def kind(hint: Hint) -> Kind:
    """By its first rule; an edge of a page by its words, for no rule speaks of pages."""
    if "page" in hint.says:
        return Kind.PAGE
    family = hint.rules[0].partition("-")[0] if hint.rules else ""
    return _KINDS.get(family, Kind.OTHER)


def by_hand(hint: Hint) -> bool:
    """Whether the mode `forward` would not show it."""
    return kind(hint) in (Kind.LAYOUT, Kind.WALK)


def alone(hint: Hint, finding: Finding, bench: Bench) -> Experiment | None:
    """What would make an explanation certain that has no rival."""
    if hint.fit < 1 and kind(hint) is Kind.PAGE:
        return _other_pages(finding, bench, "it is the edge of a page")
    return None


def telling(
    first: Hint, second: Hint, names: tuple[str, str], finding: Finding, bench: Bench
) -> Experiment:
    """The cheapest experiment that ends differently under the two, by their `names`."""
    kinds = {kind(first): names[0], kind(second): names[1]}
    if len(kinds) == 2:
        found = _of_kinds(kinds, finding, bench)
        if found is not None:
            return found
    branched = bench.branched(finding)
    if branched:
        says = f"judge {branched}, which this one blocks: its branches may fit one of them alone"
        rest = _without(finding, "--until", "--case")
        return Experiment(says, f"{rest} --case {shlex.quote(branched)}" if rest else "")
    if _can_xray(bench):
        says = "an x-ray reads from logits what every row saw, at which distance, and how weighted"
        return Experiment(says, _command(finding, "xray"))
    golden = {(one.bundle, one.case) for one in bench.results if one.mode in MODE}
    if len(golden) == 1:
        says = "judge all cases: another tree may fit one of them alone"
        return Experiment(says, _without(finding, "--case", "--mode", "--until"))
    says = "no case here tells them apart; random trees and models may"
    return Experiment(says, _command(finding, "laws"))


def _of_kinds(kinds: dict[Kind, str], finding: Finding, bench: Bench) -> Experiment | None:
    def other(than: Kind) -> str:
        return next(name for one, name in kinds.items() if one is not than)

    if Kind.PAGE in kinds:
        both = f"it is {kinds[Kind.PAGE]}, and stays if it is {other(Kind.PAGE)}"
        return _other_pages(finding, bench, both)
    if Kind.LAYOUT in kinds and Kind.WALK not in kinds:
        found = _by_hand(kinds[Kind.LAYOUT], other(Kind.LAYOUT), finding, bench)
        if found is not None:
            return found
    if Kind.ROUNDING in kinds and "dtype" in bench.options:
        return Experiment(
            f"rerun with dtype=float32: the error shrinks if it is {kinds[Kind.ROUNDING]}, and "
            f"stays if it is {other(Kind.ROUNDING)}",
            _with_option(finding, "dtype", "float32"),
        )
    if Kind.CACHE in kinds and "snapshot" not in bench.info.verbs:
        return Experiment(
            f"offer snapshot(): the rows that commit left are wrong if it is {kinds[Kind.CACHE]}, "
            f"and right if it is {other(Kind.CACHE)}"
        )
    return None


def _by_hand(layout: str, other: str, finding: Finding, bench: Bench) -> Experiment | None:
    given = "the mode forward, where positions and mask are given"
    right = bench.right_by_hand(finding)
    if right is not None:
        ended = f"passes here, which speaks for {layout}"
        return Experiment(f"{given}, {ended if right else f'fails here too: it is {other}'}")
    if finding.place.mode == "forward" or not MODE["forward"].verbs <= bench.info.verbs:
        return None
    says = f"rerun in {given}: it passes if it is {layout}, and fails as before if it is {other}"
    return Experiment(says, _with(finding, "--mode", "forward"))


def _other_pages(finding: Finding, bench: Bench, ends: str) -> Experiment:
    if "page_size" not in bench.options:
        return Experiment(f"rerun with another size of pages: the fault moves if {ends}")
    now = _options(finding).get("page_size")
    size = next(size for size in _PAGE_SIZES if size != now)
    says = f"rerun with page_size={size}: the fault moves if {ends}"
    return Experiment(says, _with_option(finding, "page_size", size))


def _can_xray(bench: Bench) -> bool:
    ran = any(
        one.mode == XRAY and one.verdict not in (Verdict.BLOCKED, Verdict.UNSUPPORTED)
        for one in bench.results
    )
    return not ran and {"prefill", "verify", "commit"} <= bench.info.verbs


# Commands: the one that reproduces the finding, changed


def _options(finding: Finding) -> dict[str, str]:
    words = shlex.split(finding.reproduce)
    texts = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--engine-option"]
    return dict(text.split("=", 1) for text in texts if "=" in text)


def _with(finding: Finding, flag: str, value: str) -> str:
    words = shlex.split(finding.reproduce)
    if flag in words[:-1]:
        words[words.index(flag) + 1] = value
    elif words:
        words += [flag, value]
    return shlex.join(words)


def _with_option(finding: Finding, key: str, value: str) -> str:
    words = shlex.split(finding.reproduce)
    for i, word in enumerate(words[:-1]):
        if word == "--engine-option" and words[i + 1].startswith(f"{key}="):
            words[i + 1] = f"{key}={value}"
            return shlex.join(words)
    return shlex.join([*words, "--engine-option", f"{key}={value}"] if words else [])


def _without(finding: Finding, *flags: str) -> str:
    words = shlex.split(finding.reproduce)
    kept = [
        word
        for i, word in enumerate(words)
        if word not in flags and (i == 0 or words[i - 1] not in flags)
    ]
    return shlex.join(kept)


def _command(finding: Finding, verb: str) -> str:
    """`kdtr xray` or the laws, with the finding's engine and its options."""
    words = shlex.split(finding.reproduce)
    if "--engine" not in words[:-1]:
        return ""
    engine = words[words.index("--engine") + 1]
    start, flag = [words[0], "xray"], "--engine"
    if verb == "laws":
        start, flag = ["pytest", "--pyargs", "kdtr.property_tests"], "--kdtr-engine"
    options = [
        word
        for key, value in _options(finding).items()
        for word in (f"{flag}-option", f"{key}={value}")
    ]
    return shlex.join([*start, flag, engine, *options])
