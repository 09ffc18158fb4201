"""The factory and the model: what they refuse, and what they say of themselves."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from kdtr.contract import TRACED, VERBS, ConfigError, InputError
from kdtr.reference import make_engine


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            {"arithmetic": "blas"},
            "arithmetic = 'blas'; expected one of 'fixed', 'fast', 'float32', 'bfloat16', "
            "'float16'",
        ),
        ({"cache": "paged"}, "cache = 'paged'; expected 'append' or 'scratch'"),
    ],
    ids=str,
)
def test_options_are_named_with_their_values(option, text):
    with pytest.raises(ConfigError) as refusal:
        make_engine(**option)

    assert text == str(refusal.value)


@pytest.mark.parametrize("max_len", [0, -1, 65])
def test_a_session_has_at_least_one_slot_and_no_more_than_positions(max_len, model):
    with pytest.raises(InputError) as refusal:
        model.open(max_len=max_len)

    expected = f"max_len = {max_len}; expected 1..max_position_embeddings = 64"
    assert expected == str(refusal.value)


@pytest.mark.parametrize("max_len", [1, 64])
def test_a_session_of_the_least_and_of_the_most_slots_opens(max_len, model):
    session = model.open(max_len=max_len)

    assert 0 == session.committed_len
    assert session.root is None


@pytest.mark.parametrize(
    ("arithmetic", "storage", "accumulation", "invariant"),
    [
        ("fixed", "float64", "float64", True),
        ("fast", "float64", "float64", False),
        ("float32", "float32", "float32", True),
        ("bfloat16", "bfloat16", "float32", True),
        ("float16", "float16", "float32", True),
    ],
)
@pytest.mark.parametrize("cache", ["append", "scratch"])
def test_the_engine_declares_its_precision(arithmetic, storage, accumulation, invariant, cache):
    try:
        installed = version("kdtr")
    except PackageNotFoundError:
        pytest.skip("kdtr is on the path but not installed: it has no version to declare")

    info = make_engine(arithmetic=arithmetic, cache=cache).info

    profile = info.profile
    assert f"reference ({arithmetic}, {cache})" == info.name
    assert installed == info.version
    assert "cpu" == info.device
    assert {storage} == {
        profile.weights,
        profile.activations,
        profile.latents,
        profile.scores,
        profile.logits,
    }
    assert accumulation == profile.accumulation
    assert profile.deterministic
    assert invariant == profile.batch_invariant
    assert {"verify_batch", "commit_batch"} == set(VERBS) - info.verbs
    assert TRACED == info.stages
