"""The sizes that drawn models have, and the word that chooses them."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain

import pytest

from kdtr.contract import ConfigError
from kdtr.property_tests import failure, sizes


@pytest.mark.parametrize("word", [sizes.ODD, sizes.ALIGNED])
def test_no_size_can_be_taken_for_another(word: str) -> None:
    """Nor for the 3 heads or the 9 experts."""
    numbers = [*chain(*sizes.sizes(word).values()), *sizes.q_lora_ranks(word), 3, 9]

    assert len(set(numbers)) == len(numbers)


def test_aligned_rows_are_whole_16_bytes_of_16_bits() -> None:
    aligned = sizes.sizes(sizes.ALIGNED)

    assert all(
        number % 8 == 0 for number in chain(*aligned.values(), sizes.q_lora_ranks("aligned"))
    )
    assert ((512,), (64,)) == (aligned["kv_lora_rank"], aligned["qk_rope_head_dim"])


def test_both_sets_name_the_same_fields() -> None:
    assert sizes.sizes(sizes.ODD).keys() == sizes.sizes(sizes.ALIGNED).keys()


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sizes.VARIABLE, "")
    assert sizes.ODD == sizes.chosen()
    monkeypatch.setenv(sizes.VARIABLE, "aligned")
    assert sizes.ALIGNED == sizes.chosen()
    monkeypatch.setenv(sizes.VARIABLE, "even")
    with pytest.raises(ConfigError) as refusal:
        sizes.chosen()

    assert "KDTR_LAW_SIZES = 'even'; expected 'odd' or 'aligned'" == str(refusal.value)


def test_models_are_drawn_in_them() -> None:
    code = (
        "from kdtr.property_tests.strategies import PLAIN as p; print(p.kv_lora_rank, p.vocab_size)"
    )
    drawn = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, sizes.VARIABLE: "aligned"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "512 40\n" == drawn.stdout


def test_a_failure_is_shown_again_in_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "pytest --pyargs kdtr.property_tests -k test_law --kdtr-example BLOB"
    monkeypatch.setenv(sizes.VARIABLE, "odd")
    assert words == failure._again("law", "BLOB", None)
    monkeypatch.setenv(sizes.VARIABLE, "aligned")
    assert f"KDTR_LAW_SIZES=aligned {words}" == failure._again("law", "BLOB", None)
