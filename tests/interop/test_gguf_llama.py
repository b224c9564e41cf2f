"""A GGUF file comes out as the Hugging Face directory it was made from."""

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from dspark_jax.interop.gguf_llama import write_huggingface_directory


@pytest.fixture
def convert(tmp_path, tiny_gguf):
    def convert(weights, **kinds):
        file = tiny_gguf(tmp_path / "model.gguf", weights, **kinds)
        directory = tmp_path / "out"
        directory.mkdir()
        write_huggingface_directory(file, directory, stop_ids=(2, 0))
        return directory

    return convert


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_with_rotary_rows_in_order(convert, tiny_weights, tied):
    weights = tiny_weights(tied=tied)
    directory = convert(weights)
    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == weights.keys()
    for name, weight in weights.items():
        assert stored[name].dtype.name == "bfloat16"
        np.testing.assert_array_equal(stored[name].astype(np.float32), weight, err_msg=name)
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is tied


def test_quantised_tensors_are_expanded(convert, tiny_weights):
    weights = tiny_weights()
    exact = weights["model.layers.0.mlp.up_proj.weight"]
    packed = gguf.quantize(exact, gguf.GGMLQuantizationType.Q8_0)
    directory = convert(weights, packed={"model.layers.0.mlp.up_proj.weight": packed})
    stored = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_allclose(stored.astype(np.float32), exact, atol=0.01)


def test_config_says_what_the_metadata_says(convert, tiny_weights):
    directory = convert(tiny_weights())
    config = json.loads((directory / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 50_000.0, "rope_type": "default"},
        "vocab_size": 280,
    }
    assert expected.items() <= config.items()
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}


def test_tokenizer_splits_digits_before_merging(convert, tiny_weights):
    directory = convert(tiny_weights())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("hell").tokens == ["he", "ll"]
    assert tokenizer.encode("10").tokens == ["1", "0"]
    assert tokenizer.encode("he<|im_end|>").ids[-1] == 2
    assert "chat_template" in json.loads((directory / "tokenizer_config.json").read_text())


def test_other_architectures_and_tokenizers_are_refused(convert, tiny_weights, tmp_path):
    with pytest.raises(ValueError, match="architecture 'qwen2'"):
        convert(tiny_weights(), architecture="qwen2")
    (tmp_path / "out").rmdir()
    with pytest.raises(ValueError, match="'llama-bpe'"):
        convert(tiny_weights(), pre="llama-bpe")


def test_a_tensor_without_a_place_is_named(convert, tiny_weights):
    with pytest.raises(ValueError, match=r"'rope_freqs\.weight' has no place"):
        convert(tiny_weights() | {"rope_freqs.weight": np.ones(4, np.float32)})
