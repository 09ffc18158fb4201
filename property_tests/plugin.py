"""pytest's side of the laws: what was tried, and how to see it again.

Registered as the pytest plugin `kdtr-laws`, so that `pytest --pyargs kdtr.property_tests
--kdtr-engine my.pkg:make` works from an installed wheel; the options that name the engine are those
of the plugin `kdtr` (kdtr.pytest_plugin). Without them the laws run on the engines that ship here
(`conftest.py`). Nothing heavy is imported before a law is collected: every pytest of the
environment loads this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kdtr.property_tests.tally import Tally
    from kdtr.property_tests.watch import Example

_HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kdtr-laws", "laws of tree-speculative decoding (kdtr.property_tests)")
    group.addoption(
        "--kdtr-twin-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword that gives a second engine which nobody may tell from the first, such as "
        "page_size=3; repeat for more",
    )
    group.addoption(
        "--kdtr-failures",
        default="kdtr-failures",
        metavar="DIR",
        help="where failed examples are written as golden bundles (default: kdtr-failures)",
    )
    group.addoption(
        "--kdtr-example",
        metavar="BLOB",
        help="run the one example that a failure printed, on the one law selected with -k",
    )


def pytest_configure(config: pytest.Config) -> None:
    _check_options(config)
    if config.getoption("--kdtr-example") and getattr(config.option, "dist", "no") != "no":
        # pytest-xdist has no way to pass on what a worker refuses.
        raise pytest.UsageError("--kdtr-example runs one example; expected one process: add -n 0")
    config.pluginmanager.register(Laws(config), "kdtr-laws-watch")


def _check_options(config: pytest.Config) -> None:
    """An empty value, as of a variable that is not set, is none."""
    for option in ("--kdtr-example", "--kdtr-failures"):
        if config.getoption(option) == "":
            raise pytest.UsageError(f"{option} is empty; expected a value, or leave it out")
    if config.getoption("--kdtr-twin-option") and _engine(config) is None:
        raise pytest.UsageError("--kdtr-twin-option belongs to --kdtr-engine; name an engine too")


def _engine(config: pytest.Config) -> str | None:
    """Of the plugin `kdtr`, which `-p no:kdtr` leaves out."""
    name: str | None = config.getoption("--kdtr-engine", None)
    return name


class Laws:
    """Watches the laws of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tally: Tally | None = None  # None until a law is collected
        self._last: dict[str, Example] = {}  # the latest failed example by law

    @pytest.hookimpl(trylast=True)  # what -k has left
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        ours = [
            item
            for item in items
            if item.path.resolve().parent == _HERE and hasattr(item, "function")
        ]
        blob = self._config.getoption("--kdtr-example")
        if blob:
            self._one_law(sorted({law_name(item) for item in ours}))
        if not ours:
            return  # and Hypothesis stays unimported
        from kdtr.property_tests import laws
        from kdtr.property_tests.tally import Tally

        # pytest may load a module under a name of its own: these are not the functions of laws().
        functions = {item.function: law_name(item) for item in ours}
        self._tally = Tally()
        for function, name in functions.items():
            laws.watch_examples(name, function, self._take)
            if blob:
                try:
                    laws.only_example(function, blob)
                except ValueError as error:
                    raise pytest.UsageError(f"--kdtr-example {blob}: {error}") from error

    def _one_law(self, names: list[str]) -> None:
        """An example is one law's: on another it is nothing, or something else."""
        if len(names) != 1:
            few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise pytest.UsageError(
                f"--kdtr-example: {len(names)} laws are selected{f' ({few})' if names else ''}; "
                "expected the one that the example is of; add -k test_NAME, as the failure printed"
            )

    def _take(self, example: Example) -> None:
        assert self._tally is not None
        self._tally.count(example)
        if example.verdict == "failed":
            self._last[example.law] = example

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.when == "call" and report.failed:
            self._explain(item, call, report)
        return report

    def _explain(self, item: pytest.Item, call: pytest.CallInfo[None], report: Any) -> None:
        """Below the traceback: the rules, the bundle, and the line that shows it again."""
        name = law_name(item)
        example = self._last.pop(name, None)
        if example is None or call.excinfo is None:
            return
        from kdtr.property_tests.failure import explain_failure

        given: dict[str, Any] = getattr(item, "funcargs", {})
        text = explain_failure(
            name,
            example,
            call.excinfo.value,
            given.get("engine", given.get("twins")),
            directory=self._config.getoption("--kdtr-failures"),
        )
        report.sections.append(("kdtr", text))

    # What each process of xdist has tried comes together in the one that reports.

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None and self._tally is not None:
            output["kdtr_tally"] = self._tally.as_dict()
        if output is None and self._shows_nothing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _shows_nothing(self) -> bool:
        """Whether an engine was named and no law about engines held in a single example."""
        if self._tally is None or not _engine(self._config):
            return False
        from kdtr.property_tests.laws import laws

        return not any(laws()[law].subject for law in self._tally.held if law in laws())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        from kdtr.property_tests.tally import Tally

        counted = getattr(node, "workeroutput", {}).get("kdtr_tally")
        if counted is not None:
            self._tally = self._tally or Tally()
            self._tally.add(Tally.from_dict(counted))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._tally is None or not self._tally.verdicts:
            return
        terminalreporter.section("laws (kdtr.property_tests)")
        for line in self._tally.lines():
            terminalreporter.write_line(line)
        if self._shows_nothing():
            terminalreporter.write_line("FAILED: no law about engines held: nothing was tried")


def law_name(item: pytest.Item) -> str:
    """A law is named like its function, without `test_` and the engine in brackets."""
    return str(getattr(item, "originalname", item.name)).removeprefix("test_")
