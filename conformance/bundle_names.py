"""What the bundles of a run are called in its report: short, and one name for one bundle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kdtr.conformance.finding import CaseResult
from kdtr.conformance.xray_gate import XRAY


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """By path: the file's stem, or the path where two share one."""
    each = list(dict.fromkeys(paths))
    stems = [Path(path).stem for path in each]
    return {
        path: stem if stems.count(stem) == 1 else path
        for path, stem in zip(each, stems, strict=True)
    }


def names_to_tell(results: Sequence[CaseResult]) -> dict[str, str]:
    """The names that headings need: none where one bundle was judged, as it can be no other."""
    golden = {result.bundle for result in results if result.mode != XRAY}
    return short_names(result.bundle for result in results) if len(golden) > 1 else {}
