"""A pytest plugin: the Hypothesis profile `few`, for tests that ask which laws run, not more."""

from hypothesis import settings

settings.register_profile("few", max_examples=4, deadline=None, derandomize=True, database=None)
