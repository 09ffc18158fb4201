"""`kdtr golden`: record a golden bundle from the seed model or a checkpoint directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.cases_file import CASES_FORM, read_cases
from kdtr.conformance.golden import record_bundle
from kdtr.conformance.golden_corpus import TINY, record_corpus
from kdtr.conformance.tiny_corpus import tiny_plans
from kdtr.contract import CaseError, DraftTree, ModelConfig
from kdtr.kdtr_format import read_checkpoint

_WHICH_CASES = """\
--tiny records its own cases unless --prompt or --cases gives others; --checkpoint needs some.

"""


_MOST_ROUNDS = 100_000  # of --decode: more than any float64 recording is good for


def add_golden_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _WHICH_CASES + CASES_FORM
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--tiny",
        action="store_true",
        help="the seed model, with its own cases or with those of --prompt and --cases",
    )
    model.add_argument("--checkpoint", metavar="DIR", help="a Hugging Face directory")
    model.add_argument("--corpus", action="store_true", help="every bundle of the corpus")
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the bundle to write; with --corpus, the directory",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="IDS",
        help="token ids, comma-separated; repeat for more prompts",
    )
    parser.add_argument(
        "--tree",
        action="append",
        default=[],
        metavar="PARENTS[:PATH]",
        help="one round of each prompt: parents, and the path to accept (default: the root "
        "alone), for example -1,0,0,2:0,2,3; repeat for more rounds",
    )
    parser.add_argument(
        "--decode",
        type=int,
        metavar="N",
        help="also record N autoregressive rounds of each prompt",
    )
    parser.add_argument("--cases", metavar="FILE", help="cases as JSON, see below")


def golden_command(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, str]:
    """Record; returns the SHA-256 of each file."""
    if args.corpus:
        if args.prompt or args.cases or args.tree or args.decode is not None:
            raise CaseError(
                "--corpus has its own cases; leave out --prompt, --tree, --decode and --cases"
            )
        directory = Path(args.out)
        _make_directory(directory)
        return record_corpus(directory, progress)
    if args.tiny:
        config = TINY.config
        weights: Mapping[str, Any] = TINY.tensors()
        model: dict[str, Any] = {"name": TINY.name, "seed": TINY.seed}
        plans = _plans(args) or tiny_plans()
    else:
        checkpoint = read_checkpoint(args.checkpoint)
        config = ModelConfig.from_hf(checkpoint.config)
        weights = checkpoint.tensors
        model = {"name": Path(args.checkpoint).resolve().name}
        plans = _plans(args)
        if not plans:
            raise CaseError(
                "no cases for the checkpoint; give --prompt with --tree or --decode, or --cases"
            )
    _check_plans(plans, config.vocab_size)
    out = Path(args.out)
    _check_out(out, args)
    _make_directory(out.parent)
    return {args.out: record_bundle(out, model, config, weights, plans, progress)}


def recorded_lines(args: argparse.Namespace, sums: Mapping[str, str]) -> list[str]:
    """What was recorded, a line per case: alias, points, accepted tokens."""
    lines = []
    for name in sums:
        path = Path(args.out) / name if args.corpus else Path(args.out)
        if not path.is_file():  # the corpus keeps the sum of tiny.kdtr, not the file
            continue
        bundle = GoldenBundle.open(path)
        of_bundle = f"{path.stem} / " if args.corpus else ""
        for case in bundle.cases:
            points = case.inputs.points()
            paths = [case.expectation(point).get("path") for point in points]
            accepted = sum(len(one) for one in paths if one is not None)
            chunks, rounds = len(case.inputs.chunks), len(case.inputs.rounds)
            lines.append(
                f"{of_bundle}{case.inputs.alias}: {_count(chunks, 'chunk')}, "
                f"{_count(rounds, 'round')}, {_count(accepted, 'token')} accepted"
            )
        bundle.close()
    return lines


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _check_plans(plans: Sequence[CasePlan], vocab_size: int) -> None:
    """Refuse, before anything is computed, what only all cases and the model together show."""
    seen: set[str] = set()
    for plan in plans:
        if plan.alias in seen:
            raise CaseError(f"two cases are called {plan.alias}; expected a name for each")
        seen.add(plan.alias)
        given = {f"chunk{i}": chunk for i, chunk in enumerate(plan.chunks)}
        if plan.root is not None:
            given["root"] = (plan.root,)
        for i, entry in enumerate(plan.rounds):
            if isinstance(entry, DraftTree):
                given[f"round{i}"] = entry.tokens
        for where, tokens in given.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise CaseError(
                        f"case {plan.alias}, {where}: token {token}; expected 0..{vocab_size - 1}"
                    )


def _check_out(out: Path, args: argparse.Namespace) -> None:
    """Nothing but a plain file is replaced, and none that the recording reads."""
    try:
        if out.is_dir():
            raise CaseError(f"--out {out} is a directory; expected the file to write")
        if out.is_symlink() or (out.exists() and not out.is_file()):
            raise CaseError(f"--out {out} is no plain file; expected one, or a new name")
        inputs = [Path(args.cases)] if args.cases else []
        inputs += list(Path(args.checkpoint).iterdir()) if args.checkpoint else []
        for read in inputs:
            if out.exists() and read.exists() and out.samefile(read):
                raise CaseError(f"--out {out} is {read}, which is read; expected another file")
    except OSError as error:
        raise CaseError(f"--out {out}: {error.strerror}; expected a file to write") from error


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaseError(f"--out: {path}: {error.strerror}; expected a place to write to") from error


def _plans(args: argparse.Namespace) -> tuple[CasePlan, ...]:
    plans = list(read_cases(Path(args.cases))) if args.cases else []
    if args.decode is not None and not 1 <= args.decode <= _MOST_ROUNDS:
        raise CaseError(f"--decode {args.decode}; expected 1..{_MOST_ROUNDS} rounds")
    if (args.tree or args.decode) and not args.prompt:
        raise CaseError("--tree and --decode need a prompt; give --prompt IDS")
    trees = tuple(_tree(text) for text in args.tree)
    for i, text in enumerate(args.prompt):
        prompt = _integers("--prompt", text)
        if not trees and args.decode is None:
            raise CaseError(f"--prompt {text} has no rounds; give --tree or --decode N")
        if args.decode is not None:
            plain = (Planted((-1,)),) * args.decode
            plans.append(CasePlan(f"prompt{i}-ar", "plain decoding", ("FWD-2",), plain, (prompt,)))
        if trees:
            plans.append(
                CasePlan(f"prompt{i}-trees", "the given trees", ("FWD-4",), trees, (prompt,))
            )
    return tuple(plans)


def _tree(text: str) -> Planted:
    parents, _, path = text.partition(":")
    return Planted(_integers("--tree", parents), _integers("--tree", path) if path else (0,))


def _integers(what: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CaseError(f"{what} {text!r}; expected integers separated by commas") from None
