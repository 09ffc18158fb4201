"""How far a campaign is, on a terminal's standard error; silent elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from kdtr.property_tests.campaign_run import State


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} cases/s" if task.speed else "")


class Progress:
    """Cases done, cases per second, units that went wrong, time to the end."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bars = RichProgress(
            TextColumn("cases"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TextColumn("{task.fields[bad]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=60.0,
        )
        self._task = self._bars.add_task("", total=None, bad="")
        self._started = False

    def show(self, state: State) -> None:
        if not self._started:  # what an earlier run did is no speed of this one
            self._bars.reset(self._task, completed=state.resumed, total=state.planned, bad="")
            self._started = True
        told = f"{state.bad} bad units" if state.bad else ""
        self._bars.update(self._task, completed=state.cases, total=state.planned, bad=told)

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
