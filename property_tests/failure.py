"""What a failed law says below its traceback: its rules, a golden bundle, how to see it again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from kdtr.conformance.engine_options import engine_option
from kdtr.contract import KdtrError, rule
from kdtr.property_tests import sizes
from kdtr.property_tests.failure_case import write_failure
from kdtr.property_tests.laws import laws
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.watch import Example

# Hypothesis adds this note to the exception that it lets through.
_BLOB = re.compile(r"@reproduce_failure\('[^']*', b'([^']*)'\)")


def explain_failure(
    law: str,
    example: Example,
    error: BaseException,
    subject: Subject | tuple[Subject, Subject] | None,
    *,
    directory: str,
) -> str:
    """The text of a finding; writes the example as a golden bundle into the directory.

    subject  the engine that broke the law, both of a pair, or None for a law without an engine
    """
    lines = [f"law  {law}"]
    for rule_id in laws()[law].rules:
        lines.append(f"  {rule_id}  {rule(rule_id)}")
    engines = subject if isinstance(subject, tuple) else () if subject is None else (subject,)
    if engines:
        lines.append(_recorded(law, example, engines, Path(directory)))
    blob = blob_of(error)
    if blob:
        lines.append(f"again  {_again(law, blob, subject)}")
    return "\n".join(lines)


def blob_of(error: BaseException) -> str:
    """The example in Hypothesis' own coding, from the notes of its exception; "" without one."""
    notes: Iterable[str] = getattr(error, "__notes__", ())
    found = next((match for note in notes if (match := _BLOB.search(note))), None)
    return "" if found is None else found[1]


def _recorded(law: str, example: Example, engines: tuple[Subject, ...], directory: Path) -> str:
    """Writes the bundle; the line that says where it is, or why there is none."""
    try:
        path = write_failure(law, example, directory)
    except (KdtrError, OSError) as error:
        return f"bundle  none: {error}"
    lines = [f"bundle  {path}: the truth about the same trees and paths"]
    for engine in engines:  # of two that differ, the truth tells which one is wrong
        words = ["kdtr", "gate", str(path), "--engine", engine.name]
        words += _words("--engine-option", engine)
        lines.append(f"        {shlex.join(words)}")
    lines.append(f"        kdtr adopt {shlex.quote(str(path))} --into DIR")
    return "\n".join(lines)


def _again(law: str, blob: str, subject: Subject | tuple[Subject, Subject] | None) -> str:
    words = ["pytest", "--pyargs", "kdtr.property_tests", "-k", f"test_{law}"]
    first, *others = subject if isinstance(subject, tuple) else (subject,)
    if first is not None:
        words += ["--kdtr-engine", first.name, *_words("--kdtr-engine-option", first)]
    for twin in others:
        assert twin is not None
        words += _words("--kdtr-twin-option", twin)
    drawn = sizes.chosen()  # the example is coded in these
    variable = "" if drawn == sizes.ODD else f"{sizes.VARIABLE}={drawn} "
    return variable + shlex.join([*words, "--kdtr-example", blob])


def _words(flag: str, engine: Subject) -> list[str]:
    """Its options as a command line has them: plain text where that is read as the same value."""
    words: list[str] = []
    for key, value in engine.options:
        plain = f"{key}={value}"
        same = engine_option(flag, plain) == (key, value)
        words += [flag, plain if same else f"{key}={value!r}"]
    return words
