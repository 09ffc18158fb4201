"""Reading what llama.cpp writes, and numbering the leaves of a tree; needs no library."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from kdtr.adapters import make_llamacpp_engine
from kdtr.adapters.llamacpp_backend import leaves_below, read_latents
from kdtr.adapters.llamacpp_library import library, refuse_layout
from kdtr.contract import ConfigError, DraftTree, EngineError, ModelConfig, UnsupportedError

CONFIG = ModelConfig.tiny().replace(num_hidden_layers=2, kv_lora_rank=3, qk_rope_head_dim=4)
F32, F16 = 0, 1


def state(positions: list[int], rows: np.ndarray, *, kind: int = F32, layers: int = 2) -> bytes:
    """As llama_state_seq_get_data writes it; rows [l, cells, c + r]."""
    text = struct.pack("<IiII", 0x67677371, 0, 1, len(positions))
    for position in positions:
        text += struct.pack("<iIi", position, 1, 0)
    text += struct.pack("<II", 1, layers)
    for layer in rows:
        text += struct.pack("<iQ", kind, layer[0].nbytes) + layer.tobytes()
    return text


@pytest.mark.parametrize(("kind", "dtype"), [(F32, np.float32), (F16, np.float16)])
def test_cells_are_put_in_the_order_of_positions_and_pairs_are_split(
    kind: int, dtype: type[np.generic]
) -> None:
    rows = np.arange(2 * 3 * 7).reshape(2, 3, 7).astype(dtype)

    c_kv, k_pe = read_latents(state([1, 2, 0], rows, kind=kind), CONFIG, 2)

    np.testing.assert_array_equal(rows[:, [2, 0], :3], c_kv)
    np.testing.assert_array_equal(rows[:, [2, 0]][..., [3, 5, 4, 6]], k_pe)
    assert (dtype, dtype) == (c_kv.dtype, k_pe.dtype)


def test_a_state_of_other_positions_is_refused() -> None:
    with pytest.raises(EngineError) as refused:
        read_latents(state([0, 2], np.zeros((2, 2, 7), np.float32)), CONFIG, 3)

    assert (
        "llama.cpp's state has (streams, positions, layers) (1, [0, 2], 2); "
        "expected (1, [0, 1, 2], 2)"
    ) == str(refused.value)


def test_a_state_of_quantized_rows_is_refused() -> None:
    rows = np.zeros((2, 1, 7), np.float32)

    with pytest.raises(EngineError, match=r"rows of 28 bytes of ggml_type 8; expected 7 numbers"):
        read_latents(state([0], rows, kind=8), CONFIG, 1)


def test_a_node_belongs_to_the_leaves_below_it() -> None:
    tree = DraftTree(tokens=(7, 3, 5, 3, 1), parents=(-1, 0, 0, 2, 2))

    assert [(0, 1, 2), (0,), (1, 2), (1,), (2,)] == leaves_below(tree, 5)


def test_rows_without_a_tree_are_one_sequence() -> None:
    assert [(0,), (0,)] == leaves_below(None, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cache": "bfloat16"}, "cache = 'bfloat16'; expected 'float32' or 'float16'"),
        ({"flash_attention": 1}, "flash_attention = 1; expected True or False"),
        ({"threads": 0}, "threads = 0; expected an integer of at least 1"),
        ({"threads": True}, "threads = True; expected an integer of at least 1"),
    ],
)
def test_an_unknown_option_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_llamacpp_engine(**options)  # type: ignore[arg-type]

    assert text == str(refused.value)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    library.cache_clear()

    with pytest.raises(UnsupportedError, match=r"needs llama-cpp-python.*pip install 'kdtr\[llam"):
        make_llamacpp_engine()


def test_tensors_of_another_layout_are_refused() -> None:
    refuse_layout(336 + 32, "0.3.36")

    with pytest.raises(UnsupportedError, match=r"0\.3\.99 has tensors of 344 bytes; expected 336"):
        refuse_layout(344 + 32, "0.3.99")
