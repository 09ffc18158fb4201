"""Writes docs/shrinking.md: the smallest counterexample of each fault, found in two ways.

    python tests/property_tests/shrinking/shrinking_page.py [--seeds N] [--out FILE]

It refuses when Hypothesis shrinks to another size than the one that brute force finds first.
"""

from __future__ import annotations

import argparse
import functools
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests" / "property_tests" / "engines"))

from exhaustive import MAX_PROMPT, MODELS, TOKENS, Enumerated, enumerate_scenes  # noqa: E402
from played_size import Size, largest_session, size  # noqa: E402
from shrinking_faults import FAULTS  # noqa: E402
from shrunk import failure, subject_of  # noqa: E402

from kdtr.contract import Acceptance, DraftTree, rule  # noqa: E402
from kdtr.property_tests.trees import picture  # noqa: E402
from kdtr.property_tests.watch import Example  # noqa: E402

PAGE = ROOT / "docs" / "shrinking.md"
SEEDS = 3

HEAD = """# Counterexamples shrink to the minimum

<!-- Written by tests/property_tests/shrinking/shrinking_page.py; do not edit. -->

A counterexample is worth reading if nothing in it can be left out. For eight faults, planted into
the host engine, the smallest one is known: brute force runs the law's own body on every scene in
the order of its size and stops at the first size at which the fault shows. Hypothesis, which knows
nothing of this, draws, fails and shrinks. Both end at the same size, from every seed tried.

Size is a tuple that is compared from its first field on: nodes of all trees that were verified (a
decode is a tree of one node), nodes that were committed, tokens of prompts, chunks of prompts. It
is counted from what the session was asked, not from what was drawn.

A scene has a model ({models} of them), tokens ({tokens}), a prompt of 0 to {max_prompt} tokens,
and trees of every shape in every topological order, with every path. Pages hold 3 rows, so a tree
begins at every offset in a page.

| fault | breaks | nodes | path | prompt | chunks | smaller scenes tried |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

To write this page, and to try more seeds than the tests do:

```
python tests/property_tests/shrinking/shrinking_page.py --out docs/shrinking.md
python tests/property_tests/shrinking/shrinking_page.py --seeds 20
```

To see one of them fail, with `tests/property_tests/engines` in `PYTHONPATH`:

```
pytest --pyargs kdtr.property_tests -k test_{law} \\
    --kdtr-engine shrinking_faults:make_engine --kdtr-engine-option fault={fault}
```
"""

SECTION = """
## {fault}

{what}

`{law}` names it: {breaks}, *{rule}*

```
{shown}
```

{why}

Of size {minimum}, {shown_in} of {tried} scenes show it. Sizes before it as
nodes-path-prompt-chunks, and scenes of each, in all of which the law held: {smaller}.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A fault's smallest counterexample, enumerated and shrunk."""

    fault: str
    enumerated: Enumerated
    failures: tuple[tuple[Example, BaseException] | None, ...]  # by seed

    @property
    def shrunk(self) -> list[Example | None]:
        """By seed: the last example that failed, the smallest that Hypothesis finds from it."""
        return [None if failed is None else failed[0] for failed in self.failures]

    @property
    def sizes(self) -> list[Size | None]:
        return [None if example is None else size(example) for example in self.shrunk]


@functools.cache
def find(fault: str, seeds: int = SEEDS) -> Found:
    subject = subject_of(fault)
    failures = tuple(failure(fault, subject, seed) for seed in range(seeds))
    return Found(fault, enumerate_scenes(FAULTS[fault].law, subject), failures)


def page(found: Sequence[Found]) -> str:
    first = found[0]
    head = HEAD.format(
        models=len(MODELS),
        tokens=", ".join(TOKENS),
        max_prompt=MAX_PROMPT,
        rows="\n".join(map(_row, found)),
        law=FAULTS[first.fault].law,
        fault=first.fault,
    )
    return head + "".join(map(_section, found))


def _row(found: Found) -> str:
    minimum = found.enumerated.minimum
    tried = found.enumerated.held.total()
    cells = [found.fault, FAULTS[found.fault].breaks, *map(str, minimum), str(tried)]
    return f"| {' | '.join(cells)} |"


def _section(found: Found) -> str:
    fault, example = FAULTS[found.fault], found.shrunk[0]
    assert example is not None
    held = sorted(found.enumerated.held.items())
    smaller = ", ".join(f"{_brief(one)} {n}" for one, n in held) or "none"
    text = SECTION.format(
        fault=found.fault,
        what=fault.what,
        law=fault.law,
        breaks=fault.breaks,
        rule=rule(fault.breaks),
        shown="\n".join(_played(example)),
        why=fault.why,
        minimum=_brief(found.enumerated.minimum),
        shown_in=found.enumerated.shown,
        tried=found.enumerated.shown + found.enumerated.hidden,
        smaller=smaller,
    )
    return _wrapped(text)


def _brief(one: Size) -> str:
    return "-".join(map(str, one))


def _played(example: Example) -> list[str]:
    """What the largest session was asked, with each tree as text."""
    lines: list[str] = []
    tree: DraftTree | None = None
    events = largest_session(example).events
    for i, (verb, what) in enumerate(events):
        if verb == "verify":
            tree = what
            follows = events[i + 1][1] if i + 1 < len(events) else None
            path = follows.path if isinstance(follows, Acceptance) else ()
            lines += ["verify", textwrap.indent(picture(tree, path), "    ")]
        elif verb == "commit":
            lines.append(f"commit  path {', '.join(map(str, what.path))}")
        elif verb == "prefill":
            lines.append(f"prefill {', '.join(map(str, what))}")
        elif verb == "decode":
            lines.append(f"decode  {what}")
    return lines


def _wrapped(text: str) -> str:
    """Paragraphs at 100 columns; pictures as they are."""
    parts = [
        part if part.startswith("```") else textwrap.fill(part, 100, break_on_hyphens=False)
        for part in text.strip().split("\n\n")
    ]
    return "\n" + "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument("--out", type=Path, help="the file to write (default: none)")
    args = parser.parse_args()
    found, code = [], 0
    for fault in FAULTS:
        one = find(fault, args.seeds)
        found.append(one)
        other = {seed: s for seed, s in enumerate(one.sizes) if s != one.enumerated.minimum}
        verdict = f"but from seeds {other}" if other else f"from {args.seeds} seeds"
        print(f"{fault}: {_brief(one.enumerated.minimum)} {verdict}", flush=True)
        code = code or int(bool(other))
    if args.out and not code:
        args.out.write_text(page(found), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
