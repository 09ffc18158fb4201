"""Reading a Hugging Face directory, and a refusal for each way in which one can be broken."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kdtr.contract.errors import CheckpointError
from kdtr.kdtr_format import read_checkpoint

CONFIG = {"model_type": "deepseek_v3", "rope_theta": 1e4, "unknown": [None, {"a": 1}]}
A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.array([1, 2.5, -3]).astype(ml_dtypes.bfloat16)
C = np.array(0.5, np.float16)


def build(directory, shards, index=None, config=CONFIG):
    """A checkpoint directory: file name -> tensors, and the weight_map if there is one."""
    (directory / "config.json").write_text(json.dumps(config))
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    if index is not None:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (directory / "model.safetensors.index.json").write_text(text)
    return directory


def refused(directory, text):
    with pytest.raises(CheckpointError, match=text):
        read_checkpoint(directory)


@pytest.mark.parametrize(
    ("shards", "index"),
    [
        ({"model.safetensors": {"a": A, "b": B, "c": C}}, None),
        ({"weights.safetensors": {"a": A, "b": B, "c": C}}, None),
        ({"one.safetensors": {"a": A}, "two.safetensors": {"b": B, "c": C}}, None),
        (
            {"1.safetensors": {"c": C, "a": A}, "2.safetensors": {"b": B}},
            {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"},
        ),
        (  # a file that the index does not list is not part of the model
            {"1.safetensors": {"c": C, "a": A, "b": B}, "consolidated.safetensors": {"a": A}},
            {"a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors"},
        ),
    ],
    ids=["model", "any name", "two without index", "sharded", "unlisted file"],
)
def test_the_tensors_come_in_the_files_dtype(tmp_path, shards, index):
    checkpoint = read_checkpoint(build(tmp_path, shards, index))

    assert CONFIG == checkpoint.config
    assert {"a": (2, 3), "b": (3,), "c": ()} == checkpoint.shapes
    assert ["a", "b", "c"] == list(checkpoint.tensors)
    for name, array in (("a", A), ("b", B), ("c", C)):
        assert array.dtype == checkpoint.tensors[name].dtype
        np.testing.assert_array_equal(array, checkpoint.tensors[name])
        assert not checkpoint.tensors[name].flags.writeable


def test_unknown_names_are_refused_with_the_closest(tmp_path):
    tensors = read_checkpoint(build(tmp_path, {"m.safetensors": {"layer.0.up": A}})).tensors

    with pytest.raises(
        CheckpointError, match=r"no tensor 'layer.1.up' among 1; the closest are 'layer.0.up'"
    ):
        tensors["layer.1.up"]
    assert tensors.get("layer.1.up") is None


def test_the_directory_must_be_one(tmp_path):
    (tmp_path / "file").write_text("")

    refused(tmp_path / "none", "none does not exist; expected a Hugging Face checkpoint directory")
    refused(tmp_path / "file", "file is not a directory; expected a Hugging Face")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "has no config.json"),
        (b"{", "config.json is not JSON: Expecting property name"),
        (b"\xff", "config.json is not JSON: 'utf-8' codec"),
        (b"[" * 10**5, "config.json is not JSON: maximum recursion"),
        (b"[1]", "config.json is a JSON list; expected an object"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "it is a Git LFS pointer, run git lfs pull",
        ),
    ],
)
def test_config_must_be_a_json_object(tmp_path, content, text):
    build(tmp_path, {"m.safetensors": {"a": A}})
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)

    refused(tmp_path, text)


@pytest.mark.parametrize("nested", [False, True])
def test_a_quantised_checkpoint_is_refused_with_what_to_do(tmp_path, nested):
    config = {"quantization_config": {"quant_method": "fp8"}}
    where = "text_config.quantization_config" if nested else "quantization_config"
    build(
        tmp_path, {"m.safetensors": {"a": A}}, config={"text_config": config} if nested else config
    )

    refused(
        tmp_path, f"config.json: {where} is present, so the weights are quantised; dequantise the"
    )


def test_a_quantization_config_of_null_is_none(tmp_path):
    build(tmp_path, {"m.safetensors": {"a": A}}, config={"quantization_config": None})

    assert {"quantization_config": None} == read_checkpoint(tmp_path).config


def test_a_directory_without_safetensors_says_what_it_has(tmp_path):
    build(tmp_path, {})
    refused(tmp_path, r"has no \*.safetensors$")

    (tmp_path / "pytorch_model.bin").write_text("")
    refused(
        tmp_path, r"has no \*.safetensors; it has pytorch_model.bin, convert that to safetensors"
    )


def test_every_missing_shard_is_listed_with_its_tensors(tmp_path):
    index = {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors", "d": "3.safetensors"}
    build(tmp_path, {"1.safetensors": {"a": A}}, index)

    refused(
        tmp_path, r"2 shards of 3 missing: 2.safetensors \(2 tensors\), 3.safetensors \(1 tensor\)"
    )


def test_the_index_lists_exactly_what_the_shards_hold(tmp_path):
    shards = {"1.safetensors": {"a": A, "x": A}, "2.safetensors": {"b": B}}

    build(tmp_path, shards, {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"})
    refused(tmp_path, r"index.json lists 1 tensor that the shard lacks: c \(2.safetensors\)")
    build(tmp_path, shards, {"a": "2.safetensors", "b": "2.safetensors", "x": "1.safetensors"})
    refused(tmp_path, r"index.json lists 1 tensor that the shard lacks: a \(2.safetensors\)")
    build(tmp_path, shards, {"a": "1.safetensors", "b": "2.safetensors"})
    refused(tmp_path, r"index.json does not list 1 tensor of its shards: x \(1.safetensors\)")


@pytest.mark.parametrize("index", [None, {"a": "1.safetensors", "b": "2.safetensors"}])
def test_a_tensor_in_two_files_is_refused(tmp_path, index):
    build(tmp_path, {"1.safetensors": {"a": A}, "2.safetensors": {"a": A, "b": B}}, index)

    refused(tmp_path, r"1 tensor in two files: a \(1.safetensors, 2.safetensors\)")


def test_a_single_file_beside_an_index_is_ambiguous(tmp_path):
    build(
        tmp_path, {"1.safetensors": {"a": A}, "model.safetensors": {"a": A}}, {"a": "1.safetensors"}
    )

    refused(
        tmp_path, "has both model.safetensors and model.safetensors.index.json, which does not list"
    )


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "index.json is not JSON"),
        ("{}", "has no weight_map; expected tensor name -> file name"),
        ('{"weight_map": []}', "has no weight_map"),
        (
            '{"weight_map": {"a": 1}}',
            r"weight_map\['a'\] is 1; expected the name of a \*.safetensors file beside it",
        ),
        (
            '{"weight_map": {"a": "../m.safetensors"}}',
            "is '../m.safetensors'; expected the name of a",
        ),
        ('{"weight_map": {"a": ".."}}', "is '..'; expected the name of a"),
        ('{"weight_map": {"a": "a\\u0000"}}', r"is 'a\\x00'; expected the name of a"),
        ('{"weight_map": {"a": ""}}', "is ''; expected the name of a"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, index, text):
    build(tmp_path, {"m.safetensors": {"a": A}})
    (tmp_path / "model.safetensors.index.json").write_text(index)

    refused(tmp_path, text)


def test_every_truncation_is_refused_by_name(tmp_path):
    build(tmp_path, {"m.safetensors": {"a": A, "b": B}})
    whole = (tmp_path / "m.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "m.safetensors").write_bytes(whole[:length])

        refused(tmp_path, "m.safetensors cannot be read as safetensors")


def test_what_is_not_a_safetensors_file_is_refused_by_name(tmp_path):
    build(tmp_path, {})
    (tmp_path / "m.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, "m.safetensors cannot be read .*; it is a Git LFS pointer, run git lfs pull")

    os.remove(tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").mkdir()
    refused(tmp_path, "m.safetensors cannot be read: Is a directory")


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path):
    build(tmp_path, {})
    part = '"a":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    header = ("{" + part % (0, 4) + "," + part % (4, 8) + "}").encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))

    refused(tmp_path, "m.safetensors cannot be read as safetensors")


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros(3, ml_dtypes.float8_e4m3fn), "F8_E4M3"),
        (np.zeros(3, np.int64), "I64"),
        (np.zeros(3, np.uint8), "U8"),
        (np.zeros(3, np.float64), "F64"),
    ],
)
def test_other_dtypes_are_refused_with_name_and_dtype(tmp_path, array, dtype):
    build(tmp_path, {"m.safetensors": {"a": A, "q": array}})

    refused(
        tmp_path,
        f"m.safetensors: 1 tensor not of dtype F32, BF16, F16: q {dtype}; "
        r"convert them first \(quantised weights: dequantise to bfloat16\)",
    )


def test_a_long_list_of_names_is_cut(tmp_path):
    build(tmp_path, {"m.safetensors": {f"t{i:02}": np.zeros(1, np.int8) for i in range(30)}})

    refused(
        tmp_path, "30 tensors not of dtype F32, BF16, F16: t00 I8, .*, t19 I8 and 10 more; convert"
    )


@pytest.mark.parametrize("name", ["config.json", "m.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_before_it_is_opened(tmp_path, name):
    build(tmp_path, {"m.safetensors": {"a": np.zeros(1, np.float32)}})
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)

    refused(tmp_path, f"{name} is not a regular file; expected a file of a checkpoint")


def test_an_endless_config_is_refused(tmp_path):
    build(tmp_path, {"m.safetensors": {"a": np.zeros(1, np.float32)}})
    os.remove(tmp_path / "config.json")
    (tmp_path / "config.json").symlink_to("/dev/zero")

    refused(tmp_path, "config.json is not a regular file")


def test_a_huge_config_is_refused_unread(tmp_path):
    build(tmp_path, {"m.safetensors": {"a": np.zeros(1, np.float32)}})
    os.truncate(tmp_path / "config.json", 2**24 + 1)

    refused(tmp_path, "config.json has 16777217 bytes; expected at most 16777216")


def test_the_systems_words_are_passed_on(tmp_path):
    build(tmp_path, {})
    (tmp_path / "m.safetensors").symlink_to("m.safetensors")
    refused(tmp_path, "m.safetensors cannot be read: Too many levels of symbolic links")

    refused("a" * 5000, "cannot be read: File name too long")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_weights_without_permission_say_so(tmp_path):
    build(tmp_path, {"m.safetensors": {"a": np.zeros(1, np.float32)}})
    (tmp_path / "m.safetensors").chmod(0)

    refused(tmp_path, "m.safetensors cannot be read: Permission denied")
