"""What rows should see, and the ways in which engines get it wrong."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from kdtr.conformance.xray_drive import Answer
from kdtr.conformance.xray_evidence import as_shown, replayed
from kdtr.conformance.xray_patterns import PATTERNS
from kdtr.conformance.xray_replay import RULES, Pattern, Replay
from kdtr.conformance.xray_sessions import scripts
from kdtr.contract import DraftTree, rule

Y = DraftTree(tokens=(50, 51, 52, 53), parents=(-1, 0, 0, 2))


def seen(rows: list) -> list[list[tuple[int, int]]]:
    """Token and distance of what each row sees."""
    return [[(c.token, row.own.position - c.position) for c in row.visible] for row in rows]


def test_the_rules_of_a_y_tree_after_three_tokens() -> None:
    replay = Replay(RULES)
    replay.prefill([10, 11])
    replay.prefill([12])

    rows = replay.verify(Y)

    assert [
        [(10, 3), (11, 2), (12, 1), (50, 0)],
        [(10, 4), (11, 3), (12, 2), (50, 1), (51, 0)],
        [(10, 4), (11, 3), (12, 2), (50, 1), (52, 0)],
        [(10, 5), (11, 4), (12, 3), (50, 2), (52, 1), (53, 0)],
    ] == seen(rows)


def test_the_rules_of_the_round_after_it() -> None:
    replay = Replay(RULES)
    replay.prefill([10])
    replay.verify(Y)
    replay.commit((0, 2, 3))

    rows = replay.verify(DraftTree((60,), (-1,)))

    assert [[(10, 4), (50, 3), (52, 2), (53, 1), (60, 0)]] == seen(rows)


def shown(pattern: Pattern) -> list[tuple[object, ...]]:
    """All that the sessions show of an engine like this."""
    answers = [
        Answer(script, step, np.zeros((len(step.tree), 0)))
        for script in scripts()
        for step in script.steps
    ]
    return [as_shown(row) for row in replayed(answers, pattern)]


def test_the_sessions_tell_every_pattern_from_the_rules_and_from_every_other() -> None:
    by_pattern = {pattern.says: shown(pattern) for pattern in (RULES, *PATTERNS)}

    alike = [(a, b) for a, b in combinations(by_pattern, 2) if by_pattern[a] == by_pattern[b]]

    assert len(PATTERNS) + 1 == len(by_pattern)
    assert [] == alike


def test_every_pattern_names_rules_that_exist() -> None:
    for pattern in PATTERNS:
        assert all(rule(rule_id) for rule_id in pattern.rules), pattern.says
