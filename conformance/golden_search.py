"""Choosing the corpus's prompts: `python -m kdtr.conformance.golden_search` rewrites the file.

A prompt grows token by token. A token stays if its row decides clearly in float32 and bfloat16;
a whole prompt stays if every row that the case will accept does; else the search backs up.
Models whose decisions are thin on purpose take the first prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from kdtr.conformance.case import Planted
from kdtr.conformance.corpus_models import CorpusModel, Template, corpus_models
from kdtr.conformance.golden_margins import ForwardRecorder, Shadow, clear_rows
from kdtr.conformance.seed_model import hash_below
from kdtr.contract import Acceptance
from kdtr.reference import make_engine
from kdtr.reference.engine import ReferenceModel

_TRIES = 4000  # whole prompts per case; the search says when it gives up


class _Search:
    def __init__(self, entry: CorpusModel) -> None:
        self.entry = entry
        weights = (entry.model.config, entry.model.tensors())
        self.truth: ReferenceModel = make_engine().load(weights)
        self.float32 = make_engine(arithmetic="float32").load(weights)
        self.bfloat16 = make_engine(arithmetic="bfloat16").load(weights)

    def prompt(self, template: Template) -> tuple[list[int], bool]:
        """The prompt, and whether every accepted row is clear in bfloat16."""
        best: list[int] = []
        most = -1
        for tries, prompt in enumerate(self._prompts(template)):
            clear = self._clear_accepted(template, prompt)
            if clear > most:
                best, most = prompt, clear
            if most == template.accepted or self.entry.thin or tries == _TRIES:
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
                if self.entry.thin or self._clear_prompt([*prompt, token], ends):
                    yield from grow([*prompt, token])

        return grow([])

    def _clear_prompt(self, prompt: list[int], ends: set[int]) -> bool:
        """Whether the last token decides clearly: its experts, and its target at a chunk's end."""
        session = self.truth.open(max_len=300)
        recorder = ForwardRecorder(self.truth)
        session.prefill(prompt, trace=recorder)
        last = len(prompt) - 1 if len(prompt) in ends else len(prompt)
        for model in (self.float32, self.bfloat16):
            margins = Shadow(model, 300).margins(tuple(prompt), recorder.shown(), last)
            if not clear_rows(margins)[-1]:
                return False
        return True

    def _clear_accepted(self, template: Template, prompt: list[int]) -> int:
        """How many of the rows to be accepted decide clearly in bfloat16, before the first not."""
        session = self.truth.open(max_len=300)
        shadow = Shadow(self.bfloat16, 300)
        recorder = ForwardRecorder(self.truth)
        root = session.prefill(prompt, trace=recorder)
        shadow.margins(tuple(prompt), recorder.shown())
        shadow.follow(Acceptance(tuple(range(len(prompt))), root))
        stops = any(isinstance(p, Planted) and p.stop_at is not None for p in template.rounds)
        emitted = {root}
        for row in range(template.accepted):
            recorder = ForwardRecorder(self.truth)
            token = session.decode(trace=recorder)
            if not clear_rows(shadow.margins((root,), recorder.shown()))[0]:
                return row
            if stops and token in emitted:  # a stop token that comes twice stops too early
                return row
            emitted.add(token)
            shadow.follow(Acceptance((0,), token))
            root = token
        return template.accepted


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
