"""A worker of a campaign: a process that loads one engine and runs unit after unit.

The same on every crew: processes of this machine (`campaign_processes.py`) or actors of Ray
(`campaign_ray.py`).
"""

from __future__ import annotations

import os
import sys

from kdtr.contract import EngineInfo
from kdtr.property_tests import profiles
from kdtr.property_tests.campaign_plan import Setup, Unit, versions
from kdtr.property_tests.campaign_unit import Outcome, freeze_draws, run_unit
from kdtr.property_tests.laws import laws
from kdtr.property_tests.subject import Subject, load_subject, other_options

# One process per core is all the parallelism there is; what the user has set stays.
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Worker:
    """The engine of a setup, loaded when it is first needed.

    The laws' settings are fixed when `laws()` imports them, so the profile comes first.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._engine: Subject | None = None
        self._twins: tuple[Subject, Subject] | None = None
        if setup.here not in sys.path and os.path.isdir(setup.here):
            sys.path.append(setup.here)
        profiles.load_campaign(setup.examples)
        freeze_draws()
        versions()  # as the laws are now: `laws()` imports them in a moment

    def describe(self) -> EngineInfo:
        """What the engine says of itself.

        Raises EngineError where it cannot be loaded, and the engine's own refusal of an option.
        """
        if self._engine is None:
            name, options = self._setup.engine, dict(self._setup.options)
            engine = load_subject(name, name, options)
            if self._setup.twin_options:
                changed = other_options(options, dict(self._setup.twin_options))
                self._twins = engine, load_subject(f"{name}, twin", name, changed)
            self._engine = engine
        return self._engine.engine.info

    def close(self) -> None:
        """Close what the engines hold beside models: a process of their own, say."""
        for subject in self._twins or (self._engine,):
            close = None if subject is None else getattr(subject.engine, "close", None)
            if callable(close):
                close()

    def run(self, unit: Unit) -> Outcome:
        self.describe()
        law = laws()[unit.law]
        subject = self._engine if law.subject == "engine" else self._twins
        assert subject is not None, f"{unit.id} is a unit of twins, and no twin is set up"
        return run_unit(unit, law, subject, self._setup.again(unit))
