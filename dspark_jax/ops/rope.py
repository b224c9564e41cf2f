"""Rotary position embedding in the half-split layout: channel c turns with channel c + C/2."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dspark_jax.core.arrays import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): fast channels kept, slow ones divided by `factor`, a ramp between; and the cosines
    and sines scaled by `attention_factor`. Betas are rotations over the original length."""

    factor: float
    original_max_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary frequencies of one kind of layer. `proportion`: the share of channel pairs that turn at all, the fast
    ones, at the frequencies the whole head would give them (Gemma 4's "proportional" rotary)."""

    theta: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    proportion: float = 1.0


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> np.ndarray:
    """Radians per position of each channel pair, [C/2] float32 (never narrower: positions reach 1e5)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = spec.theta**-exponents
    match spec.scaling:
        case None:
            pass
        case LinearScaling(factor=factor):
            frequencies = frequencies / factor
        case Llama3Scaling() as scaling:
            frequencies = _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            frequencies = _yarn(frequencies, scaling, spec.theta, head_dim)
    turning = int(spec.proportion * head_dim // 2)
    frequencies[turning:] = 0.0
    return frequencies.astype(np.float32)


def rotate(x_BTHC: Float[Array, "B T H C"], positions_BT: Int[Array, "B T"], spec: RopeSpec) -> Float[Array, "B T H C"]:
    """Turn each channel pair of `x` by its position's angle; computed in float32, returned in x's dtype."""
    angles_BT1C = positions_BT[..., None, None].astype(jnp.float32) * inverse_frequencies(spec, x_BTHC.shape[-1])
    amplitude = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0
    cos, sin = jnp.cos(angles_BT1C) * amplitude, jnp.sin(angles_BT1C) * amplitude
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHC.dtype)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_len / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(frequencies: np.ndarray, scaling: YarnScaling, theta: float, head_dim: int) -> np.ndarray:
    def pair_of(rotations: float) -> float:
        return head_dim * math.log(scaling.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    slow = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return frequencies * ((1 - slow) + slow / scaling.factor)
