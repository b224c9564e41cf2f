"""Attention in parts: what queries mix of some of the keys, and the mass that those keys have for them.

Keys that lie in several places, or are cut so that a device works on the pieces side by side, still have one softmax:
parts are weighed by their masses.
"""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Float, Int

Part = tuple[Array, Array]
"""What is mixed [B, H, T, C], and the logarithm of the summed exponentials of its scores [B, H, T]."""


def attention_part(
    q_BHTC: Float[Array, "B H T C"],
    k_BJSC: Float[Array, "B J S C"],
    v_BJSC: Float[Array, "B J S C"],
    count_B: Int[Array, "B"] | None = None,
    *,
    scale: float,
    causal: bool = False,
) -> Part:
    """Queries see the first count_B[b] keys of their row; all without `count_B`, and up to their own when `causal`.

    A row that sees none mixes finite numbers, of mass -inf.
    """
    (batch, heads, queries, channels), (kv_heads, keys) = q_BHTC.shape, k_BJSC.shape[1:3]
    q_BJGTC = q_BHTC.reshape(batch, kv_heads, heads // kv_heads, queries, channels)
    scores = jnp.einsum("bjgtc,bjsc->bjgts", q_BJGTC, k_BJSC, preferred_element_type=jnp.float32) * scale
    last_BT = jnp.broadcast_to(jnp.arange(queries) if causal else keys, (batch, queries))
    if count_B is not None:
        last_BT = jnp.minimum(last_BT, count_B[:, None] - 1)
    seen_BTS = jnp.arange(keys) <= last_BT[..., None]
    scores = jnp.where(seen_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BJSC.dtype)
    mixed = jnp.einsum("bjgts,bjsc->bjgtc", weights, v_BJSC).reshape(q_BHTC.shape)
    mass_BHT = jax.nn.logsumexp(scores, axis=-1).reshape(q_BHTC.shape[:3])
    return mixed.astype(q_BHTC.dtype), jnp.where(last_BT[:, None] >= 0, mass_BHT, -jnp.inf)


def own_part(
    q_BHTC: Float[Array, "B H T C"], k_BJTC: Float[Array, "B J T C"], v_BJTC: Float[Array, "B J T C"], *, scale: float
) -> Part:
    """`attention_part` of a few new tokens over themselves, each up to its own, as sums instead of matrix products: for
    a handful of keys those are kernels that do next to nothing.
    """
    (batch, _, tokens, channels), kv_heads = q_BHTC.shape, k_BJTC.shape[1]
    q_BJGTC, k_BJTC, v_BJTC = (
        x.astype(jnp.float32) for x in (q_BHTC.reshape(batch, kv_heads, -1, tokens, channels), k_BJTC, v_BJTC)
    )
    scores_BJGTU = jnp.sum(q_BJGTC[..., None, :] * k_BJTC[:, :, None, None], axis=-1) * scale
    seen_TU = jnp.arange(tokens) <= jnp.arange(tokens)[:, None]
    scores_BJGTU = jnp.where(seen_TU, scores_BJGTU, jnp.finfo(jnp.float32).min)
    top_BJGT1 = jnp.max(scores_BJGTU, axis=-1, keepdims=True)
    weights_BJGTU = jnp.exp(scores_BJGTU - top_BJGT1)
    total_BJGT1 = jnp.sum(weights_BJGTU, axis=-1, keepdims=True)
    mixed = jnp.sum(weights_BJGTU[..., None] * v_BJTC[:, :, None, None], axis=-2) / total_BJGT1
    mass = top_BJGT1 + jnp.log(total_BJGT1)
    return mixed.reshape(q_BHTC.shape).astype(q_BHTC.dtype), mass.reshape(q_BHTC.shape[:3])


def merged(parts: Sequence[Part]) -> Float[Array, "B H T C"]:
    """What queries mix of the keys of all parts, of which every query sees one at least."""
    if len(parts) == 1:
        return parts[0][0]
    top_BHT = reduce(jnp.maximum, (mass for _, mass in parts))
    weights = [jnp.exp(mass - top_BHT)[..., None] for _, mass in parts]
    weighed = (weight * mixed.astype(jnp.float32) for weight, (mixed, _) in zip(weights, parts, strict=True))
    return (reduce(jnp.add, weighed) / reduce(jnp.add, weights)).astype(parts[0][0].dtype)
