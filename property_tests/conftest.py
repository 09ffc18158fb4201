"""The engines that every law runs on: by name, never imported."""

from __future__ import annotations

from typing import Any

import pytest

from kdtr.property_tests import profiles
from kdtr.property_tests.subject import HOST, REFERENCE, Subject, load_subject

profiles.load()

# The host engine by default has pages and splits longer than most sequences here; small ones put
# a page edge and a merge of splits into almost every example.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": (REFERENCE, {}),
    "reference-scratch": (REFERENCE, {"cache": "scratch"}),
    "host": (HOST, {}),
    "host-small-pages": (HOST, {"page_size": 3, "split_size": 5}),
}
# Engines that nobody may be able to tell apart (LOSSLESS).
PAIRS = [("reference", "reference-scratch"), ("host", "host-small-pages")]


def _subject(label: str) -> Subject:
    name, options = ENGINES[label]
    return load_subject(label, name, options)


@pytest.fixture(scope="session", params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Subject:
    return _subject(request.param)


@pytest.fixture(scope="session", params=PAIRS, ids="=".join)
def twins(request: pytest.FixtureRequest) -> tuple[Subject, Subject]:
    """Two configurations of an engine that must be indistinguishable from outside."""
    one, other = request.param
    return _subject(one), _subject(other)
