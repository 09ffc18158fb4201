"""The `kdtr` command.

Exit codes: 0 the gate passed, the file was written or shown, the bundles are the same; 1 the gate
failed, the bundles differ; 2 the request could not be carried out (a refused file, engine, case or
option; an engine that ended the process: outlive.py).
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from kdtr.conformance import standard_streams
from kdtr.conformance.bundle_paths import bundle_paths
from kdtr.conformance.case_index_cli import add_index_arguments, index_command
from kdtr.conformance.command_parser import CommandParser, notes_of
from kdtr.conformance.diff_bundles_cli import add_diff_arguments, diff_command
from kdtr.conformance.drive import MODES
from kdtr.conformance.engine_loader import importable_here, load_engine, option_names
from kdtr.conformance.engine_options import engine_options
from kdtr.conformance.expectations_draft import draft, new_draft
from kdtr.conformance.expectations_file import read_expectations
from kdtr.conformance.export_cli import add_export_arguments, export_command
from kdtr.conformance.gate import Selection, run_gate
from kdtr.conformance.golden_adopt import add_adopt_arguments, adopt_command
from kdtr.conformance.golden_check import check_everywhere
from kdtr.conformance.golden_cli import add_golden_arguments, golden_command, recorded_lines
from kdtr.conformance.inspect_bundle_cli import add_inspect_arguments, inspect_command
from kdtr.conformance.mutants.mutants_cli import add_mutants_arguments, mutants_command
from kdtr.conformance.offline_cli import (
    add_judge_arguments,
    add_questions_arguments,
    judge_command,
    questions_command,
)
from kdtr.conformance.plain_text import printable
from kdtr.conformance.quick_corpus import read_quick, shipped_corpus
from kdtr.conformance.raised import REFUSAL, told
from kdtr.conformance.report import print_report
from kdtr.conformance.report_files import add_report_options, begin_reports
from kdtr.conformance.report_files.whole_files import write_whole
from kdtr.conformance.self_cli import (
    add_self_arguments,
    check_self_arguments,
    self_request,
)
from kdtr.conformance.self_gate import run_self
from kdtr.conformance.state_script import SCRIPT
from kdtr.conformance.stdio_server_cli import add_serve_arguments, serve_command
from kdtr.conformance.terminal import Progress, plain_console
from kdtr.conformance.user_interrupts import user_interrupts, where_interrupted
from kdtr.conformance.xray_cli import add_xray_arguments, xray_command
from kdtr.contract import KdtrError

PASSED, FAILED, REFUSED = 0, 1, 2
VERBS = "kdtr.verbs"
BUNDLES = (
    "golden bundles (.kdtr), folders of them, or `built-in`: the corpus that kdtr brings along"
)
_DRAFT = "--draft-expectations"
# A closed pipe or descriptor, a full disk, a quota, a limit of size: no reading ends so.
_OF_WRITING = frozenset({errno.EPIPE, errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(_trees_joined(words))
    args.words = words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale may lack our signs
    for note in notes_of(args):
        print(f"kdtr: note: {printable(note)}", file=sys.stderr)
    with user_interrupts(), standard_streams.kept():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        code = int(args.command(args))
        sys.stdout.flush()
        return code
    except SystemExit as error:  # an engine's, from where nothing else catches it
        print(f"kdtr: no verdict: the engine raised {told(error)}", file=sys.stderr)
        return REFUSED
    except OSError as error:  # no verdict was delivered
        text = told(error)  # of a file that is read, or of the machine
        if error.filename is None and error.errno in _OF_WRITING:
            text = f"cannot write the output: {error.strerror}"
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  or Python fails again on exit
        print(f"kdtr: {text}", file=sys.stderr)
        return REFUSED
    except KdtrError as error:
        print(f"kdtr: {told(error, REFUSAL)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"kdtr: interrupted{printable(where_interrupted())}", file=sys.stderr)
        return 130


def _trees_joined(argv: Sequence[str]) -> list[str]:
    """`--tree -1,0` as one word: argparse would take -1,0 for an option."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--tree":
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kdtr", description="Conformance suite for tree-speculative decoding with MLA."
    )
    parser.add_argument("--version", action="version", version=f"kdtr {version('kdtr')}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    gate = verbs.add_parser("gate", help="judge an engine against golden bundles")
    gate.set_defaults(command=_gate)
    gate.add_argument("bundles", nargs="*", metavar="BUNDLE", help=BUNDLES)
    gate.add_argument(
        "--engine",
        required=True,
        metavar="NAME",
        help="package.module:factory, a registered name such as host or reference, or "
        "stdio:COMMAND (docs/stdio-protocol.md); modules in the current directory are found too",
    )
    gate.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword of the factory, as a Python literal or text; repeat for more",
    )
    gate.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="only this case; repeatable"
    )
    gate.add_argument(
        "--mode",
        action="append",
        default=[],
        choices=[*(mode.name for mode in MODES), SCRIPT],
        help="only this mode; repeatable",
    )
    gate.add_argument(
        "--quick",
        action="store_true",
        help="the quick corpus: a few cases that kill every mutant of the list; without BUNDLE, of "
        "the corpus that ships with kdtr; for every change, and no substitute for the whole gate",
    )
    gate.add_argument("--until", metavar="POINT", help="stop each case after it, e.g. round2")
    gate.add_argument(
        "--expectations",
        metavar="FILE",
        help="what the engine is known to do wrong, and what must pass (docs/expectations.md)",
    )
    gate.add_argument(
        _DRAFT,
        metavar="FILE",
        help="write a new file that expects what fails here, with reasons to be filled in",
    )
    add_self_arguments(gate)
    add_report_options(gate)
    xray = verbs.add_parser(
        "xray",
        help="read an engine's mask, positions, cache and routing from its logits alone",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    xray.set_defaults(command=_xray)
    add_xray_arguments(xray)
    mutants = verbs.add_parser(
        "mutants",
        help="plant real faults one by one, and say which are killed and named",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mutants.set_defaults(command=_mutants)
    add_mutants_arguments(mutants)
    golden = verbs.add_parser(
        "golden",
        help="record a golden bundle with the reference",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    golden.set_defaults(command=_golden)
    add_golden_arguments(golden)
    check = verbs.add_parser(
        "golden-check", help="record the corpus anew in many environments and compare bytes"
    )
    check.set_defaults(command=_golden_check)
    check.add_argument("directory", metavar="DIR", help="the corpus, with its SHA256SUMS")
    adopt = verbs.add_parser("adopt", help="add a failed example to a corpus")
    adopt.set_defaults(command=_adopt)
    add_adopt_arguments(adopt)
    inspect = verbs.add_parser("inspect", help="show a bundle: model, cases, trees, tensors")
    inspect.set_defaults(command=lambda args: inspect_command(args, plain_console()))
    add_inspect_arguments(inspect)
    diff = verbs.add_parser("diff", help="name the first stage in which two bundles differ")
    diff.set_defaults(command=lambda args: diff_command(args, plain_console()))
    add_diff_arguments(diff)
    index = verbs.add_parser("index", help="write the cases of bundles as a Parquet table")
    index.set_defaults(command=index_command)
    add_index_arguments(index)
    export = verbs.add_parser(
        "export",
        help="write a model as a Hugging Face directory or as GGUF",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.set_defaults(command=_export)
    add_export_arguments(export)
    questions = verbs.add_parser(
        "questions", help="write the questions of a golden bundle, for an engine that reads a file"
    )
    questions.set_defaults(command=_questions)
    add_questions_arguments(questions)
    judge = verbs.add_parser("judge", help="judge the answers that an engine wrote to a file")
    judge.set_defaults(command=_judge_file)
    add_judge_arguments(judge)
    server = verbs.add_parser(
        "serve-engine",
        help="serve an engine over standard input and output",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server.set_defaults(command=_serve)
    add_serve_arguments(server)
    # Verbs of rooms that this one may not import: each is a function that adds its parser.
    for point in sorted(entry_points(group=VERBS), key=lambda point: point.name):
        point.load()(verbs)
    return parser


def _gate(args: argparse.Namespace) -> int:
    options = engine_options("--engine-option", args.engine_option)
    with importable_here():
        return _judge(args, options)


def _xray(args: argparse.Namespace) -> int:
    options = engine_options("--engine-option", args.engine_option)
    with importable_here(), Progress() as progress:
        passed = xray_command(args, options, plain_console(), progress.show, _command())
    return PASSED if passed else FAILED


def _mutants(args: argparse.Namespace) -> int:
    with importable_here(), Progress() as progress:
        killed = mutants_command(args, plain_console(), progress.show)
    return PASSED if killed else FAILED


def _serve(args: argparse.Namespace) -> int:
    options = engine_options("--engine-option", args.engine_option)
    with importable_here():
        return serve_command(args.engine, options)


def _judge(args: argparse.Namespace, options: dict[str, Any]) -> int:
    check_self_arguments(args)
    bundles, quick = bundle_paths(args.bundles), None
    if args.quick:
        bundles = bundles or shipped_corpus()
        quick = read_quick().of_bundles(bundles)
    expectations = read_expectations(args.expectations) if args.expectations is not None else None
    drafted = new_draft(args.draft_expectations)
    others = {} if drafted is None else {_DRAFT: drafted}
    reports = begin_reports(args, [_command(), *args.words], args.engine, bundles, others)
    engine = load_engine(args.engine, options)
    info = engine.info
    console = plain_console()
    start = time.perf_counter()
    if args.itself:
        request = self_request(args, _command())
        with Progress() as progress:
            result = run_self(
                engine, request, engine_name=args.engine, options=options, progress=progress.show
            )
        known: frozenset[str] = frozenset()
    else:
        with Progress() as progress:
            result = run_gate(
                engine,
                bundles,
                engine_name=args.engine,
                options=options,
                selection=Selection(frozenset(args.case), frozenset(args.mode), args.until, quick),
                progress=progress.show,
                command=_command(),
                xray=not (args.case or args.mode or args.until or args.quick),
                expectations=expectations,
                unblocked=drafted is not None,  # what they show needs entries too
            )
        known = option_names(args.engine)
    seconds = time.perf_counter() - start
    standard_streams.put_back()
    print_report(console, info, result, seconds, known)
    if drafted is not None:
        write_whole({_DRAFT: (drafted, draft(result.findings).encode(errors="backslashreplace"))})
    for line in reports.write(info, result, seconds, known):
        print(line)
    return PASSED if result.passed else FAILED


def _questions(args: argparse.Namespace) -> int:
    print(questions_command(args))
    return PASSED


def _judge_file(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    reports = begin_reports(args, [_command(), *args.words], args.answers, [args.against])
    with Progress() as progress:
        info, result = judge_command(args, progress.show, _command())
    seconds = time.perf_counter() - start
    print_report(plain_console(), info, result, seconds)
    for line in reports.write(info, result, seconds, frozenset()):
        print(line)
    return PASSED if result.passed else FAILED


def _command() -> str:
    """How kdtr was started, where a shell would not find this one by its name."""
    started = sys.argv[0]
    if Path(started).name != "kdtr":
        return "kdtr"
    found = shutil.which("kdtr")
    return "kdtr" if found and Path(found).samefile(shutil.which(started) or started) else started


def _golden(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    with Progress() as progress:
        sums = golden_command(args, progress.show)
    for line in recorded_lines(args, sums):
        print(line, file=sys.stderr)
    for name, sha256 in sums.items():
        print(f"{sha256}  {name}")
    print(f"recorded in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return PASSED


def _golden_check(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    agreed = check_everywhere(Path(args.directory))
    verdict = "same bytes everywhere" if agreed else "FAILED"
    print(f"golden-check: {verdict}, in {time.perf_counter() - start:.0f} s")
    return PASSED if agreed else FAILED


def _adopt(args: argparse.Namespace) -> int:
    for line in adopt_command(args):
        print(line)
    return PASSED


def _export(args: argparse.Namespace) -> int:
    with Progress() as progress:
        notes = export_command(args, progress.show)
    for note in notes:
        print(f"kdtr: note: {note}", file=sys.stderr)
    print(args.to)
    return PASSED


if __name__ == "__main__":
    sys.exit(main())
