from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.contract import TRACED, EngineError, UnsupportedError
from kdtr.engine import make_engine


def test_what_the_engine_says_of_itself() -> None:
    info = make_engine().info

    assert "kdtr.engine" == info.name
    assert "cpu" == info.device
    assert TRACED == info.stages
    assert {"verify_batch", "commit_batch"}.isdisjoint(info.verbs)
    assert {"round", "verify", "forward_tokens"} <= info.verbs
    assert ("float32", "float32", True, False) == (
        info.profile.latents,
        info.profile.accumulation,
        info.profile.deterministic,
        info.profile.batch_invariant,
    )


def test_every_declared_verb_of_a_session_is_there(session: Any) -> None:
    assert all(callable(getattr(session, verb)) for verb in make_engine().info.verbs)
    assert not hasattr(session, "verify_batch")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"page_size": 0}, "page_size = 0; expected at least 1"),
        ({"split_size": -3}, "split_size = -3; expected at least 1"),
        ({"page_size": 2.0}, "page_size = 2.0; expected an integer"),
        ({"kernels": "numpy"}, "kernels = 'numpy'; expected 'host'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineError) as refusal:
        make_engine(**options)

    assert text == str(refusal.value)


def test_cuda_is_refused_by_name_and_nothing_stands_in_for_it() -> None:
    with pytest.raises(UnsupportedError, match="CUDA kernels are not in this version"):
        make_engine(kernels="cuda")


def test_a_directory_and_a_pair_load_the_same_model(hf_root: Path) -> None:
    directory = hf_root / "v01-qlora-g1"
    engine = make_engine()

    from_directory = engine.load(directory)
    from_text = engine.load(str(directory))

    logits = []
    for model in (from_directory, from_text):
        session = model.open(max_len=4)
        session.set_root(3)
        logits.append(session.forward_tokens([3], [0], np.ones((1, 1), bool)))
    assert from_directory.config == from_text.config
    assert np.array_equal(*logits)
