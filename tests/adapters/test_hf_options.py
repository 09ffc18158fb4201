"""What the hf engine refuses without having computed anything; needs no library."""

from __future__ import annotations

import sys

import pytest

from kdtr.adapters import make_hf_engine
from kdtr.adapters.hf_checkpoint import Choices, load_transformers
from kdtr.contract import ConfigError, ModelConfig, UnsupportedError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "float16"}, "dtype = 'float16'; expected one of 'float32', 'bfloat16', "),
        ({"attention": "flash"}, "attention = 'flash'; expected one of 'eager', 'sdpa'"),
        ({"mask": "none"}, "mask = 'none'; expected one of 'additive', 'boolean'"),
        ({"experts": "fast"}, "experts = 'fast'; expected one of 'eager', 'grouped_mm'"),
    ],
)
def test_an_unknown_option_is_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_hf_engine(**options)

    assert str(refused.value).startswith(text)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(UnsupportedError, match=r"needs torch and transformers.*pip install 'kdtr"):
        make_hf_engine()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'; transformers always uses"),
        ({"latent_norm_eps": 1e-5}, "latent_norm_eps = 1e-05; transformers always uses 1e-06"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0; transformers makes shared experts"),
    ],
)
def test_what_transformers_cannot_say_is_refused_before_a_library_is_needed(
    changes: dict[str, object], text: str
) -> None:
    config = ModelConfig.tiny().replace(**changes)

    with pytest.raises(UnsupportedError) as refused:
        load_transformers((config, {}), Choices("float32", "eager", "eager"))

    assert text in str(refused.value)


def test_widths_for_grouped_mm() -> None:
    config = ModelConfig.tiny().replace(moe_intermediate_size=6)

    with pytest.raises(UnsupportedError) as refused:
        load_transformers((config, {}), Choices("bfloat16", "eager", "grouped_mm"))

    assert (
        "moe_intermediate_size = 6 in bfloat16 is 12 bytes; torch's grouped_mm takes multiples of "
        "16 bytes: expected experts = 'eager'"
    ) == str(refused.value)
