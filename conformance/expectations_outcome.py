"""What an expectations file makes of a whole run: what it excused, and where it does not hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

from kdtr.conformance.expectations import (
    CEILINGS,
    Entry,
    Expectations,
    MustPass,
    bundle_fits,
    must_pass,
)
from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.golden_corpus import SUMS, read_sums
from kdtr.conformance.plain_text import entry as labelled
from kdtr.conformance.xray_gate import XRAY
from kdtr.contract import BundleError

# Cases and modes that the whole gate judges and a part of it does not: what an entry selects among
# them may hold there. None: which they are is not known, so nothing is told of any entry.
Unasked: TypeAlias = Sequence[CaseResult] | None

_SHOWN = 6  # cases that are named; of more, their number


def unmet(
    expectations: Expectations,
    results: Sequence[CaseResult],
    bundles: Iterable[str | os.PathLike[str]],
    unasked: Unasked,
) -> list[str]:
    """Why the file fails the run, a sentence for each reason; results as `hold` left them.

    bundles  paths of those that were judged
    unasked  what the whole gate would judge of them besides
    """
    lines = [*_expired(expectations), *_stale(expectations, results, unasked)]
    lines += _above(expectations, results)
    if expectations.must_pass is not None:
        lines += _must_pass(expectations.must_pass, results, bundles, unasked)
    return [f"{expectations.path}: {line}" for line in lines]


def unknown_lines(
    expectations: Expectations, results: Sequence[CaseResult], unasked: Unasked
) -> list[str]:
    """Entries that would be stale if all of their cases had been asked."""
    lines = []
    for entry in _current(expectations):
        selected = [result for result in results if entry.selects(result)]
        others = [one for one in unasked or () if entry.selects(one)]
        if selected and others and _unseen(entry, selected):
            lines.append(
                f"{expectations.path}: entry {entry.id!r} may be stale: what it expects was seen "
                f"in none of {_cases(selected)}; {len(others)} more of its cases and modes were "
                "not asked, the whole gate tells"
            )
    return lines


def excused_lines(
    expectations: Expectations, results: Sequence[CaseResult], width: int = 80
) -> list[str]:
    """What each entry that holds has excused, and until when."""
    lines: list[str] = []
    for entry in expectations.entries:
        where = [result for result in results if entry.id in result.expected]
        if not where:
            continue
        until = f"; until {entry.expires}" if entry.expires is not None else ""
        text = f"{entry.kind.value} in {_cases(where)}: {entry.reason}"
        text += f" ({entry.link})" if entry.link else ""
        lines += labelled(entry.id, text + until, width)
    return lines


def _expired(expectations: Expectations) -> Iterator[str]:
    for entry in expectations.entries:
        if entry.has_expired(expectations.today):
            yield (
                f"entry {entry.id!r} expired on {entry.expires} and excuses nothing any more; mend "
                "the engine and remove the entry, or decide anew and move the date"
            )


def _stale(
    expectations: Expectations, results: Sequence[CaseResult], unasked: Unasked
) -> Iterator[str]:
    """Of an entry that speaks of what was not asked, nothing is known."""
    if unasked is None:
        return
    for entry in _current(expectations):
        if any(entry.selects(one) for one in unasked):
            continue
        selected = [result for result in results if entry.selects(result)]
        if not selected:
            if _in_the_run(entry, results):
                yield (
                    f"entry {entry.id!r} is stale: it selects no case of this run; correct its "
                    "bundle, case or mode, or remove it"
                )
        elif _unseen(entry, selected):
            yield (
                f"entry {entry.id!r} is stale: it expects {entry.kind.value!r}, and that was seen "
                f"in none of {_cases(selected)}; remove it, or correct its patterns"
            )


def _current(expectations: Expectations) -> list[Entry]:
    return [one for one in expectations.entries if not one.has_expired(expectations.today)]


def _unseen(entry: Entry, selected: Sequence[CaseResult]) -> bool:
    """Whether all that it selects was judged to its end, and nothing was as it expects."""
    return all(_is_over(one) and entry.id not in one.expected for one in selected)


def _in_the_run(entry: Entry, results: Sequence[CaseResult]) -> bool:
    """Whether a bundle that it may speak of was judged."""
    patterns = entry.select.get("bundle")
    return patterns is None or any(bundle_fits(result.bundle, patterns) for result in results)


def _is_over(result: CaseResult) -> bool:
    """Whether nothing that was not reached could still be what an entry expects."""
    return result.verdict in (Verdict.PASS, Verdict.UNSUPPORTED) or (
        result.verdict is Verdict.NEAR_TIE and not result.blocked
    )


def _above(expectations: Expectations, results: Sequence[CaseResult]) -> Iterator[str]:
    ties = [r for r in results if r.verdict is Verdict.NEAR_TIE and r.counted]
    lacking = [r for r in results if r.verdict is Verdict.UNSUPPORTED and r.counted]
    unchecked = [result for result in results if result.not_checked]
    counts = {
        "max_near_ties": (len(ties), ties),
        "max_not_checked": (sum(result.not_checked for result in unchecked), unchecked),
        "max_not_supported": (len(lacking), lacking),
    }
    for name, ceiling in expectations.ceilings.items():
        count, where = counts[name]
        if count > ceiling:
            yield (
                f"{name} = {ceiling}, but there are {count} {CEILINGS[name]}: {_cases(where)}; "
                "find out what changed, then mend it, expect it by an entry, or raise the number"
            )


def _must_pass(
    listed: MustPass,
    results: Sequence[CaseResult],
    bundles: Iterable[str | os.PathLike[str]],
    unasked: Unasked,
) -> Iterator[str]:
    named = [Path(bundle) for bundle in bundles]
    yield from _other_corpus(listed, named)
    for patterns in listed.cases:
        shown = "/".join(patterns).removesuffix("/*")
        found = [result for result in results if must_pass(patterns, result)]
        others = unasked is None or any(must_pass(patterns, one) for one in unasked)
        if not found and not others:
            yield f"mustpass names {shown}, which did not run; give its bundle, or correct the name"
        wrong = [result for result in found if result.verdict is not Verdict.PASS]
        for verdict in dict.fromkeys(result.verdict for result in wrong):
            where = [result for result in wrong if result.verdict is verdict]
            yield f"mustpass names {shown}: {_cases(where)} is {verdict.value!r}; expected 'pass'"


def _other_corpus(listed: MustPass, bundles: Sequence[Path]) -> Iterator[str]:
    """Whether the bundles are those of the corpus that the list was made for."""
    shipped = Path(str(files("kdtr.conformance").joinpath("corpus")))
    folders = dict.fromkeys([*(bundle.resolve().parent for bundle in bundles), shipped.resolve()])
    digests = {folder: _sha256(folder / SUMS) for folder in folders if (folder / SUMS).is_file()}
    pinned = [folder for folder, digest in digests.items() if digest == listed.corpus]
    if not pinned:
        there = ", ".join(f"{folder / SUMS} has {digest}" for folder, digest in digests.items())
        yield (
            f"mustpass.corpus = {listed.corpus}, but {there}: cases or their truths changed; judge "
            "the engine by the new corpus, decide again what must pass, and write the new digest"
        )
        return
    try:
        sums = read_sums(pinned[0])
    except BundleError as error:
        yield f"mustpass: {error}"
        return
    for bundle in bundles:
        if not any(bundle_fits(str(bundle), (patterns[0],)) for patterns in listed.cases):
            continue
        if sums.get(bundle.name) != _sha256(bundle):
            yield (
                f"mustpass names {bundle.name}, but {bundle} is not the bundle of that corpus; "
                "record it again, or take the one whose SHA-256 is in SHA256SUMS"
            )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cases(results: Sequence[CaseResult]) -> str:
    """`tiny: y-tree / round, star / round`; by bundle, and cut, with their number, where many."""
    by_bundle: dict[str, list[str]] = {}
    for result in results[:_SHOWN]:
        name = result.bundle if result.mode == XRAY else Path(result.bundle).name
        by_bundle.setdefault(name, []).append(f"{result.case} / {result.mode}")
    text = "; ".join(f"{name}: {', '.join(cases)}" for name, cases in by_bundle.items())
    if len(results) <= _SHOWN:
        return text
    n_bundles = len({result.bundle for result in results})
    of = f" of {n_bundles} bundles" if n_bundles > 1 else ""
    return f"{text} and {len(results) - _SHOWN} more, {len(results)} cases and modes{of} in all"
