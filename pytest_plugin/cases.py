"""Golden cases as test items: `base.kdtr::y-tree[stepwise]`, and `x-ray::visible[x-ray]`.

Ids are a bundle's file name, a case and a mode, wherever the bundle lies. Collection reads bundles
alone and starts no engine, so all workers of pytest-xdist collect the same. Each process judges
what it is given, and what that takes for granted (conformance/judge_bundle.py), so that a verdict
does not hang on the process or the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.bundle_paths import bundle_paths
from kdtr.conformance.engine_options import engine_options
from kdtr.conformance.expectations_file import read_expectations
from kdtr.conformance.file_script import first_small
from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.judge_bundle import Question, questions
from kdtr.conformance.raised import REFUSAL, told
from kdtr.conformance.xray import xray_models
from kdtr.conformance.xray_gate import XRAY
from kdtr.contract import KdtrError
from kdtr.pytest_plugin.bench import Bench
from kdtr.pytest_plugin.case_report import NO_ENGINE, NOT_ASKED, excused_close, properties
from kdtr.pytest_plugin.run_summary import RunSummary


class Cases:
    """The plugin of a run that judges an engine; in each process of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        engine: str = config.getoption("--kdtr-engine")
        file = config.getoption("--kdtr-expectations")
        try:
            self.paths = _by_name(bundle_paths(config.getoption("--kdtr-corpus")))
            expectations = None if file is None else read_expectations(file)
            options = engine_options(
                "--kdtr-engine-option", config.getoption("--kdtr-engine-option")
            )
        except KdtrError as error:
            raise pytest.UsageError(told(error, REFUSAL)) from error
        self.bench = Bench(engine, options, expectations)
        self._selected = _take_ids(config, self.paths)
        self._summary = RunSummary(config, expectations, self.paths)
        if self._selected:
            self._summary.is_part()
        if _named_alone(config):
            config.args[:] = []

    def takes(self, nodeid: str) -> bool:
        """Whether an item is among those named on the command line by ids, or none are."""
        return not self._selected or any(_is_in(one, nodeid) for one in self._selected)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            nodes: list[pytest.Collector] = [
                BundleNode.from_parent(
                    collector, name=name, path=Path(path), nodeid=name, cases=self
                )
                for name, path in self.paths.items()
            ]
            nodes.append(XrayNode.from_parent(collector, name=XRAY, nodeid=XRAY, cases=self))
            report.result = [*report.result, *nodes]
        return report

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        if any(isinstance(item, CaseItem) for item in items):
            self._summary.is_part()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Every id that was named is there, before -k leaves some out; --lf collects less."""
        ids = [item.nodeid for item in items if isinstance(item, CaseItem)]
        lost = [one for one in self._selected if not any(_is_in(one, id_) for id_ in ids)]
        less = ids and self._config.getoption("lf", False)
        if lost and not less and not hasattr(self._config, "workerinput"):
            raise pytest.UsageError(f"not found: {lost[0]}; `--collect-only -q` lists the ids")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """With what -k and --lf have left."""
        ours = [item for item in session.items if isinstance(item, CaseItem)]
        self._summary.selected(len(ours))
        by_node: dict[object, list[CaseItem]] = {}
        for item in ours:
            by_node.setdefault(item.parent, []).append(item)
        for node, of_node in by_node.items():
            asked = {item.question for item in of_node}
            if isinstance(node, BundleNode):
                node.asked = [one for one in node.questions if one in asked]
        self.bench.ask_xray([one.case for item in ours if (one := item.question).mode == XRAY])

    @cached_property
    def in_files(self) -> Path | None:
        """The bundle whose model is also handed over in files, as the gate chooses it."""
        with ExitStack() as stack:
            opened = []
            for path in self.paths.values():
                with suppress(KdtrError, OSError):  # the collection of that bundle says it
                    opened.append(GoldenBundle.open(path))
                    stack.callback(opened[-1].close)
            chosen = first_small(opened)
            return None if chosen is None else Path(chosen.path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._summary.take(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.bench.end()
        self._summary.finish(session)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._summary.take_worker(getattr(node, "workeroutput", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        self._summary.show(terminalreporter)


class BundleNode(pytest.Collector):
    """A golden bundle; open from its collection to the end of the session."""

    def __init__(self, *, cases: Cases, **rest: Any) -> None:
        super().__init__(**rest)
        self.cases = cases
        self.questions: list[Question] = []
        self.asked: list[Question] = []  # in this run, in the gate's order
        self.last: CaseItem | None = None  # that ran
        self._bundle: GoldenBundle | None = None

    def collect(self) -> Iterator[CaseItem]:
        try:
            self._bundle = GoldenBundle.open(self.path)
        except (KdtrError, OSError) as error:
            raise self.CollectError(told(error, REFUSAL)) from error
        self.config.add_cleanup(self._bundle.close)
        in_files = self.path == self.cases.in_files
        self.questions = questions(self._bundle.cases, in_files=in_files)
        yield from _items(self, self.cases, self.questions)

    def result(self, question: Question) -> CaseResult | None:
        assert self._bundle is not None
        bench = self.cases.bench
        if not bench.asks(self._bundle):
            bench.ask(self._bundle, self.asked)
        return bench.result(self._bundle, question)

    def teardown(self) -> None:
        """After the last item of the bundle, or before another bundle's."""
        assert self._bundle is not None
        result = self.cases.bench.close(self._bundle)
        if result is not None and result.verdict.is_bad:
            pytest.fail(self.cases.bench.text(result, result.findings), pytrace=False)
        if result is not None and self.last is not None:  # it is excused, and has no item
            self.last.user_properties.append(excused_close(result))


