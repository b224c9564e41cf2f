"""AdamW on fp32 masters under one learning-rate schedule."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The released DSpark recipe (arXiv 2607.05147): linear warm-up, cosine to `final`, clipped AdamW.

    warmup is a fraction of all steps; final a fraction of learning_rate; clip a global gradient norm.
    """

    learning_rate: float = 6e-4
    warmup: float = 0.04
    final: float = 0.0
    clip: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self):
        for name in ("learning_rate", "clip"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} must be above 0, not {getattr(self, name)}")
        for name in ("warmup", "beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"optimizer.{name} must lie in [0, 1), not {getattr(self, name)}")
        if not 0.0 <= self.final <= 1.0:
            raise ValueError(f"optimizer.final is a fraction of the learning rate in [0, 1], not {self.final}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay must be at least 0, not {self.weight_decay}")


def warmup_cosine(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of update i = 0 .. steps-1.

    Update warmup-1 and update warmup both run at the peak: the ramp ends where the cosine starts, so
    nothing lies above the peak, and neither the first nor the last update is wasted on a rate of zero.
    """
    ramp = int(config.warmup * steps)
    fall = max(steps - ramp, 1)

    def rate(update: jax.typing.ArrayLike) -> Float[Array, ""]:
        update = jnp.asarray(update)
        rising = (update + 1) / max(ramp, 1)
        progress = jnp.clip((update - ramp) / fall, 0.0, 1.0)
        falling = config.final + (1 - config.final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return config.learning_rate * jnp.where(update < ramp, rising, falling)

    return rate


def build_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW; only matrices decay (norm scales and biases do not)."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            warmup_cosine(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )
