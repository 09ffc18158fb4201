"""Options for every pytest run that judges an engine, and the way to the golden cases.

Registered as the pytest plugin `kdtr`, so that `pytest --kdtr-engine NAME --kdtr-corpus PATH` works
wherever kdtr is installed (docs/pytest.md). The laws (`kdtr.property_tests`) take their engine from
the same options. Nothing heavy is imported before a corpus is named: every pytest of the
environment loads this file.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kdtr", "an engine under the judge, or under the laws (kdtr)")
    group.addoption(
        "--kdtr-engine",
        metavar="NAME",
        help="the engine: package.module:factory, stdio:COMMAND, or a registered name such as host",
    )
    group.addoption(
        "--kdtr-engine-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword of its factory, as a Python literal or text; repeat for more",
    )
    group.addoption(
        "--kdtr-corpus",
        action="extend",
        nargs="+",
        default=[],
        metavar="PATH",
        help="judge it by these golden bundles, each case in each mode a test: files, folders, or "
        "`built-in`, the corpus that kdtr brings along. Without other tests named on the command "
        "line these run alone",
    )
    group.addoption(
        "--kdtr-expectations",
        metavar="FILE",
        help="what the engine is known to do wrong, and what must pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kdtr: a golden case, on the engine of --kdtr-engine")
    _check_options(config)
    if config.getoption("--kdtr-corpus"):
        from kdtr.pytest_plugin.cases import Cases

        config.pluginmanager.register(Cases(config), "kdtr-cases")


def _check_options(config: pytest.Config) -> None:
    """An empty name, as of a variable that is not set, is no engine and no file."""
    for option in ("--kdtr-engine", "--kdtr-expectations"):
        if config.getoption(option) == "":
            raise pytest.UsageError(f"{option} is empty; expected a value, or leave it out")
    if "" in config.getoption("--kdtr-corpus"):
        raise pytest.UsageError("--kdtr-corpus is empty; expected a path, or leave it out")
    for option in ("--kdtr-engine-option", "--kdtr-corpus"):
        if config.getoption(option) and config.getoption("--kdtr-engine") is None:
            raise pytest.UsageError(f"{option} belongs to --kdtr-engine; name an engine too")
    if config.getoption("--kdtr-expectations") and not config.getoption("--kdtr-corpus"):
        raise pytest.UsageError(
            "--kdtr-expectations belongs to --kdtr-corpus; name golden bundles too"
        )
