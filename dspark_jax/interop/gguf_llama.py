"""A GGUF file of the llama family written out as a Hugging Face directory (weights, config, tokenizer).

GGUF stores rows of q and k with the two halves of every rotary pair interleaved (llama.cpp's convention);
Hugging Face keeps the halves apart, so those two tensors are permuted back. Quantised tensors are expanded.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, dequantize
from jaxtyping import Float, Shaped
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# The pre-tokenizers whose splitting is known here, by GGUF's name for them.
_DIGIT_SPLITTING = ("smollm",)
_CONTROL_TOKEN = 3


def write_huggingface_directory(gguf: Path, directory: Path, *, stop_ids: tuple[int, ...]) -> None:
    """Writes config.json, generation_config.json, model.safetensors (bfloat16) and the tokenizer's two files.

    `stop_ids` are the ids that end an answer; the first is the tokenizer's end of sequence.
    Raises ValueError for an architecture, tensor or pre-tokenizer that this does not know.
    """
    reader = GGUFReader(gguf)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama":
        raise ValueError(f"{gguf}: architecture {facts['general.architecture']!r}; only 'llama' is read from GGUF")
    config = _config(facts)
    weights = {
        _huggingface_name(tensor.name): _weight(tensor.name, dequantize(tensor.data, tensor.tensor_type), config)
        for tensor in reader.tensors
    }
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": list(stop_ids),
            "pad_token_id": config["pad_token_id"],
        },
    )
    _tokenizer(facts).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(facts, end_id=stop_ids[0]))


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    heads = int(facts["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(facts["tokenizer.ggml.bos_token_id"]),
        "dtype": "bfloat16",
        "eos_token_id": int(facts["tokenizer.ggml.eos_token_id"]),
        "head_dim": int(facts["llama.rope.dimension_count"]),
        "hidden_act": "silu",
        "hidden_size": int(facts["llama.embedding_length"]),
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "max_position_embeddings": int(facts["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_key_value_heads": int(facts.get("llama.attention.head_count_kv", heads)),
        "pad_token_id": int(facts["tokenizer.ggml.padding_token_id"]),
        # The metadata is float32: the shortest decimal that rounds to it is the number that was written.
        "rms_norm_eps": float(str(np.float32(facts["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_theta": float(facts["llama.rope.freq_base"]), "rope_type": "default"},
        "vocab_size": int(facts["llama.vocab_size"]),
    }


def _huggingface_name(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    block, _, rest = name.partition(".")[2].partition(".")
    if name.startswith("blk.") and rest in _LAYER_TENSORS:
        return f"model.layers.{block}.{_LAYER_TENSORS[rest]}"
    raise ValueError(f"GGUF tensor {name!r} has no place in a llama model")


def _weight(name: str, weight: Float[np.ndarray, "..."], config: dict[str, Any]) -> Shaped[np.ndarray, "..."]:
    if name.endswith("attn_q.weight"):
        weight = rotary_halves_apart(weight, heads=config["num_attention_heads"])
    elif name.endswith("attn_k.weight"):
        weight = rotary_halves_apart(weight, heads=config["num_key_value_heads"])
    return np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))


def rotary_halves_apart(weight: Float[np.ndarray, "HC D"], *, heads: int) -> Float[np.ndarray, "HC D"]:
    """Rows ordered (head, pair, half), as llama.cpp has them, reordered to (head, half, pair)."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; single digits are split off first, which transformers' own GGUF conversion forgets."""
    kind = (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"])
    if kind[0] != "gpt2" or kind[1] not in _DIGIT_SPLITTING:
        raise ValueError(f"GGUF tokenizer {kind} is not one of ('gpt2', {' | '.join(_DIGIT_SPLITTING)})")
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _tokenizer_config(facts: dict[str, Any], *, end_id: int) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "chat_template": facts["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[end_id],
        "model_max_length": int(facts["llama.context_length"]),
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
