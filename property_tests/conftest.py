"""The engines that every law runs on: by name, never imported."""

from __future__ import annotations

from typing import Any

import pytest

from kdtr.conformance.engine_options import engine_options
from kdtr.property_tests import profiles
from kdtr.property_tests.subject import HOST, REFERENCE, Subject, load_subject, other_options

profiles.load()

# The host engine by default has pages and splits longer than most sequences here; small ones put
# a page edge and a merge of splits into almost every example.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": (REFERENCE, {}),
    "reference-scratch": (REFERENCE, {"cache": "scratch"}),
    "host": (HOST, {}),
    "host-small-pages": (HOST, {"page_size": 3, "split_size": 5}),
    "host-bfloat16": (HOST, {"dtype": "bfloat16", "page_size": 3, "split_size": 5}),
}
# Engines that nobody may be able to tell apart (LOSSLESS).
PAIRS = [("reference", "reference-scratch"), ("host", "host-small-pages")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The engine of the command line, or those that ship here."""
    chosen = metafunc.config.getoption("--kdtr-engine")
    if "engine" in metafunc.fixturenames:
        labels = [chosen] if chosen else list(ENGINES)
        metafunc.parametrize("engine", labels, indirect=True, scope="session")
    if "twins" in metafunc.fixturenames:
        pairs = [(chosen, f"{chosen}, twin")] if chosen else PAIRS
        metafunc.parametrize("twins", pairs, indirect=True, scope="session", ids="=".join)


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Subject:
    return _subject(request.param, request.config)


@pytest.fixture(scope="session")
def twins(request: pytest.FixtureRequest) -> tuple[Subject, Subject]:
    """Two configurations of an engine that must be indistinguishable from outside."""
    one, other = request.param
    return _subject(one, request.config), _subject(other, request.config)


def _subject(label: str, config: pytest.Config) -> Subject:
    chosen = config.getoption("--kdtr-engine")
    if not chosen:
        name, options = ENGINES[label]
        return load_subject(label, name, options)
    options = engine_options("--kdtr-engine-option", config.getoption("--kdtr-engine-option"))
    if label == chosen:
        return load_subject(label, chosen, options)
    changed = config.getoption("--kdtr-twin-option")
    if not changed:
        pytest.skip("two configurations that nobody may tell apart: name one by --kdtr-twin-option")
    twin = other_options(options, engine_options("--kdtr-twin-option", changed))
    return load_subject(label, chosen, twin)
