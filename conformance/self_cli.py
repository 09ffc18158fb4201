"""Arguments of `kdtr gate --self`."""

from __future__ import annotations

import argparse

from kdtr.conformance.self_checks import CHECKS
from kdtr.conformance.self_gate import MAX_LEN, SelfRequest
from kdtr.conformance.self_model import LEAST_SLOTS, LEAST_TOKENS
from kdtr.contract import CaseError


def add_self_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "an engine against itself, with a model of its own and no golden bundle"
    )
    group.add_argument(
        "--self",
        dest="itself",
        action="store_true",
        help="compare rows of draft trees with the engine's own plain decoding",
    )
    group.add_argument(
        "--model",
        metavar="SOURCE",
        help="what the engine's load() is given: a Hugging Face directory, a file, a name",
    )
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="where the loaded model does not tell it"
    )
    group.add_argument(
        "--max-len",
        type=int,
        metavar="N",
        help=f"slots of a session (default: {MAX_LEN})",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of prompts and trees (default: 0)")


def check_self_arguments(args: argparse.Namespace) -> None:
    """Raises CaseError for what does not go together, before an engine is loaded."""
    if not args.itself:
        of_self = ("model", "vocab_size", "max_len", "seed")
        given = [f"--{one.replace('_', '-')}" for one in of_self if getattr(args, one) is not None]
        if given:
            belong = "belongs" if len(given) == 1 else "belong"
            raise CaseError(f"{' and '.join(given)} {belong} to --self; give it too")
        if not args.bundles and not args.quick:
            raise CaseError(
                "no bundle to judge by; give golden bundles, or --self --model SOURCE to hold the "
                "engine against itself, or --quick for the corpus that ships with kdtr"
            )
        return
    if args.quick:
        raise CaseError("--quick is of golden bundles; leave it out with --self")
    if args.bundles:
        raise CaseError(f"--self needs no golden bundle; leave out {', '.join(args.bundles)}")
    if not args.model:
        raise CaseError("--self needs --model SOURCE: what the engine's load() is given")
    if args.mode or args.until:
        raise CaseError("--mode and --until belong to golden bundles; leave them out with --self")
    if args.expectations is not None or args.draft_expectations is not None:
        raise CaseError("--expectations belongs to golden bundles; leave it out with --self")
    known = [name for name, _ in CHECKS]
    unknown = [name for name in args.case if name not in known]
    if unknown:
        raise CaseError(f"--case {unknown[0]}; with --self expected one of {', '.join(known)}")
    if args.vocab_size is not None and args.vocab_size < LEAST_TOKENS:
        raise CaseError(
            f"--vocab-size {args.vocab_size}; expected at least {LEAST_TOKENS} tokens to draw from"
        )
    if args.max_len is not None and args.max_len < LEAST_SLOTS:
        raise CaseError(f"--max-len {args.max_len}; expected at least {LEAST_SLOTS} slots")


def self_request(args: argparse.Namespace, command: str) -> SelfRequest:
    return SelfRequest(
        source=args.model,
        vocab_size=args.vocab_size,
        max_len=MAX_LEN if args.max_len is None else args.max_len,
        seed=args.seed or 0,
        only=frozenset(args.case),
        command=command,
    )
