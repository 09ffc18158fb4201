"""The example of the README passes the gate, and shows as little as it says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/python"


def test_the_minimal_engine_passes_from_its_own_directory(tiny: Path) -> None:
    command = Path(sys.executable).with_name("kdtr")
    words = ["gate", str(tiny), "--engine", "minimal_engine:make_engine"]

    run = subprocess.run(
        [command, *words], cwd=EXAMPLE, capture_output=True, text=True, check=False
    )

    assert 0 == run.returncode, run.stdout + run.stderr
    assert "round: not offered, needs round()" in run.stdout
    assert "  positions, mask and 3 more " in run.stdout


def test_the_traced_engine_passes_and_shows_what_it_says() -> None:
    command = Path(sys.executable).with_name("kdtr")
    words = ["gate", "../../../conformance/corpus/half-split.kdtr"]

    run = subprocess.run(
        [command, *words, "--engine", "traced_engine:make_engine"],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == run.returncode, run.stdout + run.stderr
    assert "  parents, slots and 1 more " in run.stdout  # positions and mask are shown
    assert "forward: not offered" not in run.stdout


def test_it_stops_where_its_forward_is_wrong(
    kdtr: Callable[..., SimpleNamespace], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import planted_faults

    monkeypatch.syspath_prepend(EXAMPLE)
    import minimal_engine  # type: ignore[import-not-found]

    def load_engine(name: str) -> object:
        return planted_faults.make_engine("no_compaction")

    monkeypatch.setattr(minimal_engine, "load_engine", load_engine)

    run = kdtr("gate", tiny, "--engine", "minimal_engine:make_engine", "--case", "y-tree")

    assert 1 == run.code
    assert "  next      suspect the cache that round0 left: it kept path 0-2-3" in run.out
