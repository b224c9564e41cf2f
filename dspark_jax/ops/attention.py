"""Grouped-query attention over keys and values laid out heads first, as the caches store them."""

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Bool, Float


def attention(
    q_BTHC: Float[Array, "B T H C"],
    k_BJSC: Float[Array, "B J S C"],
    v_BJSC: Float[Array, "B J S C"],
    mask_BTS: Bool[Array, "B T S"],
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "B T H C"]:
    """Softmax attention; scores and softmax in float32. A query that may look nowhere gets finite numbers.

    `soft_cap` c bounds scores to c tanh(score / c).
    """
    batch, queries, heads, channels = q_BTHC.shape
    kv_heads = k_BJSC.shape[1]
    groups = heads // kv_heads
    # Queries that share keys are rows of one product, so that scores of a query lie together for the softmax.
    q_BJQC = jnp.moveaxis(q_BTHC.reshape(batch, queries, kv_heads, groups, channels), 2, 1)
    q_BJQC = q_BJQC.reshape(batch, kv_heads, queries * groups, channels)
    scores = jnp.einsum("bjqc,bjsc->bjqs", q_BJQC, k_BJSC, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask_BQS = jnp.repeat(mask_BTS, groups, axis=1)
    scores = jnp.where(mask_BQS[:, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BJSC.dtype)
    out_BJQC = jnp.einsum("bjqs,bjsc->bjqc", weights, v_BJSC)
    out = jnp.moveaxis(out_BJQC.reshape(batch, kv_heads, queries, groups, channels), 1, 2)
    return out.reshape(q_BTHC.shape).astype(q_BTHC.dtype)
