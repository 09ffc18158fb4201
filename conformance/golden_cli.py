"""`kdtr golden`: record a golden bundle from the seed model or a checkpoint directory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kdtr.conformance.case import CasePlan, Planted, RoundPlan
from kdtr.conformance.golden import record_bundle
from kdtr.conformance.golden_corpus import TINY, record_corpus
from kdtr.conformance.tiny_corpus import tiny_plans
from kdtr.contract import CaseError, DraftTree, KdtrError, ModelConfig
from kdtr.kdtr_format import read_checkpoint

CASES_HELP = """\
A cases file is a JSON list. Each case: "alias", "why", optional "rules" (ids), "chunks" (lists of
token ids, the prompt in pieces) or "root" (a token id), and "rounds". A round is {"parents": [-1,
0, 0, 2], "path": [0, 2, 3]} to plant an accepted path (the recorder fills in tokens), or
{"parents": [...], "tokens": [...]} to give the tree.
"""


def add_golden_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = CASES_HELP
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--tiny", action="store_true", help="the seed model and its corpus")
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
        default=0,
        metavar="N",
        help="also record N autoregressive rounds of each prompt",
    )
    parser.add_argument("--cases", metavar="FILE", help="cases as JSON, see below")


def golden_command(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, str]:
    """Record; returns the SHA-256 of each file."""
    if args.corpus:
        if args.prompt or args.cases or args.tree or args.decode:
            raise CaseError("--corpus has its own cases; leave out --prompt, --tree, --cases")
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
    out = Path(args.out)
    _make_directory(out.parent)
    if out.is_dir():
        raise CaseError(f"--out {out} is a directory; expected the file to write")
    return {args.out: record_bundle(out, model, config, weights, plans, progress)}


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaseError(f"--out: {error}; expected a place to write to") from error


def _plans(args: argparse.Namespace) -> tuple[CasePlan, ...]:
    plans = list(_read_cases(Path(args.cases))) if args.cases else []
    if (args.tree or args.decode) and not args.prompt:
        raise CaseError("--tree and --decode need a prompt; give --prompt IDS")
    trees = tuple(_tree(text) for text in args.tree)
    for i, text in enumerate(args.prompt):
        prompt = _integers("--prompt", text)
        if not trees and args.decode < 1:
            raise CaseError(f"--prompt {text} has no rounds; give --tree or --decode N")
        if args.decode > 0:
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


def _read_cases(path: Path) -> tuple[CasePlan, ...]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError(f"{path}: {error}; expected a JSON list of cases") from error
    if not isinstance(entries, list):
        raise CaseError(f"{path}: a {type(entries).__name__}; expected a JSON list of cases")
    return tuple(_case(f"{path}: case {i}", entry) for i, entry in enumerate(entries))


def _case(where: str, entry: Any) -> CasePlan:
    if not isinstance(entry, dict):
        raise CaseError(f"{where} is {entry!r}; expected an object")
    known = {"alias", "why", "rules", "chunks", "root", "rounds"}
    unknown, missing = sorted(set(entry) - known), sorted({"alias", "rounds"} - set(entry))
    if unknown or missing:
        raise CaseError(
            f"{where}: unknown keys {unknown}, missing keys {missing}; expected {sorted(known)}"
        )
    try:
        return CasePlan(
            alias=str(entry["alias"]),
            why=str(entry.get("why", "")),
            rules=tuple(entry.get("rules", ())),
            chunks=tuple(tuple(chunk) for chunk in entry.get("chunks", ())),
            root=entry.get("root"),
            rounds=tuple(_round(entry) for entry in entry["rounds"]),
        )
    except (KdtrError, TypeError) as error:
        raise CaseError(f"{where}: {error}") from error


def _round(entry: Any) -> RoundPlan:
    if not isinstance(entry, dict) or "parents" not in entry:
        raise CaseError(f"round {entry!r}; expected an object with parents")
    if "tokens" in entry and set(entry) == {"parents", "tokens"}:
        return DraftTree(tuple(entry["tokens"]), tuple(entry["parents"]))
    if set(entry) <= {"parents", "path"}:
        parents, path = tuple(entry["parents"]), tuple(entry.get("path", (0,)))
        if not all(type(node) is int for node in (*parents, *path)):
            raise CaseError(f"round {entry!r}; expected parents and path of integers")
        return Planted(parents, path)
    raise CaseError(f"round with {sorted(entry)}; expected parents with path or tokens")
