"""The sizes that drawn models have: odd ones, or those that kernels for tensor cores take.

The variable KDTR_LAW_SIZES chooses. `odd`, the default, suits engines that compute with any size,
and shows a size taken for another. `aligned` is for engines that do not, or whose fast kernels do
not: every row is whole 16 bytes in 16 bits, kv_lora_rank is 512 and qk_rope_head_dim 64, as in all
published models with MLA.
"""

from __future__ import annotations

import os

from kdtr.contract import ConfigError

VARIABLE = "KDTR_LAW_SIZES"
ODD, ALIGNED = "odd", "aligned"

# No number is in two fields of a set (nor is 3, the heads and the groups, or 9, the experts): a
# size taken for another one shows as a wrong shape.
_ODD: dict[str, tuple[int, ...]] = {
    "vocab_size": (37, 41),
    "hidden_size": (13, 23),
    "kv_lora_rank": (7, 19),
    "qk_nope_head_dim": (5, 15),
    "qk_rope_head_dim": (4, 6),
    "v_head_dim": (11, 21),
    "intermediate_size": (25, 29),
    "moe_intermediate_size": (10, 14),
}
_ALIGNED: dict[str, tuple[int, ...]] = {
    "vocab_size": (40, 48),
    "hidden_size": (24, 56),
    "kv_lora_rank": (512,),
    "qk_nope_head_dim": (8, 16),
    "qk_rope_head_dim": (64,),
    "v_head_dim": (32, 72),
    "intermediate_size": (80, 88),
    "moe_intermediate_size": (96, 104),
}
_Q_LORA_RANKS = {ODD: (17, 27), ALIGNED: (112, 120)}


def chosen() -> str:
    """`odd` or `aligned`. Raises ConfigError for another word in the variable."""
    word = os.environ.get(VARIABLE) or ODD
    if word not in _Q_LORA_RANKS:
        raise ConfigError(f"{VARIABLE} = {word!r}; expected {ODD!r} or {ALIGNED!r}")
    return word


def sizes(word: str) -> dict[str, tuple[int, ...]]:
    """What each field may be, the plain model's first."""
    return _ODD if word == ODD else _ALIGNED


def q_lora_ranks(word: str) -> tuple[int, ...]:
    """What q_lora_rank may be besides None."""
    return _Q_LORA_RANKS[word]
