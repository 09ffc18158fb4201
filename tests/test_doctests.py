"""The examples in docstrings do what they show.

pytest's --doctest-modules would load folder contract/ as a package `contract` beside the installed
kdtr.contract, with a second copy of every class; here the installed modules are searched.
"""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

ROOMS = ("contract", "reference", "kdtr_format", "conformance")


def modules(package: str) -> list[ModuleType]:
    """The package and every module in it, except what runs when it is imported."""
    found = importlib.import_module(package)
    inner = pkgutil.walk_packages(found.__path__, package + ".")
    names = [module.name for module in inner if not module.name.endswith(".__main__")]
    return [found, *map(importlib.import_module, names)]


def examples(package: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    tests = [test for module in modules(package) for test in finder.find(module)]
    return [test for test in tests if test.examples]


EXAMPLES = {test.name: test for room in ROOMS for test in examples(f"kdtr.{room}")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    report: list[str] = []

    result = doctest.DocTestRunner(verbose=False).run(EXAMPLES[name], out=report.append)

    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("room", ["contract", "reference"])
def test_the_room_shows_examples(room):
    assert any(name.startswith(f"kdtr.{room}.") for name in EXAMPLES)
