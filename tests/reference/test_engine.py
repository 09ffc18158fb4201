"""The factory and the model: what they refuse, and what they say of themselves."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from kdtr.contract import TRACED, VERBS, CacheError, CheckpointError, ConfigError, UnsupportedError
from kdtr.reference import make_engine


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"arithmetic": "blas"}, "arithmetic = 'blas'; expected 'fixed' or 'fast'"),
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
    with pytest.raises(CacheError) as refusal:
        model.open(max_len=max_len)

    expected = f"max_len = {max_len}; expected 1..max_position_embeddings = 64"
    assert expected == str(refusal.value)


@pytest.mark.parametrize("max_len", [1, 64])
def test_a_session_of_the_least_and_of_the_most_slots_opens(max_len, model):
    session = model.open(max_len=max_len)

    assert 0 == session.committed_len
    assert session.root is None


def test_a_gguf_file_is_refused():
    with pytest.raises(UnsupportedError) as refusal:
        make_engine().load("models/k2.gguf")

    expected = "k2.gguf: GGUF files are not read; give a Hugging Face directory or a .kdtr file"
    assert expected == str(refusal.value)


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError) as refusal:
        make_engine().load(tmp_path / "absent")

    expected = f"{tmp_path / 'absent'} does not exist; expected a Hugging Face checkpoint directory"
    assert expected == str(refusal.value)


@pytest.mark.parametrize(("arithmetic", "invariant"), [("fixed", True), ("fast", False)])
@pytest.mark.parametrize("cache", ["append", "scratch"])
def test_the_engine_declares_float64_and_its_invariance(arithmetic, invariant, cache):
    try:
        installed = version("kdtr")
    except PackageNotFoundError:
        pytest.skip("kdtr is on the path but not installed: it has no version to declare")

    info = make_engine(arithmetic=arithmetic, cache=cache).info

    profile = info.profile
    assert f"reference ({arithmetic}, {cache})" == info.name
    assert installed == info.version
    assert "cpu" == info.device
    assert {"float64"} == {
        profile.weights,
        profile.activations,
        profile.latents,
        profile.scores,
        profile.logits,
        profile.accumulation,
    }
    assert profile.deterministic
    assert invariant == profile.batch_invariant
    assert {"verify_batch", "commit_batch"} == set(VERBS) - info.verbs
    assert TRACED == info.stages
