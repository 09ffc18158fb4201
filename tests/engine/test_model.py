from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kdtr.contract import InputError, SessionError
from kdtr.engine.model import TreeModel

Load = Callable[..., TreeModel]


@pytest.mark.parametrize("max_len", [0, -1, 301])
def test_a_session_fits_the_model(load: Load, max_len: int) -> None:
    with pytest.raises(InputError) as refusal:
        load().open(max_len=max_len)

    assert str(refusal.value) == (
        f"max_len = {max_len}; expected 1..300, the model's max_position_embeddings"
    )


@pytest.mark.parametrize("max_len", [1.5, "9", None, True])
def test_max_len_is_an_integer(load: Load, max_len: Any) -> None:
    with pytest.raises(InputError, match="expected an integer"):
        load().open(max_len=max_len)


def test_both_ends_of_the_range_open(load: Load) -> None:
    model = load()

    assert 0 == model.open(max_len=1).committed_len
    assert 0 == model.open(max_len=300).committed_len


def test_sessions_of_one_model_are_apart(load: Load) -> None:
    model = load(page_size=3)
    alone = model.open(max_len=20)
    first, second = model.open(max_len=20), model.open(max_len=20)

    alone.prefill([1, 2, 3, 4])
    first.prefill([1, 2, 3, 4])
    second.prefill([9, 8])
    second.decode()

    assert alone.decode() == first.decode()
    assert 3 == second.committed_len


def test_a_closed_model_opens_nothing_and_closes_its_sessions(load: Load) -> None:
    model = load()
    session = model.open(max_len=9)

    model.close()
    model.close()

    with pytest.raises(SessionError, match="open on a closed model"):
        model.open(max_len=9)
    with pytest.raises(SessionError, match="prefill on a closed session"):
        session.prefill([1])


def test_a_model_that_may_not_close_yet_closes_no_session(load: Load) -> None:
    """Asked from within a trace of one of its sessions."""
    model = load()
    sessions = [model.open(max_len=9) for _ in range(7)]
    sessions[0].prefill([1, 2])
    refused: list[str] = []

    def trace(*_: object) -> None:
        with pytest.raises(SessionError, match="close called from a trace") as error:
            model.close()
        refused.append(str(error.value))

    sessions[0].decode(trace=trace)

    assert refused
    assert 3 == sessions[0].committed_len
    for session in sessions[1:]:
        assert session.prefill([1, 2]) >= 0
