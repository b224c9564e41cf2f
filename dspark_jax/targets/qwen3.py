"""Qwen3 dense: Llama's layer with RMS norms on query and key heads."""

from dspark_jax.targets.fields import Config, require
from dspark_jax.targets.llama import dense_spec
from dspark_jax.targets.model import TargetSpec


def qwen3_spec(config: Config) -> TargetSpec:
    """TargetSpec of a parsed Hugging Face config.json; ValueError names the field that cannot be honoured."""
    require(config, "use_sliding_window", False, None, default=False)
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"config.json: layer_types {sorted(kinds)} is not supported; supported: 'full_attention'")
    return dense_spec(config, family="qwen3", qk_norm=True)
