"""Choosing the corpus's prompts: `python -m kdtr.conformance.golden_search` rewrites the file.

A prompt grows token by token. A token stays if its row decides clearly in float32 and bfloat16;
a whole prompt stays if every row that the case will accept does; else the search backs up. In a
precision in which a model's decisions are thin on purpose none is asked to be clear.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path

import numpy as np

from kdtr.conformance.case import Planted
from kdtr.conformance.corpus_cases import Template
from kdtr.conformance.corpus_models import CorpusModel, corpus_models
from kdtr.conformance.golden_margins import PRECISIONS, ForwardRecorder, Shadow, clear_rows
from kdtr.conformance.seed_model import hash_below
from kdtr.contract import Acceptance, DraftTree
from kdtr.reference import make_engine
from kdtr.reference.engine import ReferenceModel

_TRIES = 4000  # whole prompts per case; the search says when it gives up
_DRAWN = 77  # the seed of prompts that are drawn: with it the search is short
_SLOTS = 300  # beside the prompt's


class _Grown:
    """The truth and its emulations, with all of a prompt but its last token in their caches."""

    def __init__(
        self, truth: ReferenceModel, emulated: Sequence[ReferenceModel], slots: int
    ) -> None:
        self._truth = truth
        self._session = truth.open(max_len=slots)
        self._shadows = [Shadow(model, slots) for model in emulated]
        self._tokens: list[int] = []

    def is_before(self, prompt: list[int]) -> bool:
        return self._tokens == prompt[: len(self._tokens)] and len(self._tokens) < len(prompt)

    def last_row(self, prompt: list[int], *, decides: bool) -> list[np.ndarray]:
        """Margins [1] of the last token in each precision; `decides`: a target is taken of it."""
        new = tuple(prompt[len(self._tokens) : -1])
        if new:
            recorder = ForwardRecorder(self._truth)
            root = self._session.prefill(new, trace=recorder)
            for shadow in self._shadows:
                shadow.margins(new, recorder.shown())
                shadow.follow(Acceptance(tuple(range(len(new))), root))
            self._tokens += new
        last = prompt[-1]
        self._session.set_root(last)
        recorder = ForwardRecorder(self._truth)
        self._session.verify(DraftTree((last,), (-1,)), trace=recorder)
        shown, first_target = recorder.shown(), 0 if decides else 1
        return [shadow.margins((last,), shown, first_target) for shadow in self._shadows]


class _Search:
    def __init__(self, entry: CorpusModel) -> None:
        self.entry = entry
        self.grown: _Grown | None = None
        self.slots = _SLOTS + max(sum(one.chunks) for one in entry.templates)
        weights = (entry.model.config, entry.model.tensors())
        self.truth: ReferenceModel = make_engine().load(weights)
        self.emulated = [
            make_engine(arithmetic=name).load(weights)
            for name in PRECISIONS
            if name not in entry.thin
        ]

    def prompt(self, template: Template) -> tuple[list[int], bool]:
        """The prompt, and whether every accepted row is clear."""
        best: list[int] = []
        most = -1
        for prompt in self._prompts(template):
            clear = self._clear_accepted(template, prompt)
            if clear > most:
                best, most = prompt, clear
            if most == template.accepted:
                break
        return best, most == template.accepted

    def _prompts(self, template: Template) -> Iterator[list[int]]:
        """Prompts whose rows decide clearly, by depth-first search over hashed candidates."""
        length, vocab = sum(template.chunks), self.entry.model.config.vocab_size
        ends = set(accumulate(template.chunks))
        stream = f"{self.entry.model.name}/{template.alias}"

        def grow(prompt: list[int]) -> Iterator[list[int]]:
            if len(prompt) == length:
                yield prompt
                return
            stem = f"{stream}/{','.join(map(str, prompt))}"
            left = length - len(prompt)
            if left <= len(template.ends):
                candidates = [template.ends[-left]]
            else:
                # The last free token alone branches widely: a new prompt costs little there.
                width = 30 if left <= 1 + len(template.ends) else 8
                candidates = hash_below(self.entry.model.seed, stem, width, vocab).tolist()
            for token in dict.fromkeys(candidates):
                if self._clear_prompt([*prompt, token], ends):
                    yield from grow([*prompt, token])

        # Neighbours are followed alike: what is rare may want another beginning.
        drawn = self._drawn_prompts(template, length, vocab) if template.emits else ()
        return chain(islice(grow([]), _TRIES), drawn)

    def _drawn_prompts(self, template: Template, length: int, vocab: int) -> Iterator[list[int]]:
        """What follows hangs on all of a prompt: each is drawn anew, and looked at from its end."""
        ends = set(accumulate(template.chunks))
        for number in range(_TRIES):
            prompt = hash_below(_DRAWN, f"{number}", length, vocab).tolist()
            if self._is_followed_as_wanted(template, prompt) and all(
                self._clear_prompt(prompt[:n], ends) for n in range(1, length + 1)
            ):
                yield prompt

    def _clear_prompt(self, prompt: list[int], ends: set[int]) -> bool:
        """Whether the last token decides clearly: its experts, and its target at a chunk's end."""
        if self.grown is None or not self.grown.is_before(prompt):
            self.grown = _Grown(self.truth, self.emulated, self.slots)
        margins = self.grown.last_row(prompt, decides=len(prompt) in ends)
        return all(bool(clear_rows(one)[0]) for one in margins)

    def _clear_accepted(self, template: Template, prompt: list[int]) -> int:
        """How many of the rows to be accepted decide clearly, before the first that does not.

        0 where other tokens follow than the template wants.
        """
        if not self._is_followed_as_wanted(template, prompt):
            return 0
        session = self.truth.open(max_len=self.slots)
        shadows = [Shadow(model, self.slots) for model in self.emulated]
        if template.is_root:
            (root,) = prompt
            session.set_root(root)
        else:
            recorder = ForwardRecorder(self.truth)
            root = session.prefill(prompt, trace=recorder)
            for shadow in shadows:
                shadow.margins(tuple(prompt), recorder.shown())
                shadow.follow(Acceptance(tuple(range(len(prompt))), root))
        for row in range(template.accepted):
            recorder = ForwardRecorder(self.truth)
            token = session.decode(trace=recorder)
            for shadow in shadows:
                if not clear_rows(shadow.margins((root,), recorder.shown()))[0]:
                    return row
                shadow.follow(Acceptance((0,), token))
            root = token
        return template.accepted

    def _is_followed_as_wanted(self, template: Template, prompt: list[int]) -> bool:
        """Whether the tokens of `emits` come where they are wanted, and no stop token twice."""
        stops = [p.stop_at for p in template.rounds if isinstance(p, Planted)]
        last_stop = max((at for at in stops if at is not None), default=None)
        wanted = dict(template.emits)
        if not wanted and last_stop is None:
            return True
        session = self.truth.open(max_len=self.slots)
        seen = {session.prefill(prompt)}
        # A stop token may lie behind what a length limit lets through.
        for place in range(1, template.accepted + 1 + (last_stop or 0)):
            token = session.decode()
            if token != wanted.get(place, token):
                return False
            if last_stop is not None and token in seen:  # it would stop too early
                return False
            seen.add(token)
        return True


def main() -> None:
    """Search every prompt that the file lacks; delete the file to search them all."""
    page = Path(__file__).with_name("corpus_prompts.json")
    found = json.loads(page.read_text(encoding="utf-8")) if page.exists() else {}
    for entry in corpus_models():
        names = {f"{entry.model.name}/{template.alias}": template for template in entry.templates}
        if not names.keys() - found.keys():
            continue
        search = _Search(entry)
        for name in [name for name in names if name not in found]:
            prompt, clear = search.prompt(names[name])
            found[name] = prompt
            print(f"{name}: {prompt} {'clear' if clear else 'thin'}", file=sys.stderr, flush=True)
            _write(page, found)


def _write(page: Path, found: dict[str, list[int]]) -> None:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    page.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
