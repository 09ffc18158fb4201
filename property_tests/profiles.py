"""How many examples, and which: profile `ci` in continuous integration, else `dev`.

The variable KDTR_HYPOTHESIS_PROFILE names one; without it CI chooses `ci`. Profile `campaign` is
that of the workers of `kdtr campaign`.
"""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, Phase, settings

VARIABLE = "KDTR_HYPOTHESIS_PROFILE"
CAMPAIGN = "campaign"
_EXAMPLES = 50
# Laws that run no forward take many more examples in the same time.
_CHEAP_EXAMPLES = 200
_CAMPAIGN_EXAMPLES = 200
_BRIEF = 5  # one example in brief for so many in ci


def load() -> None:
    """dev: new examples in every run, the failed ones first. ci: the same examples in every run.
    brief: fewer of those of ci, for a run of all tests.

    No deadline in either: time is never asserted in tests.
    """
    # print_blob: the example's coding, which the line `again` of a failure hands to --kdtr-example.
    settings.register_profile("dev", max_examples=_EXAMPLES, deadline=None, print_blob=True)
    settings.register_profile(
        "ci",
        max_examples=_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
    )
    settings.register_profile("brief", settings.get_profile("ci"), max_examples=_EXAMPLES // _BRIEF)
    _register_campaign(_CAMPAIGN_EXAMPLES)
    settings.load_profile(os.environ.get(VARIABLE) or ("ci" if os.environ.get("CI") else "dev"))


def load_campaign(examples: int) -> None:
    """campaign: this many examples of every law, chosen by its seed, climbing towards targets.

    To be called before a law is imported: `given` fixes a law's settings when it decorates.
    """
    current = settings.get_current_profile_name()
    same = current == CAMPAIGN and settings.get_profile(CAMPAIGN).max_examples == examples
    if same:
        return
    imported = [name for name in sys.modules if name.startswith(f"{__package__}.test_")]
    assert not imported, f"{imported[0]} was imported with the settings of profile {current}"
    _register_campaign(examples)
    settings.load_profile(CAMPAIGN)


def _register_campaign(examples: int) -> None:
    settings.register_profile(
        CAMPAIGN,
        # Not the profile that is loaded: under CI=true that is another one.
        settings.get_profile("default"),
        max_examples=examples,
        deadline=None,
        derandomize=False,
        database=None,  # what another run left would be tried first
        print_blob=True,
        report_multiple_bugs=False,  # a unit ends with its first failure
        phases=(Phase.generate, Phase.target, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def cheap() -> settings:
    """A decorator for laws that run no forward; the rest is the profile's."""
    if settings.get_current_profile_name() == CAMPAIGN:
        return settings()
    brief = settings.get_current_profile_name() == "brief"
    return settings(max_examples=_CHEAP_EXAMPLES // (_BRIEF if brief else 1))
