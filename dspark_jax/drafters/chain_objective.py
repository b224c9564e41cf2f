"""The training objective of chain drafters: Eagle3's training-time test, its vocabulary loss one step at a time."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, Bool, Float, Int
from dspark_jax.drafters.chain import ChainDrafter, ahead
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.ops.losses import ChainTerms, chain_terms


def chain_objective(
    drafter: ChainDrafter,
    vocabulary: Vocabulary,
    *,
    tokens_BT: Int[Array, "B T"],
    loss_mask_BT: Bool[Array, "B T"],
    starts_BT: Int[Array, "B T"],
    features_BTE: Float[Array, "B T E"],
    hidden_BTD: Float[Array, "B T D"],
    chunk: int = 512,
) -> ChainTerms:
    """Terms of every step over every position; `hidden_BTD` are the target's normed hidden states.

    Step k at position i predicts token i + k + 2 and is compared with the target's law at position i + k + 1; it counts
    where tokens i + k and i + k + 1 are supervised and of i's document, which begins at starts_BT. Logits exist for
    `chunk` positions of every row at a time and are recomputed in the backward pass.
    """
    steps, (batch, length) = drafter.block_size, tokens_BT.shape
    outputs_ZBTD = drafter.unrolled(vocabulary, tokens_BT, features_BTE, starts_BT, steps)
    aligned_ZBTD = jnp.stack([ahead(hidden_BTD, step + 1) for step in range(steps)])
    base_BT, index_T = loss_mask_BT & ahead(loss_mask_BT, 1), jnp.arange(length)
    mask_ZBT = jnp.stack([ahead(base_BT, step) & (ahead(starts_BT, step + 1) <= index_T) for step in range(steps)])

    @jax.checkpoint
    def terms_of(output: Array, aligned: Array, mask: Array) -> ChainTerms:
        return chain_terms(vocabulary.logits(output), vocabulary.logits(aligned), mask)

    chunk = min(chunk, length)
    padding = -length % chunk

    def chunked(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, padding), *[(0, 0)] * (x.ndim - 3)])
        return x.reshape(steps, batch, -1, chunk, *x.shape[3:]).swapaxes(1, 2)

    def over_chunks(parts: tuple[Array, Array, Array]) -> ChainTerms:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), lax.map(lambda part: terms_of(*part), parts))

    terms = lax.map(over_chunks, tuple(map(chunked, (outputs_ZBTD, aligned_ZBTD, mask_ZBT))))
    everywhere = jnp.full(steps, batch * length, jnp.float32)
    return replace(terms, ce_K=replace(terms.ce_K, count=everywhere))


def chain_loss(terms: ChainTerms, decay: float) -> Float[Array, ""]:
    """Sum of the steps' losses, step k weighing decay ** k."""
    steps = terms.ce_K.sum.shape[0]
    return jnp.sum(terms.ce_K.value * decay ** jnp.arange(steps))
