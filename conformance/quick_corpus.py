"""The quick corpus: the fewest cases of the corpus that kill what all of it kills.

`kdtr mutants --quick-out` chooses them, from what the cases kill of the list of faults and of the
families, and writes quick_corpus.json. Cases are known by their ids and bundles by their sums: a
corpus that was recorded anew is another one, and its quick corpus is to be chosen anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from kdtr.conformance.bundle_paths import by_name
from kdtr.contract import CaseError

FILE = "quick_corpus.json"
_AGAIN = "choose the cases anew with `make quick-corpus`"


@dataclass(frozen=True, slots=True)
class QuickCase:
    """A case of the quick corpus.

    bundle   the file's name, "base.kdtr"
    case     its alias, or "state": the script over the case of this id
    case_id  of the case
    kills    mutants and variants that no other case of the quick corpus kills: why it is there;
             none of base/trees, which is there because it records every stage
    """

    bundle: str
    case: str
    case_id: str
    kills: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuickCorpus:
    """The cases, the SHA-256 of every bundle that they are of, and of how many they are.

    of     cases and scripts of the whole corpus
    lives  variants that no case kills, and whether each shows, in every case and bit for bit, what
           an honest engine does
    """

    cases: tuple[QuickCase, ...]
    sums: dict[str, str]
    of: int
    lives: dict[str, bool]

    def text(self) -> str:
        """The file, a line per case."""
        lines = [json.dumps(_as_json(one), sort_keys=True) for one in self.cases]
        cases = ",\n".join(f"    {line}" for line in lines)
        parts = {
            "of": str(self.of),
            "cases": f"[\n{cases}\n  ]",
            "sums": _indented(self.sums),
            "lives": _indented(self.lives),
        }
        return "{\n" + ",\n".join(f'  "{key}": {text}' for key, text in parts.items()) + "\n}\n"

    def of_bundles(self, bundles: Sequence[str | os.PathLike[str]]) -> QuickCorpus:
        """The cases of these files. Raises CaseError where none is, or a file is another one."""
        given = by_name(bundles)
        for name, file in given.items():
            wanted = self.sums.get(name)
            if wanted is None:
                continue
            found = hashlib.sha256(file.read_bytes()).hexdigest()
            if found != wanted:
                raise CaseError(
                    f"{file}: its SHA-256 is {found[:12]}..., the quick corpus was chosen for "
                    f"{wanted[:12]}...; {_AGAIN}"
                )
        cases = tuple(one for one in self.cases if one.bundle in given)
        if not cases:
            raise CaseError(
                f"{', '.join(given) or 'no bundle'}: the quick corpus has no case of it; expected "
                f"some of {', '.join(self.sums)}"
            )
        return replace(self, cases=cases)


def read_quick() -> QuickCorpus:
    """The one that ships with kdtr."""
    page = json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    cases = tuple(
        QuickCase(one["bundle"], one["case"], one["id"], tuple(one["kills"]))
        for one in page["cases"]
    )
    return QuickCorpus(cases, dict(page["sums"]), int(page["of"]), dict(page["lives"]))


def shipped_corpus() -> list[str]:
    """The bundles that come with the package."""
    folder = resources.files(__package__).joinpath("corpus")
    return sorted(str(path) for path in folder.iterdir() if path.name.endswith(".kdtr"))


def _indented(page: Mapping[str, object]) -> str:
    return json.dumps(page, indent=4, sort_keys=True).replace("\n}", "\n  }")


def _as_json(one: QuickCase) -> dict[str, object]:
    return {"bundle": one.bundle, "case": one.case, "id": one.case_id, "kills": [*one.kills]}
