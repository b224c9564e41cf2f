"""The training objective of block drafters: labels, alignment with the target, and the chunked vocabulary loss."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, Bool, Float, Int
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.nn.layers import Vocabulary
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
    chunk: int = 8,
) -> BlockTerms:
    """Loss terms over the blocks at the given anchors.

    `hidden_BTD` are the target's normed hidden states: slot k is compared with its law at position anchor+k. Logits
    exist for `chunk` anchors of every row at a time and are recomputed in the backward pass.
    """
    block = drafter.block_size
    starts_BT = jnp.zeros_like(tokens_BT) if starts_BT is None else starts_BT
    tokens_BAN, mask_BAK = block_labels(tokens_BT, loss_mask_BT, anchors_BA, keep_BA, starts_BT, block)
    hidden_BAKD = drafter.training_blocks(vocabulary, tokens_BT, features_BTE, anchors_BA, starts_BT)
    positions = jnp.minimum(anchors_BA[..., None] + jnp.arange(block), tokens_BT.shape[1] - 1)
    batch, num_anchors = anchors_BA.shape
    aligned_BAKD = jnp.take_along_axis(hidden_BTD, positions.reshape(batch, -1, 1), axis=1).reshape(
        batch, num_anchors, block, -1
    )

    @jax.checkpoint
    def terms_of(hidden: Array, aligned: Array, tokens: Array, mask: Array) -> BlockTerms:
        draft_logits, confidence_logits = drafter.head_logits(vocabulary, hidden, tokens[..., :-1])
        target_logits = vocabulary.logits(aligned)
        return block_terms(draft_logits, target_logits, tokens[..., 1:], mask, confidence_logits, decay=weights.decay)

    def add(total: BlockTerms, part: tuple[Array, Array, Array, Array]) -> tuple[BlockTerms, None]:
        return jax.tree.map(jnp.add, total, terms_of(*part)), None

    chunk = min(chunk, num_anchors)
    padding = -num_anchors % chunk

    def chunked(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    parts = (chunked(hidden_BAKD), chunked(aligned_BAKD), chunked(tokens_BAN), chunked(mask_BAK))
    shapes = jax.eval_shape(terms_of, *(part[0] for part in parts))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return lax.scan(add, zero, parts)[0]
