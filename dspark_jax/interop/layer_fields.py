"""The fields of config.json that describe a drafter's layer <-> LayerSpec: Qwen3's layer or Gemma 4's global one."""

from collections.abc import Mapping
from typing import Any

from dspark_jax.nn.block import LayerSpec
from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from dspark_jax.targets.fields import require, rope_spec
from dspark_jax.targets.gemma4 import GLOBAL, gemma4_layer, require_dense

QWEN3, GEMMA4 = "Qwen3", "Gemma4"
Fields = Mapping[str, Any]


def family_of(layer: LayerSpec) -> str:
    """Whose layer it is; ValueError where no file format has such a layer."""
    family = GEMMA4 if layer.branch_norms else QWEN3
    facts = (layer.qk_norm, layer.v_norm, layer.activation, layer.scale, layer.layer_scalar)
    known = {QWEN3: (True, False, "silu", None, False), GEMMA4: (True, True, "gelu_tanh", 1.0, True)}
    if not layer.qk_norm:
        raise ValueError("drafter: a layer without q/k norms has no DeepSpec layout (Qwen3's and Gemma 4's have them)")
    if facts != known[family] or layer.window is not None or (layer.k_is_v and family == QWEN3):
        raise ValueError(
            f"drafter: its layer is neither Qwen3's nor a global one of Gemma 4, so no file can hold it: {layer}"
        )
    return family


def layer_of(fields: Fields, family: str) -> LayerSpec:
    """The layer that config.json describes; KeyError or ValueError names the field."""
    if any(kind != "full_attention" for kind in fields.get("layer_types") or ()):
        raise ValueError(f"layer_types {fields['layer_types']} is not supported; supported: 'full_attention'")
    return _gemma4_layer(fields) if family == GEMMA4 else _qwen3_layer(fields)


def fields_of_layer(layer: LayerSpec, num_layers: int, target: Fields) -> dict[str, Any]:
    """The inverse of `layer_of`. `target`: its config's fields, for what a Gemma drafter's file repeats of them."""
    shared = {
        "attention_bias": False,
        "hidden_size": layer.d_model,
        "intermediate_size": layer.ffw,
        "layer_types": [GLOBAL] * num_layers,
        "num_attention_heads": layer.heads,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": layer.norm_eps,
    }
    if family_of(layer) == QWEN3:
        return shared | {
            "head_dim": layer.head_dim,
            "hidden_act": "silu",
            "model_type": "qwen3",
            "num_key_value_heads": layer.kv_heads,
            "rope_parameters": rope_fields(layer.rope),
            "sliding_window": None,
            "use_sliding_window": False,
        }
    # Sizes of sliding layers: the target's, which no layer of the drafter has.
    sliding = target.get("rope_parameters") or {"sliding_attention": rope_fields(RopeSpec())}
    return shared | {
        "attention_k_eq_v": layer.k_is_v,
        "global_head_dim": layer.head_dim,
        "head_dim": target.get("head_dim", layer.head_dim),
        "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma4_text",
        "num_global_key_value_heads": layer.kv_heads if layer.k_is_v else target.get("num_global_key_value_heads"),
        "num_key_value_heads": target.get("num_key_value_heads", layer.kv_heads) if layer.k_is_v else layer.kv_heads,
        "rope_parameters": {**sliding, GLOBAL: rope_fields(layer.rope)},
    }


def rope_fields(rope: RopeSpec) -> dict[str, Any]:
    """One set of `rope_parameters`."""
    theta = {"rope_theta": rope.theta}
    if rope.proportion != 1:
        factor = {"factor": rope.scaling.factor} if isinstance(rope.scaling, LinearScaling) else {}
        return {**theta, "rope_type": "proportional", "partial_rotary_factor": rope.proportion, **factor}
    match rope.scaling:
        case None:
            return {**theta, "rope_type": "default"}
        case LinearScaling(factor=factor):
            return {**theta, "rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {
                **theta,
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_len,
            }
        case YarnScaling() as scaling:
            return {
                **theta,
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_len,
                "attention_factor": scaling.attention_factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            }


def _qwen3_layer(fields: Fields) -> LayerSpec:
    require(fields, "hidden_act", "silu", default="silu")
    require(fields, "attention_bias", False, None, default=False)
    require(fields, "use_sliding_window", False, None, default=False)
    if fields.get("use_sliding_window") is None:
        require(fields, "sliding_window", None, default=None)
    heads = fields["num_attention_heads"]
    return LayerSpec(
        d_model=fields["hidden_size"],
        ffw=fields["intermediate_size"],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        rope=rope_spec(fields),
        norm_eps=fields["rms_norm_eps"],
        qk_norm=True,
    )


def _gemma4_layer(fields: Fields) -> LayerSpec:
    require_dense(fields)
    # Whatever a target's per-layer sizes say is said about other layers than the drafter's.
    own = {field: value for field, value in fields.items() if field != "per_layer_config"}
    return gemma4_layer(own | {"layer_types": [GLOBAL]}, 0)
