"""Optimisers of the fp32 masters, AdamW unless another is named, under one learning-rate schedule."""

import inspect
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jaxtyping import Array, Float

from dspark_jax.training.overrides import nearest


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The released DSpark recipe (arXiv 2607.05147): linear warm-up, cosine to `final`, clipped AdamW.

    name: of optax's optimisers; beta1, beta2 and weight_decay go to those that have them. Of `muon` they are those of
    the AdamW that takes vectors, embeddings and heads; weight_decay is of both.
    warmup is a fraction of all steps; final a fraction of learning_rate; clip a global gradient norm.
    """

    name: str = "adamw"
    learning_rate: float = 6e-4
    warmup: float = 0.04
    final: float = 0.0
    clip: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self):
        if self.name not in optimizers():
            raise ValueError(
                f"there is no optimizer.name {self.name}; the nearest are {nearest(self.name, optimizers())}"
            )
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
    """Clip by global norm, then the optimiser; only matrices decay (norm scales and biases do not)."""
    return optax.chain(optax.clip_by_global_norm(config.clip), _named(config, warmup_cosine(config, steps)))


@cache
def optimizers() -> frozenset[str]:
    """Names that a config may give: all of optax that need nothing but a learning-rate schedule, and muon."""
    found = {"muon"}
    for name, make in vars(optax).items():
        if name.startswith("scale_by") or name in _OTHERWISE or not inspect.isfunction(make):
            continue
        asked = list(inspect.signature(make).parameters.values())
        alone = all(parameter.default is not parameter.empty for parameter in asked[1:])
        if asked and asked[0].name == "learning_rate" and "Callable" in str(asked[0].annotation) and alone:
            found.add(name)
    return frozenset(found)


# The first asks for the loss itself, the second for a rate that is a number, the third adds noise to the gradient.
_OTHERWISE = {"lbfgs", "fromage", "noisy_sgd"}


def _named(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    if config.name == "muon":
        return optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            weight_decay_mask=_matrices,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=_products,
        )
    make = getattr(optax, config.name)
    offered = {
        "b1": config.beta1,
        "b2": config.beta2,
        "weight_decay": config.weight_decay,
        "mask": _matrices,
        "weight_decay_mask": _matrices,
    }
    taken = inspect.signature(make).parameters
    return make(rate, **{name: value for name, value in offered.items() if name in taken})


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _products(params: Any) -> Any:
    """How muon reads each kernel as a matrix; None for what it leaves to AdamW: vectors, single rows and everything as
    long as the vocabulary."""

    def one(param: nnx.Variable) -> nnx.Variable:
        if isinstance(param.get_value(), optax.MaskedNode):
            return param
        axes = param.get_metadata()["axes"]
        into = 2 if axes[:1] == ("heads",) else 1
        numbers = optax.contrib.MuonDimensionNumbers(
            reduction_axis=tuple(range(into)),
            # The two halves of a fused kernel are matrices of their own.
            output_axis=tuple(axis for axis in range(into, len(axes)) if axes[axis] != "pair"),
        )
        small = len(axes) < 2 or (min(param.shape) == 1 and len(axes) == 2)
        return param.replace(None if small or "vocab" in axes else numbers)

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
