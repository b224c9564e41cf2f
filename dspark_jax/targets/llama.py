"""The Llama family (Llama 2 and 3, SmolLM2 and others that carry its architecture)."""

from collections.abc import Mapping
from typing import Any

from dspark_jax.nn.block import LayerSpec
from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec
from dspark_jax.targets.model import TargetSpec


def llama_spec(config: Mapping[str, Any]) -> TargetSpec:
    """TargetSpec of a parsed Hugging Face config.json; ValueError names the field that cannot be honoured."""
    _require(config, "hidden_act", "silu", supported={"silu"})
    _require(config, "mlp_bias", False, supported={False})
    _require(config, "attention_bias", False, supported={False})
    heads = config["num_attention_heads"]
    layer = LayerSpec(
        d_model=config["hidden_size"],
        ffw=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope=rope_spec(config),
        norm_eps=config["rms_norm_eps"],
    )
    return TargetSpec(
        family="llama",
        vocab_size=config["vocab_size"],
        layers=(layer,) * config["num_hidden_layers"],
        norm_eps=config["rms_norm_eps"],
        tied=config.get("tie_word_embeddings", False),
        max_len=config["max_position_embeddings"],
    )


def rope_spec(config: Mapping[str, Any]) -> RopeSpec:
    """Rotary frequencies from either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    fields = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = fields.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = fields.get("rope_type", fields.get("type", "default"))
    match kind:
        case "default":
            return RopeSpec(theta=theta)
        case "linear":
            return RopeSpec(theta=theta, scaling=LinearScaling(factor=fields["factor"]))
        case "llama3":
            scaling = Llama3Scaling(
                factor=fields["factor"],
                low_freq_factor=fields["low_freq_factor"],
                high_freq_factor=fields["high_freq_factor"],
                original_max_len=fields["original_max_position_embeddings"],
            )
            return RopeSpec(theta=theta, scaling=scaling)
    raise ValueError(f"config.json: rope_type {kind!r} is not supported; supported are default, linear, llama3")


def _require(config: Mapping[str, Any], field: str, default: Any, *, supported: set) -> None:
    value = config.get(field, default)
    if value not in supported:
        names = ", ".join(map(repr, sorted(supported, key=str)))
        raise ValueError(f"config.json: {field} {value!r} is not supported; supported: {names}")
