"""A twist: one forward that goes wrong in one way, with the words for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kdtr.conformance.diagnosis_forward import Setting, Workings
from kdtr.conformance.diagnosis_past import Past


@dataclass(frozen=True, slots=True, eq=False)
class Twist:
    """A forward that goes wrong in one way.

    seen_in  the stage in which that is seen first, in first_layer where stages are per layer
    sure     whether it must be seen there; what a later norm takes out again need not
    """

    says: str
    rules: tuple[str, ...]
    seen_in: str
    setting: Setting
    specific: int = 2
    first_layer: int = 0
    sure: bool = True


def twisted(
    past: Past,
    says: str,
    rule: str,
    seen_in: str,
    how: Workings,
    specific: int = 2,
    *,
    sure: bool = True,
) -> Twist:
    setting = replace(past.setting, workings=how)
    return Twist(says, (rule,), seen_in, setting, specific, sure=sure)
