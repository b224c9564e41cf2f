"""The training objective of block drafters: labels, and alignment with the target."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Bool, Float, Int
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.vocabulary_loss import Positions, Trained, compare_laws
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.nn.training_attention import TrainingAttention
from dspark_jax.ops.losses import BlockTerms, block_terms


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the three terms and the decay of later slots, in slots."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "confidence"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"drafter.loss.{name} is a weight of at least 0, not {getattr(self, name)}")
        if self.ce == self.l1 == 0.0:
            raise ValueError("drafter.loss.ce and drafter.loss.l1 are both 0: the drafter would learn nothing")
        if not self.decay > 0.0:
            raise ValueError(f"drafter.loss.decay must be above 0, not {self.decay}")


def total_loss(terms: BlockTerms, weights: LossWeights) -> Float[Array, ""]:
    """The weighted loss; each term is divided by its own weight sum."""
    return weights.ce * terms.ce.value + weights.l1 * terms.l1.value + weights.confidence * terms.confidence.value


def block_labels(
    tokens_BT: Int[Array, "B T"],
    loss_mask_BT: Bool[Array, "B T"],
    anchors_BA: Int[Array, "B A"],
    keep_BA: Bool[Array, "B A"],
    starts_BT: Int[Array, "B T"],
    block: int,
) -> tuple[Int[Array, "B A N"], Bool[Array, "B A K"]]:
    """Tokens at anchor..anchor+K of every block, and which of the K labels (anchor+1 on) are supervised.

    A block is supervised as a contiguous prefix: nothing after the first unsupervised label or the end of the
    anchor's document. `starts_BT`: where each token's document begins.
    """
    length = tokens_BT.shape[1]
    positions_BAN = anchors_BA[..., None] + jnp.arange(block + 1)
    inside = jnp.minimum(positions_BAN, length - 1).reshape(tokens_BT.shape[0], -1)
    tokens_BAN = jnp.take_along_axis(tokens_BT, inside, axis=1).reshape(positions_BAN.shape)
    supervised = jnp.take_along_axis(loss_mask_BT, inside, axis=1).reshape(positions_BAN.shape)
    starts_BAN = jnp.take_along_axis(starts_BT, inside, axis=1).reshape(positions_BAN.shape)
    valid = supervised & (positions_BAN < length) & (starts_BAN <= anchors_BA[..., None])
    mask_BAK = jnp.cumprod(valid[..., 1:], axis=-1).astype(bool) & keep_BA[..., None]
    return tokens_BAN, mask_BAK


def block_objective(
    drafter: DSpark,
    vocabulary: Vocabulary,
    *,
    tokens_BT: Int[Array, "B T"],
    loss_mask_BT: Bool[Array, "B T"],
    features_BTE: Float[Array, "B T E"],
    hidden_BTD: Float[Array, "B T D"],
    anchors_BA: Int[Array, "B A"],
    keep_BA: Bool[Array, "B A"],
    weights: LossWeights,
    starts_BT: Int[Array, "B T"] | None = None,
    remat: bool = False,
    attention: TrainingAttention | None = None,
    chunk: int = 64,
) -> BlockTerms:
    """Loss terms over the blocks at the given anchors.

    `hidden_BTD` are the target's normed hidden states: slot k is compared with its law at position anchor+k. Logits
    exist for `chunk` slots of every row at a time. `remat`, `attention`: see DSpark.training_blocks.
    """
    block, (batch, num_anchors) = drafter.block_size, anchors_BA.shape
    starts_BT = jnp.zeros_like(tokens_BT) if starts_BT is None else starts_BT
    tokens_BAN, mask_BAK = block_labels(tokens_BT, loss_mask_BT, anchors_BA, keep_BA, starts_BT, block)
    hidden_BAKD = drafter.training_blocks(vocabulary, tokens_BT, features_BTE, anchors_BA, starts_BT, remat, attention)
    latent_BAKR, confidence_BAK = drafter.head_inputs(hidden_BAKD, tokens_BAN[..., :-1])
    places = jnp.minimum(anchors_BA[..., None] + jnp.arange(block), tokens_BT.shape[1] - 1).reshape(batch, -1, 1)

    def in_a_row(x: Array) -> Array:
        return x.reshape(batch, num_anchors * block, *x.shape[3:])

    positions = Positions(
        hidden_BND=in_a_row(hidden_BAKD),
        latent_BNR=None if latent_BAKR is None else in_a_row(latent_BAKR),
        aligned_BND=jnp.take_along_axis(hidden_BTD, places, axis=1),
        labels_BN=in_a_row(tokens_BAN[..., 1:]),
    )
    compared = compare_laws(vocabulary, trained_part(drafter), positions, chunk=chunk)
    compared = jax.tree.map(lambda x: x.reshape(mask_BAK.shape), compared)
    if drafter.confidence_head is None:
        confidence_BAK = jnp.full(mask_BAK.shape, jnp.inf)
    return block_terms(compared, mask_BAK, confidence_BAK, decay=weights.decay)


def trained_part(drafter: DSpark) -> Trained:
    """The parameters that turn latents into logits."""
    head, bias = drafter.markov_head, drafter.draft_bias
    return Trained(w2_VR=None if head is None else head.w2[...], draft_bias_V=None if bias is None else bias[...])
