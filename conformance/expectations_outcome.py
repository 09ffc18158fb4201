"""What an expectations file makes of a whole run: what it excused, and where it does not hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

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

_SHOWN = 6  # cases that are named; of more, their number


def unmet(
    expectations: Expectations,
    results: Sequence[CaseResult],
    bundles: Iterable[str | os.PathLike[str]],
    *,
    whole: bool,
) -> list[str]:
    """Why the file fails the run, a sentence for each reason; results as `hold` left them.

    bundles  paths of those that were judged
    whole    whether all cases of them were: only then is an entry stale that selected nothing
    """
    lines = [*_expired(expectations)]
    if whole:
        lines += _stale(expectations, results)
    lines += _above(expectations, results)
    if expectations.must_pass is not None:
        lines += _must_pass(expectations.must_pass, results, bundles, whole=whole)
    return [f"{expectations.path}: {line}" for line in lines]


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


def _stale(expectations: Expectations, results: Sequence[CaseResult]) -> Iterator[str]:
    for entry in expectations.entries:
        if entry.has_expired(expectations.today):
            continue
        selected = [result for result in results if entry.selects(result)]
        if not selected:
            if _in_the_run(entry, results):
                yield (
                    f"entry {entry.id!r} is stale: it selects no case of this run; correct its "
                    "bundle, case or mode, or remove it"
                )
        elif all(_is_over(one) for one in selected) and not any(
            entry.id in one.expected for one in selected
        ):
            yield (
                f"entry {entry.id!r} is stale: it expects {entry.kind.value!r}, and that was seen "
                f"in none of {_cases(selected)}; remove it, or correct its patterns"
            )


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
    *,
    whole: bool,
) -> Iterator[str]:
    named = [Path(bundle) for bundle in bundles]
    yield from _other_corpus(listed, named)
    for patterns in listed.cases:
        shown = "/".join(patterns).removesuffix("/*")
        found = [result for result in results if must_pass(patterns, result)]
        if not found and whole:
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
