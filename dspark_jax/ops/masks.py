"""Attention masks: True where a query may look."""

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Bool, Int


def causal_mask(start_B: Int[Array, "B"], queries: int, keys: int, window: int | None = None) -> Bool[Array, "B T S"]:
    """Query t of row b sits at position start_B[b] + t and sees cached positions up to its own.

    With a sliding window it sees the last `window` of them, its own included.
    """
    query_BT1 = (start_B[:, None] + jnp.arange(queries))[..., None]
    seen = jnp.arange(keys) <= query_BT1
    return seen if window is None else seen & (jnp.arange(keys) > query_BT1 - window)


def cached_block_mask(
    start_B: Int[Array, "B"], block: int, keys: int, window: int | None = None
) -> Bool[Array, "B {block} {keys}"]:
    """A draft block at start_B..start_B+block-1 sees the context before it and, both ways, itself.

    With a window a slot sees context no further back than a causal query at its position would.
    """
    visible_B1S = jnp.arange(keys) < (start_B + block)[:, None, None]
    visible_BKS = jnp.broadcast_to(visible_B1S, (start_B.shape[0], block, keys))
    if window is None:
        return visible_BKS
    # The block itself is never cut, however short the window.
    last_cut_BK1 = jnp.minimum(start_B[:, None] + jnp.arange(block) - window, start_B[:, None] - 1)[..., None]
    return visible_BKS & (jnp.arange(keys) > last_cut_BK1)


def training_block_mask(
    anchors_BA: Int[Array, "B A"], block: int, context: int, window: int | None = None
) -> Bool[Array, "B A*{block} {context}+A*{block}"]:
    """All blocks of a sequence at once: keys are the context, then the blocks themselves in order.

    A block sees context positions before its anchor and its own slots, nothing of any other block. With a window a
    slot sees context no further back than a causal query at its position would.
    """
    batch, num_anchors = anchors_BA.shape
    owner_Q = jnp.repeat(jnp.arange(num_anchors), block)
    anchor_BQ = jnp.repeat(anchors_BA, block, axis=1)
    to_context = jnp.arange(context) < anchor_BQ[..., None]
    if window is not None:
        positions_BQ = (anchors_BA[..., None] + jnp.arange(block)).reshape(batch, -1)
        to_context &= jnp.arange(context) > positions_BQ[..., None] - window
    to_blocks = jnp.broadcast_to(owner_Q[:, None] == owner_Q, (batch, *2 * (num_anchors * block,)))
    return jnp.concatenate([to_context, to_blocks], axis=-1)
