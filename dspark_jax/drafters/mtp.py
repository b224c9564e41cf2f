"""MTP (DeepSeek-V3, arXiv 2412.19437, section 2.2): a block on a projection of [norm(embedding) ; norm(hidden)].

Its features are the output of the target's last layer. Trained for one step (MTP-1, the baseline that DSpark replaced
in production), it can still be used recursively for more.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float
from dspark_jax.drafters.base import check_sizes, check_step_decay
from dspark_jax.drafters.chain import ChainDrafter
from dspark_jax.nn.block import Block, LayerSpec
from dspark_jax.nn.layers import RMSNorm, kernel


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """An MTP drafter. `block_size`: drafts a round; training covers as many steps."""

    vocab_size: int
    layer: LayerSpec
    num_target_layers: int
    block_size: int = 1
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        check_sizes(vocab_size=self.vocab_size, block_size=self.block_size)
        check_step_decay(self.step_decay)

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        return (self.num_target_layers - 1,)


class Mtp(ChainDrafter):
    """Parameters of one drafter."""

    def __init__(self, config: MtpConfig, *, rngs: nnx.Rngs, dtype: DType = jnp.float32):
        width, eps = config.layer.d_model, config.layer.norm_eps
        self.config = config
        self.embedding_norm = RMSNorm(width, "model", eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(width, "model", eps=eps, dtype=dtype)
        self.projection = kernel(rngs, (2 * width, width), ("features", "model"), fan_in=2 * width, dtype=dtype)
        self.layer = Block(config.layer, rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(width, "model", eps=eps, dtype=dtype)

    @property
    def spec(self) -> LayerSpec:
        return self.config.layer

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        return self.config.tapped_layers

    def fuse(self, features_BTE: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        return features_BTE.astype(self.projection.dtype)

    def inputs(
        self, embedded_BTD: Float[Array, "B T D"], hidden_BTD: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], None]:
        both = jnp.concatenate([self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)], axis=-1)
        return both @ self.projection[...], None