class XrayNode(pytest.Collector):
    """The x-ray models, which are generated."""

    def __init__(self, *, cases: Cases, **rest: Any) -> None:
        super().__init__(**rest)
        self.cases = cases

    def collect(self) -> Iterator[CaseItem]:
        asked = [Question(model.name, XRAY) for model in xray_models()]
        yield from _items(self, self.cases, asked)

    def result(self, question: Question) -> CaseResult:
        return self.cases.bench.xray(question.case)


class CaseItem(pytest.Item):
    """A case in a mode: passes, fails with the finding as its text, or is skipped by name."""

    def __init__(self, *, cases: Cases, question: Question, **rest: Any) -> None:
        super().__init__(**rest)
        self.question = question
        self._cases = cases
        self.add_marker("kdtr")

    def runtest(self) -> None:
        assert isinstance(self.parent, BundleNode | XrayNode)
        if isinstance(self.parent, BundleNode):
            self.parent.last = self
        bench = self._cases.bench
        refused = _refused(bench)
        if refused:
            self.session.shouldfail = refused  # as it would be for every other item
            self.user_properties.append(NO_ENGINE)
            pytest.fail(refused, pytrace=False)
        result = self.parent.result(self.question)
        bundle = self.parent.name
        if result is None:
            self.user_properties += [("kdtr_bundle", bundle), ("kdtr_verdict", NOT_ASKED)]
            pytest.skip("the engine shows no stage, so every mode runs as it ships")
        self.user_properties += properties(bundle, result)
        text = bench.text(result, [f for f in result.findings if f.excuse is None])
        if result.verdict.is_bad:
            pytest.fail(text or _told_before(result), pytrace=False)
        if text:
            self.add_report_section("call", "kdtr near tie", text)
        _end(result)

    def reportinfo(self) -> tuple[Path, int, str]:
        assert self.parent is not None
        return self.path, 0, f"{self.parent.name}: {self.name}"


def _refused(bench: Bench) -> str:
    """Why there is no engine, or ""."""
    try:
        bench.engine()
    except KdtrError as error:
        return told(error, REFUSAL)
    return ""


def _end(result: CaseResult) -> None:
    """What is neither a pass nor a failure is told to pytest, with the reason."""
    if result.verdict is Verdict.UNSUPPORTED:
        needs = result.refused or ", ".join(sorted(result.unshown))
        pytest.skip(f"not offered: needs {needs}" if needs else "not judged")
    if result.verdict is Verdict.BLOCKED:
        pytest.skip(f"blocked by {result.blocked_by}")
    if result.verdict is Verdict.EXCUSED:
        excuses = dict.fromkeys(str(f.excuse) for f in result.findings if f.excuse is not None)
        reason = "; ".join(excuses) or _told_before(result)
        pytest.xfail(reason)
        pytest.fail(reason, pytrace=False)  # with --runxfail


def _told_before(result: CaseResult) -> str:
    return f"{result.case} shows what an earlier x-ray model shows, and told"


def _items(parent: Any, cases: Cases, asked: Iterable[Question]) -> Iterator[CaseItem]:
    for question in asked:
        name = f"{question.case}[{question.mode}]"
        nodeid = f"{parent.nodeid}::{name}"  # given, or pytest would not know its mode as such
        if cases.takes(nodeid):
            yield CaseItem.from_parent(
                parent, name=name, nodeid=nodeid, cases=cases, question=question
            )


def _by_name(paths: Iterable[str]) -> dict[str, str]:
    """Paths by file name, which is what ids are made of."""
    named: dict[str, str] = {}
    for path in paths:
        name = Path(path).name
        if Path(named.setdefault(name, path)).resolve() != Path(path).resolve():
            raise pytest.UsageError(
                f"--kdtr-corpus: {named[name]} and {path} have one name, and so their cases one "
                "id; give them in two runs, or rename one"
            )
    return named


def _take_ids(config: pytest.Config, paths: Mapping[str, str]) -> list[str]:
    """Ids of cases among what is to be collected: pytest would look for files of these names.

    A bundle may be named by its path too, as pytest does it.
    """
    by_path = {Path(path).resolve(): name for name, path in paths.items()}
    ids, others = [], []
    for arg in config.args:
        head, colons, rest = arg.partition("::")
        name = head if head in paths or head == XRAY else by_path.get(Path(head).resolve())
        if name is None:
            others.append(arg)
        else:
            ids.append(f"{name}{colons}{rest}")
    config.args[:] = others
    return ids


def _is_in(named: str, nodeid: str) -> bool:
    """Whether an id names this item, its case in all modes, or its bundle."""
    return nodeid == named or nodeid.startswith((f"{named}::", f"{named}["))


def _named_alone(config: pytest.Config) -> bool:
    """Whether the command line names a corpus and nothing else; in `addopts` a corpus joins in."""
    words = map(str, config.invocation_params.args)
    typed = any(word.partition("=")[0] == "--kdtr-corpus" for word in words)
    return typed and config.args_source is not pytest.Config.ArgsSource.ARGS
