"""One engine against one bundle: each case in each mode, and the script of state_script.py.

`kdtr gate` asks for all of them in turn; a test runner for some, in an order of its own. Both get
the same verdicts, because what a verdict takes for granted (smoke.py) is judged before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kdtr.conformance import running
from kdtr.conformance.bundle import GoldenBundle, GoldenCase
from kdtr.conformance.case import CaseInput
from kdtr.conformance.drawing_sight import Sight
from kdtr.conformance.drive import MODE, MODES, Mode
from kdtr.conformance.file_script import FILES, judge_files
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.judge import judge_case
from kdtr.conformance.next_step import placed
from kdtr.conformance.noise_floor import CaseNoise, NoiseFloor
from kdtr.conformance.noted_engine import noted
from kdtr.conformance.raised import RAISED, line_of, told
from kdtr.conformance.smoke import Smoke, is_chain, smoke_first
from kdtr.conformance.state_script import CASE, SCRIPT, judge_state, suits
from kdtr.contract import Engine, EngineInfo, Model, UnsupportedError

Progress = Callable[[str], None]
LOAD = "load"  # the mode's name, of a model that is not loaded
# The model as a case is given it; None: it has no answer.
OfCase = Callable[[Any, CaseInput], Any]


class Question(NamedTuple):
    """A case, by its alias, in a mode."""

    case: str
    mode: str


def questions(
    cases: Iterable[GoldenCase], modes: Sequence[Mode] = MODES, *, in_files: bool = False
) -> list[Question]:
    """What the gate asks of a bundle, in its order: smoke first, the scripts last.

    in_files  whether its model is also handed over in files (file_script.py)
    """
    in_order = smoke_first(cases)
    asked = [
        Question(case.inputs.alias, mode.name)
        for case in in_order
        for mode in modes
        if mode.applies(case.inputs)
    ]
    if any(suits(case.inputs) for case in in_order):
        asked.append(Question(CASE, SCRIPT))
    if in_files:
        asked.append(Question(FILES, SCRIPT))
    return asked


class BundleJudge:
    """Judges the questions `asked` of an open bundle, each once; only these block one another.

    until    the last point of each case, "round2"; None: all
    of_case  the model that a case is driven on; None where the engine was not asked that case
    The model is loaded when it is first needed, and again after `close`.
    """

    def __init__(
        self,
        engine: Engine,
        bundle: GoldenBundle,
        asked: Sequence[Question],
        *,
        until: str | None = None,
        progress: Progress = lambda _: None,
        of_case: OfCase = lambda model, _: model,
    ) -> None:
        self._engine: Engine = noted(engine)
        self._bundle = bundle
        self._asked = asked
        self._until = until
        self._progress = progress
        self._of_case = of_case
        self._name = str(bundle.path)
        self._cases = {case.inputs.alias: case for case in bundle.cases}
        self._results: dict[Question, CaseResult | None] = {}
        self._smoke = Smoke(self._name)
        self._info: EngineInfo | None = None
        self._model: Model | None = None
        self._floor: NoiseFloor | None = None
        self._noise: tuple[str, CaseNoise] | None = None  # of the case that was judged last

    def all(self) -> Iterator[CaseResult]:
        """Every result, in order, and what is wrong with closing the model."""
        wrong = self._load()
        if wrong is not None:
            yield wrong
            return
        for question in self._asked:
            result = self.result(question)
            if result is not None:
                yield result
        closed = self.close()
        if closed is not None:
            yield closed

    def result(self, question: Question) -> CaseResult | None:
        """The verdict, judged now or before; None: not asked of an engine that shows no stage.

        Where the model cannot be loaded, the result of that.
        """
        if question not in self._results:
            for earlier in self._taken_for_granted(question):
                self.result(earlier)
            self._results[question] = self._judge(question)
        return self._results[question]

    def close(self) -> CaseResult | None:
        """Close the model, if it is loaded; what is wrong with that."""
        model, self._model, self._floor, self._noise = self._model, None, None, None
        if model is None:
            return None
        running.at(self._bundle.path.name)
        try:
            model.close()
        except RAISED as error:
            return _model_error(self._name, "close", f"close() raised {told(error)}")
        return None

    def _taken_for_granted(self, question: Question) -> Iterator[Question]:
        mode = "stepwise" if question.mode == SCRIPT else question.mode
        for earlier in self._asked:
            if earlier == question:
                return
            if question.case == FILES:
                if earlier.case == self._in_files:
                    yield earlier
            elif earlier.mode == mode and is_chain(self._cases[earlier.case].inputs):
                yield earlier

    def _load(self) -> CaseResult | None:
        """Load the model, where it is not; the result of a failure."""
        if self._model is not None:
            return None
        blocked = len(self._bundle.cases)
        running.at(self._bundle.path.name)
        try:
            self._info = self._engine.info
            model = self._engine.load((self._bundle.config, self._bundle.weights))
        except UnsupportedError as error:  # what it says it cannot compute is not judged
            refused = line_of(error)
            return CaseResult(self._name, "all", LOAD, Verdict.UNSUPPORTED, refused=refused)
        except RAISED as error:
            text = f"load() raised {told(error)}"
            return _model_error(self._name, LOAD, text, blocked=blocked)
        if not callable(getattr(model, "open", None)):
            text = f"load() returned a {type(model).__name__} without open(); expected a model"
            return _model_error(self._name, LOAD, text, blocked=blocked)
        self._model = model
        return None

    def _judge(self, question: Question) -> CaseResult | None:
        wrong = self._load()
        if wrong is not None:
            return wrong
        assert self._info is not None
        if question.case == FILES:
            return self._judge_files(self._info)
        if question.mode == SCRIPT:
            return self._judge_script(self._info)
        case, mode = self._cases[question.case], MODE[question.mode]
        if not mode.traces and not self._info.stages:  # every mode runs it as it ships
            return None
        assert self._model is not None
        model = self._of_case(self._model, case.inputs)
        if model is None:
            return _unanswered(self._name, question)
        blocked = self._smoke.blocked(case.inputs, mode.name)
        if blocked is not None:
            return blocked
        self._goes_on(question)
        sight, info = Sight(), self._info
        result = judge_case(
            self._name,
            model,
            info,
            self._bundle.config,
            case,
            self._noise_of(case, info),
            sight.watching(mode),
            self._until,
        )
        result.findings = [
            sight.drawn(placed(finding, info, case), case) for finding in result.findings
        ]
        self._smoke.saw(case.inputs, result)
        return result

    def _judge_script(self, info: EngineInfo) -> CaseResult:
        blocked = self._smoke.blocked_script()
        if blocked is not None:
            return blocked
        assert self._model is not None
        self._goes_on(Question(CASE, SCRIPT))
        first = next(case.inputs for case in self._bundle.cases if suits(case.inputs))
        return judge_state(self._name, self._model, info, self._bundle.config, first)

    def _goes_on(self, question: Question) -> None:
        self._progress(" / ".join(question))
        running.at(f"{self._bundle.path.name}: {' / '.join(question)}")

    @property
    def _in_files(self) -> str:
        """The alias of the case that a model from a file is judged on."""
        return smoke_first(self._bundle.cases)[0].inputs.alias

    def _judge_files(self, info: EngineInfo) -> CaseResult:
        """What is wrong with its case from arrays is no fault of a file."""
        granted = (self._results[one] for one in self._taken_for_granted(Question(FILES, SCRIPT)))
        bad = next((one for one in granted if one is not None and one.verdict.is_bad), None)
        if bad is not None:
            by = f"{bad.case} / {bad.mode}"
            return CaseResult(self._name, FILES, SCRIPT, Verdict.BLOCKED, blocked=1, blocked_by=by)
        self._goes_on(Question(FILES, SCRIPT))
        return judge_files(
            self._name,
            self._engine,
            info,
            self._bundle,
            lambda case: self._noise_of(case, info),
        )

    def _noise_of(self, case: GoldenCase, info: EngineInfo) -> CaseNoise:
        """All modes of a case share it; another case's is let go."""
        alias = case.inputs.alias
        if self._noise is None or self._noise[0] != alias:
            if self._floor is None:
                self._floor = NoiseFloor.of_bundle(self._bundle, info.profile)
            self._noise = (alias, self._floor.case(case))
        return self._noise[1]


def _model_error(bundle: str, verb: str, text: str, *, blocked: int = 0) -> CaseResult:
    finding = Finding(Verdict.ERROR, Place(bundle, "all", verb, verb), verb, text)
    return CaseResult(bundle, "all", verb, Verdict.ERROR, blocked=blocked, findings=[finding])


def _unanswered(bundle: str, question: Question) -> CaseResult:
    result = CaseResult(bundle, question.case, question.mode, Verdict.UNSUPPORTED)
    result.unshown.add("answers")
    return result
