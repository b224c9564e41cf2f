"""Fields that the families' config.json files share."""

import math
from collections.abc import Mapping
from typing import Any

from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

Config = Mapping[str, Any]

_ROPE_TYPES = "default, linear, llama3, yarn, proportional"


def require(config: Config, field: str, *supported: Any, default: Any) -> None:
    """ValueError when a field says something else than what is built."""
    value = config.get(field, default)
    if value not in supported:
        names = ", ".join(map(repr, supported))
        raise ValueError(f"config.json: {field} {value!r} is not supported; supported: {names}")


def rope_spec(config: Config) -> RopeSpec:
    """Rotary frequencies from either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    fields = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    fields.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    fields.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    return rope_of(fields, max_len=config.get("max_position_embeddings"))


def rope_of(fields: Config, *, max_len: int | None) -> RopeSpec:
    """One set of rope fields; `max_len` stands in for a YaRN factor that is left out."""
    theta = float(fields["rope_theta"])
    kind = fields.get("rope_type", fields.get("type")) or "default"
    proportion = fields.get("partial_rotary_factor") or 1.0
    if proportion != 1 and kind != "proportional":
        raise ValueError(
            f"config.json: partial_rotary_factor {proportion} with rope_type {kind!r} is not supported; "
            "supported with rope_type 'proportional'"
        )
    match kind:
        case "default":
            return RopeSpec(theta=theta)
        case "linear":
            return RopeSpec(theta=theta, scaling=LinearScaling(factor=fields["factor"]))
        case "proportional":
            factor = fields.get("factor") or 1.0
            scaling = None if factor == 1 else LinearScaling(factor=factor)
            return RopeSpec(theta=theta, scaling=scaling, proportion=proportion)
        case "llama3":
            return RopeSpec(
                theta=theta,
                scaling=Llama3Scaling(
                    factor=fields["factor"],
                    low_freq_factor=fields["low_freq_factor"],
                    high_freq_factor=fields["high_freq_factor"],
                    original_max_len=fields["original_max_position_embeddings"],
                ),
            )
        case "yarn":
            return RopeSpec(theta=theta, scaling=_yarn(fields, max_len))
    raise ValueError(f"config.json: rope_type {kind!r} is not supported; supported: {_ROPE_TYPES}")


def _yarn(fields: Config, max_len: int | None) -> YarnScaling:
    original = fields.get("original_max_position_embeddings") or max_len
    factor = fields.get("factor")
    if original is None or (not factor and max_len is None):
        raise ValueError("config.json: rope_type 'yarn' needs max_position_embeddings")
    factor = factor or (max_len or original) / original
    return YarnScaling(
        factor=factor,
        original_max_len=original,
        attention_factor=_yarn_attention_factor(fields, factor),
        beta_fast=fields.get("beta_fast") or 32.0,
        beta_slow=fields.get("beta_slow") or 1.0,
        truncate=fields.get("truncate", True),
    )


def _yarn_attention_factor(fields: Config, factor: float) -> float:
    if (given := fields.get("attention_factor")) is not None:
        return given

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = fields.get("mscale"), fields.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
