"""One file or shards, and each way in which they can be broken."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.interop.tensor_files import TensorFiles, read_json

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4).astype(ml_dtypes.bfloat16)


def write_shards(directory):
    save_file({"a": A}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": B}, directory / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_read_like_one_file(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "one").mkdir()
    save_file({"a": A, "b": B}, tmp_path / "one" / "model.safetensors")
    for files in (TensorFiles(tmp_path), TensorFiles(tmp_path / "one")):
        assert files.names == {"a", "b"}
        assert files.shape("a") == (2, 3)
        np.testing.assert_array_equal(files.read("a"), A)
        assert files.read("b").dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(files.read("b"), B)


def test_what_is_read_is_the_file_itself(tmp_path):
    """Not a copy, which would be a tensor of host memory more; and nobody can write to it."""
    write_shards(tmp_path)
    tensor = TensorFiles(tmp_path).read("a")
    assert not tensor.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 1.0


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"the index lists model-00002-of-00002\.safetensors"):
        TensorFiles(tmp_path)


def test_a_cut_file_is_named(tmp_path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (len(whole) - 1, 4, 0):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete"):
            TensorFiles(tmp_path)


def test_a_directory_where_weights_belong_is_named(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is no file"):
        TensorFiles(tmp_path)


def test_no_safetensors_at_all(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        TensorFiles(tmp_path)


def test_quantised_tensors_are_refused_by_name(tmp_path):
    save_file({"a": A.astype(np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="tensor a is I8; supported are BF16, F16, F32"):
        TensorFiles(tmp_path).read("a")


@pytest.mark.parametrize(
    ("text", "error"), [("{", "is not valid JSON"), ("[1]", "holds a JSON list"), ("\udcff", "is not valid JSON")]
)
def test_a_broken_json_file_is_named(tmp_path, text, error):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=rf"config\.json {error}"):
        read_json(tmp_path / "config.json")


def test_a_missing_json_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        read_json(tmp_path / "config.json")
