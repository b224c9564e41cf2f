"""Attention masks: True where a query may look."""

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Bool, Int


def causal_mask(start_B: Int[Array, "B"], queries: int, keys: int) -> Bool[Array, "B T S"]:
    """Query t of row b sits at position start_B[b] + t and sees cached positions up to its own."""
    query_BT1 = (start_B[:, None] + jnp.arange(queries))[..., None]
    return jnp.arange(keys) <= query_BT1


def cached_block_mask(start_B: Int[Array, "B"], block: int, keys: int) -> Bool[Array, "B T S"]:
    """A draft block at start_B..start_B+block-1 sees the context before it and, both ways, itself."""
    visible_B1S = jnp.arange(keys) < (start_B + block)[:, None, None]
    return jnp.broadcast_to(visible_B1S, (start_B.shape[0], block, keys))


def training_block_mask(
    anchors_BA: Int[Array, "B A"], block: int, context: int
) -> Bool[Array, "B A*{block} {context}+A*{block}"]:
    """All blocks of a sequence at once: keys are the context, then the blocks themselves in order.

    A block sees context positions before its anchor and its own slots, nothing of any other block.
    """
    batch, num_anchors = anchors_BA.shape
    owner_Q = jnp.repeat(jnp.arange(num_anchors), block)
    anchor_BQ = jnp.repeat(anchors_BA, block, axis=1)
    to_context = jnp.arange(context) < anchor_BQ[..., None]
    to_blocks = jnp.broadcast_to(owner_Q[:, None] == owner_Q, (batch, *2 * (num_anchors * block,)))
    return jnp.concatenate([to_context, to_blocks], axis=-1)
