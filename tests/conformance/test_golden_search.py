"""The search for prompts: what it asks of one, against plain runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from kdtr.conformance.case import Planted
from kdtr.conformance.corpus_cases import Template
from kdtr.conformance.corpus_models import CorpusModel, corpus_models, corpus_plans
from kdtr.conformance.golden_margins import PRECISIONS, ForwardRecorder, Shadow
from kdtr.conformance.golden_search import _Grown, _Search

MODELS = {entry.model.name: entry for entry in corpus_models()}
FOUND = [
    (entry, template)
    for name in ("softmax", "no-two-alike")
    for entry in (MODELS[name],)
    for template in entry.templates
    if template.alias in ("stop-first", "stop-later", "both-limits", "from-root", "budgets")
]


@pytest.fixture(scope="module")
def search() -> _Search:
    return _Search(MODELS["softmax"])


def test_the_last_row_of_a_prompt_that_grew_is_that_of_one_prefill(search: _Search) -> None:
    prompt, slots = [28, 15, 49, 42, 55], 12
    grown = _Grown(search.truth, search.emulated, slots)
    for end in range(1, len(prompt)):
        grown.last_row(prompt[:end], decides=False)

    found = grown.last_row(prompt, decides=True)

    recorder = ForwardRecorder(search.truth)
    search.truth.open(max_len=slots).prefill(prompt, trace=recorder)
    shown = recorder.shown()
    expected = [
        Shadow(model, slots).margins(tuple(prompt), shown, len(prompt) - 1)[-1:]
        for model in search.emulated
    ]
    np.testing.assert_array_equal(np.array(expected), np.array(found))


def test_a_prompt_that_is_no_continuation_begins_anew(search: _Search) -> None:
    grown = _Grown(search.truth, search.emulated, 12)
    grown.last_row([3, 4, 5], decides=False)

    assert grown.is_before([3, 4, 9])
    assert not grown.is_before([3, 5, 9])
    assert not grown.is_before([3, 4])


@pytest.mark.parametrize(
    ("entry", "template"), FOUND, ids=[f"{e.model.name}-{t.alias}" for e, t in FOUND]
)
def test_the_prompts_of_the_corpus_are_what_the_search_asks_for(
    entry: CorpusModel, template: Template
) -> None:
    """Every row clear, and followed as the template wants."""
    (plan,) = (plan for plan in corpus_plans(entry) if plan.alias == template.alias)
    prompt = [plan.root] if plan.root is not None else [t for chunk in plan.chunks for t in chunk]
    search, ends = _Search(entry), {*accumulate(template.chunks)}

    assert all(search._clear_prompt(prompt[:n], ends) for n in range(1, len(prompt) + 1))
    assert template.accepted == search._clear_accepted(template, prompt)


def test_another_token_than_the_wanted_one_is_no_prompt(search: _Search) -> None:
    (template,) = (t for t in MODELS["softmax"].templates if t.alias == "stop-first")
    plain = replace(template, rounds=(Planted((-1,)),) * 2)
    follows = {}
    for prompt in ((28, 15, 49, 42, 55, 44), (49, 21, 23, 15, 23, 53), (1, 2, 3, 4, 5, 6)):
        session = search.truth.open(max_len=20)
        session.prefill(prompt)
        follows[prompt] = session.decode() == 0

    assert {True, False} == set(follows.values())
    for prompt, is_wanted in follows.items():
        assert is_wanted == search._is_followed_as_wanted(plain, list(prompt))
        assert is_wanted or 0 == search._clear_accepted(plain, list(prompt))


def test_where_decisions_are_thin_on_purpose_no_precision_is_asked() -> None:
    asked = {name: len(_Search(MODELS[name]).emulated) for name in ("token-ties", "close-logits")}

    assert {"token-ties": 0, "close-logits": 1} == asked
    assert len(PRECISIONS) == len(_Search(MODELS["base"]).emulated)
