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
    q_BJGTC = jnp.transpose(q_BTHC.reshape(batch, queries, kv_heads, groups, channels), (0, 2, 3, 1, 4))
    q_BJQC = q_BJGTC.reshape(batch, kv_heads, groups * queries, channels)
    scores_BJQS = jnp.einsum("bjqc,bjsc->bjqs", q_BJQC, k_BJSC, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores_BJQS = soft_cap * jnp.tanh(scores_BJQS / soft_cap)
    scores = scores_BJQS.reshape(batch, kv_heads, groups, queries, -1)
    scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BJSC.dtype)
    out_BJQC = jnp.einsum("bjqs,bjsc->bjqc", weights.reshape(scores_BJQS.shape), v_BJSC)
    out = jnp.transpose(out_BJQC.reshape(q_BJGTC.shape), (0, 3, 1, 2, 4))
    return out.reshape(q_BTHC.shape).astype(q_BTHC.dtype)
