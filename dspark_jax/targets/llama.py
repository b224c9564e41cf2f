"""The Llama family (Llama 2 and 3, SmolLM2 and others that carry its architecture)."""

from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.layers import VocabularySpec
from dspark_jax.targets.fields import Config, require, rope_spec
from dspark_jax.targets.model import TargetSpec


def llama_spec(config: Config) -> TargetSpec:
    """TargetSpec of a parsed Hugging Face config.json; ValueError names the field that cannot be honoured."""
    require(config, "mlp_bias", False, default=False)
    return dense_spec(config, family="llama", qk_norm=False)


def dense_spec(config: Config, *, family: str, qk_norm: bool) -> TargetSpec:
    """What Llama and Qwen3 have in common: identical layers with full attention and a silu feed-forward."""
    require(config, "hidden_act", "silu", default="silu")
    require(config, "attention_bias", False, None, default=False)
    heads = config["num_attention_heads"]
    layer = LayerSpec(
        d_model=config["hidden_size"],
        ffw=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope=rope_spec(config),
        norm_eps=config["rms_norm_eps"],
        qk_norm=qk_norm,
    )
    return TargetSpec(
        family=family,
        vocabulary=VocabularySpec(
            size=config["vocab_size"], d_model=config["hidden_size"], tied=config.get("tie_word_embeddings", False)
        ),
        layers=(layer,) * config["num_hidden_layers"],
        norm_eps=config["rms_norm_eps"],
        max_len=config["max_position_embeddings"],
    )
