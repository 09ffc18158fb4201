"""Options for every pytest run that judges an engine, and the way to the golden cases.

Registered as the pytest plugin `kdtr`, so that `pytest --kdtr-engine NAME --kdtr-corpus PATH` works
wherever kdtr is installed (docs/pytest.md). The laws (`kdtr.property_tests`) take their engine from
the same options. Nothing heavy is imported before an engine is named: every pytest of the
environment loads this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Before anything of the user's is loaded, and before pytest captures what is printed."""
    if _judges_here(early_config):
        from kdtr.conformance import running
        from kdtr.conformance.outlive import outlived

        code = outlived()
        if code is not None:
            raise SystemExit(code)
        running.settle(pytest.ExitCode.USAGE_ERROR)  # all that can end pytest until it begins
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int, int]:
    """The parent of `pytest_load_initial_conftests` learns how pytest ends, and that it does."""
    if not _judges_here(config):
        return (yield)
    from kdtr.conformance import running

    running.settle(None)
    try:
        code = yield
    except pytest.UsageError:
        code = int(pytest.ExitCode.USAGE_ERROR)
        raise
    finally:
        running.settle(code)
    return code


def pytest_runtest_logstart(nodeid: str) -> None:
    if "kdtr.conformance.running" in sys.modules:
        sys.modules["kdtr.conformance.running"].at(nodeid)


def _judges_here(config: pytest.Config) -> bool:
    """Whether this process may run the engine, and was started as pytest: not in another program,
    whose parent would be a surprise, and not in a worker, of which pytest-xdist tells it.

    With workers it is the one that waits for them; how many there are, and whether there are any,
    pytest-xdist decides later.
    """
    options = config.known_args_namespace
    is_pytest = [*map(str, config.invocation_params.args)] == sys.argv[1:]
    # The variable is also set in what a worker starts; the worker itself is fed through stdin.
    is_fed = any("stdin.readline" in word for word in sys.orig_argv)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ and is_fed
    return bool(options.kdtr_engine) and is_pytest and not is_worker


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kdtr: a golden case, on the engine of --kdtr-engine")
    _check_options(config)
    _check_engine(config)
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


def _check_engine(config: pytest.Config) -> None:
    """A name that leads to no engine is a usage error, and no failure of a test.

    In the process that was started alone: pytest-xdist cannot pass on what a worker refuses.
    """
    name = config.getoption("--kdtr-engine")
    if name is None or hasattr(config, "workerinput"):
        return
    from kdtr.conformance.engine_loader import check_engine_name, importable_here
    from kdtr.conformance.engine_options import engine_options
    from kdtr.conformance.raised import REFUSAL, told
    from kdtr.contract import KdtrError

    try:
        with importable_here():
            given = config.getoption("--kdtr-engine-option")
            check_engine_name(name, engine_options("--kdtr-engine-option", given))
    except KdtrError as error:
        raise pytest.UsageError(told(error, REFUSAL)) from error
