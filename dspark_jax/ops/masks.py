"""Attention masks: True where a query may look."""

import jax
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


def document_starts(segments_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Where each token's document begins in its row; documents are runs of one number."""
    index = jnp.arange(segments_BT.shape[1])
    first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1] - 1) != 0
    return jax.lax.cummax(jnp.where(first_BT, index, 0), axis=1)


def between(first_BT: Int[Array, "B T"], last_BT: Int[Array, "B T"], keys: int) -> Bool[Array, "B T {keys}"]:
    """A query sees the keys first .. last, none when last lies before first."""
    key_S = jnp.arange(keys)
    return (key_S >= first_BT[..., None]) & (key_S <= last_BT[..., None])


def first_seen(start: Int[Array, "*B"], query: Int[Array, "*B"], window: int | None = None) -> Int[Array, "*B"]:
    """The first key that a query sees: its document's first, or the first of the `window` that end with its own."""
    return start if window is None else jnp.maximum(start, query - window + 1)


def training_block_mask(
    anchors_BA: Int[Array, "B A"],
    starts_BA: Int[Array, "B A"],
    block: int,
    context: int,
    window: int | None = None,
) -> Bool[Array, "B A*{block} {context}+A*{block}"]:
    """All blocks of a row at once: keys are the context, then the blocks themselves in order.

    A block sees the context from the start of its document to before its anchor and its own slots, nothing of any
    other block. With a window a slot sees context no further back than a causal query at its position would.
    """
    batch, num_anchors = anchors_BA.shape
    owner_Q = jnp.repeat(jnp.arange(num_anchors), block)
    query_BQ = (anchors_BA[..., None] + jnp.arange(block)).reshape(batch, -1)
    first_BQ = first_seen(jnp.repeat(starts_BA, block, axis=1), query_BQ, window)
    to_context = between(first_BQ, jnp.repeat(anchors_BA - 1, block, axis=1), context)
    to_blocks = jnp.broadcast_to(owner_Q[:, None] == owner_Q, (batch, *2 * (num_anchors * block,)))
    return jnp.concatenate([to_context, to_blocks], axis=-1)
