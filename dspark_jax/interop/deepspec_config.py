"""config.json of a DeepSpec drafter <-> DSparkConfig."""

from collections.abc import Mapping
from typing import Any

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.nn.block import LayerSpec
from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec
from dspark_jax.targets.llama import rope_spec

_ARCHITECTURE = "Qwen3DSparkModel"
# Fields that must have one of these values where they are present: what differs is a drafter that cannot be built.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "architectures": ([_ARCHITECTURE],),
    "markov_head_type": ("vanilla",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
}
# Fields of a target's config that would contradict the drafter's own.
_SUPERSEDED = ("rope_theta", "rope_scaling", "torch_dtype", "auto_map", "quantization_config")


def config_of(fields: Mapping[str, Any]) -> DSparkConfig:
    """The drafter that config.json describes; ValueError names a field that is missing or not supported."""
    for field, supported in _SUPPORTED.items():
        if field in fields and fields[field] not in supported:
            raise ValueError(f"{field} {fields[field]!r} is not supported; supported: {supported[0]!r}")
    if any(kind != "full_attention" for kind in fields.get("layer_types", ())):
        raise ValueError(f"layer_types {fields['layer_types']} is not supported; supported: 'full_attention'")
    try:
        return _config(fields)
    except KeyError as error:
        raise ValueError(f"the field {error.args[0]} is missing") from None


def fields_of(config: DSparkConfig, extra: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's fields: `extra` (say, the target's), under the drafter's own. The inverse of `config_of`."""
    layer = config.layer
    if not layer.qk_norm:
        raise ValueError(f"drafter: a layer without q/k norms has no DeepSpec layout ({_ARCHITECTURE} has them)")
    own = {
        "architectures": [_ARCHITECTURE],
        "attention_bias": False,
        "block_size": config.block_size,
        "confidence_head_with_markov": config.confidence_with_markov,
        "enable_confidence_head": config.confidence,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.d_model,
        "intermediate_size": layer.ffw,
        "layer_types": ["full_attention"] * config.num_layers,
        "markov_head_type": "vanilla",
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "model_type": "qwen3",
        "num_attention_heads": layer.heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": layer.kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": layer.norm_eps,
        "rope_parameters": _rope_fields(layer.rope),
        "sliding_window": None,
        "target_layer_ids": list(config.tapped_layers),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
    return {field: value for field, value in extra.items() if field not in _SUPERSEDED} | own


def _config(fields: Mapping[str, Any]) -> DSparkConfig:
    heads = fields["num_attention_heads"]
    for field in ("markov_rank", "block_size"):
        if type(fields[field]) is not int or fields[field] < 1:
            raise ValueError(f"{field} {fields[field]!r} is not supported; supported: whole numbers from 1")
    layer = LayerSpec(
        d_model=fields["hidden_size"],
        ffw=fields["intermediate_size"],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        rope=rope_spec(fields),
        norm_eps=fields["rms_norm_eps"],
        qk_norm=True,
    )
    return DSparkConfig(
        vocab_size=fields["vocab_size"],
        layer=layer,
        num_target_layers=fields["num_target_layers"],
        tapped_layers=tuple(fields["target_layer_ids"]),
        mask_token_id=fields["mask_token_id"],
        num_layers=fields["num_hidden_layers"],
        block_size=fields["block_size"],
        markov_rank=fields["markov_rank"],
        confidence=fields["enable_confidence_head"],
        confidence_with_markov=fields.get("confidence_head_with_markov", True),
    )


def _rope_fields(rope: RopeSpec) -> dict[str, Any]:
    match rope.scaling:
        case None:
            return {"rope_theta": rope.theta, "rope_type": "default"}
        case LinearScaling(factor=factor):
            return {"rope_theta": rope.theta, "rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {
                "rope_theta": rope.theta,
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_len,
            }
