"""Attention of a draft block over a cache it is not written to, in plain code: the twins of the kernel."""

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.ops.attention import attention


def block_attention(
    q_BKHC: Float[Array, "B K H C"],
    k_BJSC: Float[Array, "B J S C"],
    v_BJSC: Float[Array, "B J S C"],
    own_k_BJKC: Float[Array, "B J K C"],
    own_v_BJKC: Float[Array, "B J K C"],
    start_B: Int[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B K H C"]:
    """A block at start_B.. sees cached positions before start_B and, both ways, its own keys and values.

    With a window a slot sees context no further back than a causal query at its position would.
    """
    (batch, slots), span = q_BKHC.shape[:2], k_BJSC.shape[2]
    cached = jnp.arange(span)
    context_BKS = jnp.broadcast_to(cached < start_B[:, None, None], (batch, slots, span))
    if window is not None:
        context_BKS &= cached > (start_B[:, None] + jnp.arange(slots) - window)[..., None]
    mask = jnp.concatenate([context_BKS, jnp.ones((batch, slots, slots), bool)], axis=-1)
    keys = jnp.concatenate([k_BJSC, own_k_BJKC.astype(k_BJSC.dtype)], axis=2)
    values = jnp.concatenate([v_BJSC, own_v_BJKC.astype(v_BJSC.dtype)], axis=2)
    return attention(q_BKHC, keys, values, mask, scale=scale, soft_cap=soft_cap)


def paged_block_attention(
    q_BKHC: Float[Array, "B K H C"],
    k_PJSC: Float[Array, "P J S C"],
    v_PJSC: Float[Array, "P J S C"],
    own_k_BJKC: Float[Array, "B J K C"],
    own_v_BJKC: Float[Array, "B J K C"],
    pages_BI: Int[Array, "B I"],
    start_B: Int[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B K H C"]:
    """`block_attention` where position s of row b is in page pages_BI[b, s // S], S positions a page."""
    keys, values = gather_pages(k_PJSC, pages_BI), gather_pages(v_PJSC, pages_BI)
    return block_attention(
        q_BKHC, keys, values, own_k_BJKC, own_v_BJKC, start_B, scale=scale, window=window, soft_cap=soft_cap
    )


def gather_pages(pages_PJSC: Float[Array, "P J S C"], pages_BI: Int[Array, "B I"]) -> Float[Array, "B J Z C"]:
    """The rows' pages one after the other, Z = I * S positions."""
    gathered_BJISC = pages_PJSC[pages_BI].swapaxes(1, 2)
    return gathered_BJISC.reshape(*gathered_BJISC.shape[:2], -1, gathered_BJISC.shape[-1])
