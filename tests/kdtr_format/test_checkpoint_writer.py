"""Writing a Hugging Face directory that comes back equal, whole or in shards."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

from kdtr.contract.errors import CheckpointError
from kdtr.kdtr_format import read_checkpoint, write_checkpoint

CONFIG = {"vocab_size": 8, "rope_theta": 1e4, "text_config": {"b": [1, 2], "a": None}}
TENSORS = {
    "w.b": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "w.a": np.arange(8).astype(ml_dtypes.bfloat16)[::2],
    "norm": np.array([1.5, 2], dtype=">f4"),
    "scalar": np.array(2.5, np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("max_shard_bytes", [None, 1, 16, 10**6])
def test_a_checkpoint_comes_back(tmp_path, max_shard_bytes):
    write_checkpoint(tmp_path / "new" / "c", CONFIG, TENSORS, max_shard_bytes=max_shard_bytes)

    back = read_checkpoint(tmp_path / "new" / "c")
    assert CONFIG == back.config
    assert sorted(TENSORS) == list(back.tensors)
    for name, array in TENSORS.items():
        assert array.dtype.newbyteorder("=") == back.tensors[name].dtype
        assert array.shape == back.shapes[name] == back.tensors[name].shape
        np.testing.assert_array_equal(array, back.tensors[name])


def test_shards_are_filled_in_order_up_to_the_limit(tmp_path):
    write_checkpoint(tmp_path, CONFIG, TENSORS, max_shard_bytes=18)

    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {"config.json", "model.safetensors.index.json", first, second} == set(
        os.listdir(tmp_path)
    )
    assert {"total_size": 42} == index["metadata"]
    # empty 0, norm 8, scalar 2, w.a 8 fill 18 bytes; w.b takes 24, more than the limit, alone
    owners = {"empty": first, "norm": first, "scalar": first, "w.a": first, "w.b": second}
    assert owners == index["weight_map"]


@pytest.mark.parametrize("max_shard_bytes", [None, 16])
def test_equal_arguments_give_equal_bytes(tmp_path, max_shard_bytes):
    turned = dict(reversed(CONFIG.items())), dict(reversed(TENSORS.items()))

    write_checkpoint(tmp_path / "1", CONFIG, TENSORS, max_shard_bytes=max_shard_bytes)
    write_checkpoint(tmp_path / "2", *turned, max_shard_bytes=max_shard_bytes)

    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_writing_twice_replaces(tmp_path):
    write_checkpoint(tmp_path, CONFIG, {"a": np.zeros(1, np.float32)})
    write_checkpoint(tmp_path, {}, {"b": np.ones(1, np.float32)})

    assert {"b": (1,)} == read_checkpoint(tmp_path).shapes
    assert {"config.json", "model.safetensors"} == set(os.listdir(tmp_path))


@pytest.mark.parametrize(
    ("config", "tensors", "limit", "text"),
    [
        ({"a": {1, 2}}, {}, None, "config is not JSON: Object of type set"),
        ({"a": float("nan")}, {}, None, "config is not JSON: Out of range float"),
        (
            {},
            {"x": np.zeros(1)},
            None,
            "'x' has dtype float64; expected float32, bfloat16 or float16",
        ),
        ({}, {"x": [1.0]}, None, "tensor 'x' is a list; expected a NumPy array"),
        (
            {},
            {"x": np.zeros(1, np.float32)},
            0,
            "max_shard_bytes is 0; expected at least 1, or None",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_writing(tmp_path, config, tensors, limit, text):
    with pytest.raises(CheckpointError, match=text):
        write_checkpoint(tmp_path / "c", config, tensors, max_shard_bytes=limit)

    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("first", "second"), [(None, 16), (16, None), (16, 10**6)])
def test_weights_that_would_be_left_over_are_refused(tmp_path, first, second):
    write_checkpoint(tmp_path, CONFIG, TENSORS, max_shard_bytes=first)
    before = contents(tmp_path)

    with pytest.raises(
        CheckpointError, match=r"already has .*model.*, which this checkpoint would not replace"
    ):
        write_checkpoint(tmp_path, CONFIG, TENSORS, max_shard_bytes=second)

    assert before == contents(tmp_path)


def test_a_failure_while_writing_leaves_no_config_and_no_temporary_file(tmp_path):
    class Lazy(dict):
        asked = 0

        def __getitem__(self, name):
            self.asked += 1
            if self.asked > len(self) + 4:
                raise RuntimeError("disk on fire")
            return super().__getitem__(name)

    with pytest.raises(RuntimeError, match="disk on fire"):
        write_checkpoint(tmp_path, CONFIG, Lazy(TENSORS), max_shard_bytes=18)

    assert ["model-00001-of-00002.safetensors"] == os.listdir(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match=r"file/c cannot be written: .*Not a directory"):
        write_checkpoint(tmp_path / "file" / "c", {}, {})
