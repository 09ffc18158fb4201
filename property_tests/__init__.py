"""The laws, as property tests that run on any engine."""
