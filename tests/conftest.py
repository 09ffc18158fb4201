"""One Hypothesis profile for the tests: the same examples every time, and no deadline.

A busy machine is not a fault: time is never asserted.
"""

from hypothesis import settings

settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")
