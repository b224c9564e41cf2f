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
    q_BTJGC = q_BTHC.reshape(batch, queries, kv_heads, heads // kv_heads, channels)
    scores = jnp.einsum("btjgc,bjsc->bjgts", q_BTJGC, k_BJSC, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BJSC.dtype)
    out = jnp.einsum("bjgts,bjsc->btjgc", weights, v_BJSC)
    return out.reshape(q_BTHC.shape).astype(q_BTHC.dtype)
