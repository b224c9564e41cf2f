"""Gemma 4 text, dense: sliding and global layers that differ in head size, key/value heads and rotary."""

from typing import Any

from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.layers import VocabularySpec
from dspark_jax.targets.fields import Config, require, rope_of
from dspark_jax.targets.model import TargetSpec

SLIDING, GLOBAL = "sliding_attention", "full_attention"


def gemma4_spec(config: Config) -> TargetSpec:
    """TargetSpec of a parsed config.json, bare (`gemma4_text`) or wrapped with a `text_config`.

    ValueError names the field that cannot be honoured.
    """
    config = config.get("text_config", config)
    require_dense(config)
    kinds = config["layer_types"]
    if len(kinds) != config["num_hidden_layers"]:
        raise ValueError(
            f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers is {config['num_hidden_layers']}"
        )
    return TargetSpec(
        family="gemma4",
        vocabulary=VocabularySpec(
            size=config["vocab_size"],
            d_model=config["hidden_size"],
            tied=config.get("tie_word_embeddings", True),
            embedding_scale=config["hidden_size"] ** 0.5,
            soft_cap=config.get("final_logit_softcapping"),
        ),
        layers=tuple(gemma4_layer(config, index) for index in range(len(kinds))),
        norm_eps=config["rms_norm_eps"],
        max_len=config["max_position_embeddings"],
    )


def require_dense(config: Config) -> None:
    """ValueError for what other Gemma 4 models have and this module does not build."""
    require(config, "hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    require(config, "attention_bias", False, None, default=False)
    require(config, "enable_moe_block", False, None, default=False)
    require(config, "hidden_size_per_layer_input", 0, None, default=0)
    require(config, "num_kv_shared_layers", 0, None, default=0)
    require(config, "use_bidirectional_attention", None, False, "vision", default=None)
    require(config, "use_double_wide_mlp", False, None, default=False)


def gemma4_layer(config: Config, index: int) -> LayerSpec:
    """Layer `index` of a target, or of a drafter whose config.json has the same fields."""
    kind = config["layer_types"][index]
    if kind not in (SLIDING, GLOBAL):
        raise ValueError(f"config.json: layer_types {kind!r} is not supported; supported: {SLIDING!r}, {GLOBAL!r}")
    heads = {"head_dim": config["head_dim"], "kv_heads": config["num_key_value_heads"]} | _overrides(config, index)
    rope = config["rope_parameters"][kind]
    return LayerSpec(
        d_model=config["hidden_size"],
        ffw=config["intermediate_size"],
        heads=config["num_attention_heads"],
        rope=rope_of(rope, max_len=config.get("max_position_embeddings")),
        norm_eps=config["rms_norm_eps"],
        activation="gelu_tanh",
        qk_norm=True,
        v_norm=True,
        k_is_v=kind == GLOBAL and config.get("attention_k_eq_v", True),
        scale=1.0,
        branch_norms=True,
        layer_scalar=True,
        window=config["sliding_window"] if kind == SLIDING else None,
        **heads,
    )


def _overrides(config: Config, index: int) -> dict[str, Any]:
    """Head size and key/value heads of a global layer, in the new spelling (by layer number) or the old one."""
    if per_layer := config.get("per_layer_config"):
        given = per_layer.get(str(index), {})
        names = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
        if unknown := set(given) - set(names):
            raise ValueError(f"config.json: per_layer_config.{index}.{min(unknown)} is not supported")
        return {names[field]: value for field, value in given.items() if value is not None}
    if config["layer_types"][index] != GLOBAL:
        return {}
    kv_heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v", True) else None
    return {"head_dim": config.get("global_head_dim", 512)} | ({"kv_heads": kv_heads} if kv_heads else {})
