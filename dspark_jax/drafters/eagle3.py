"""Eagle3 (arXiv 2503.01840): one layer whose attention reads [norm(embedding) ; norm(hidden)], hidden the residual."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float
from dspark_jax.drafters.base import check_sizes, check_step_decay, check_taps
from dspark_jax.drafters.chain import ChainDrafter
from dspark_jax.nn.block import Block, LayerSpec
from dspark_jax.nn.layers import RMSNorm, kernel


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An Eagle3 drafter. `block_size`: drafts a round, and steps of its training-time test.

    `layer` is a plain layer of the drafter; that its attention reads twice the width is Eagle3's own doing.
    """

    vocab_size: int
    layer: LayerSpec
    num_target_layers: int
    tapped_layers: tuple[int, ...]
    block_size: int = 7
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        check_sizes(vocab_size=self.vocab_size, block_size=self.block_size)
        check_taps(self.tapped_layers, self.num_target_layers)
        check_step_decay(self.step_decay)


class Eagle3(ChainDrafter):
    """Parameters of one drafter."""

    def __init__(self, config: Eagle3Config, *, rngs: nnx.Rngs, dtype: DType = jnp.float32):
        width, eps = config.layer.d_model, config.layer.norm_eps
        features = width * len(config.tapped_layers)
        self.config = config
        self.fc = kernel(rngs, (features, width), ("features", "model"), fan_in=features, dtype=dtype)
        self.embedding_norm = RMSNorm(width, "model", eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, "model", eps=eps, dtype=dtype)
        self.layer = Block(self.spec, rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(width, "model", eps=eps, dtype=dtype)

    @property
    def spec(self) -> LayerSpec:
        return replace(self.config.layer, in_width=2 * self.config.layer.d_model)

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        return self.config.tapped_layers

    def fuse(self, features_BTE: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        return features_BTE.astype(self.fc.dtype) @ self.fc[...]

    def inputs(
        self, embedded_BTD: Float[Array, "B T D"], hidden_BTD: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T W"]]:
        both = jnp.concatenate([self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)], axis=-1)
        return hidden_BTD, both
