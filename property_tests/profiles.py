"""How many examples, and which: profile `ci` in continuous integration, else `dev`.

The variable KDTR_HYPOTHESIS_PROFILE names one; without it CI chooses `ci`.
"""

from __future__ import annotations

import os

from hypothesis import settings

VARIABLE = "KDTR_HYPOTHESIS_PROFILE"
_EXAMPLES = 30
# Laws that run no forward take many more examples in the same time.
_CHEAP_EXAMPLES = 150


def load() -> None:
    """dev: new examples in every run, the failed ones first. ci: the same examples in every run.

    No deadline in either: time is never asserted in tests.
    """
    settings.register_profile("dev", max_examples=_EXAMPLES, deadline=None)
    settings.register_profile(
        "ci",
        max_examples=_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
    )
    settings.load_profile(os.environ.get(VARIABLE) or ("ci" if os.environ.get("CI") else "dev"))


def cheap() -> settings:
    """A decorator for laws that run no forward; the rest is the profile's."""
    return settings(max_examples=_CHEAP_EXAMPLES)
