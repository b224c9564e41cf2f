"""Exact attention of whole sequences in bounded memory: queries in chunks, what each sees as a span of keys.

A mask row is made from its span when its chunk is due, and scores are made anew in the backward pass, so that neither
exists for all queries at once. The slow twins are `attention` with the masks of `ops.masks`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.ops.attention import attention
from dspark_jax.ops.masks import between

SCORES = 2**20
"""Scores of one row and head that a chunk makes at most."""


def span_attention(
    q_BTHC: Float[Array, "B T H C"],
    k_BJSC: Float[Array, "B J S C"],
    v_BJSC: Float[Array, "B J S C"],
    first_BT: Int[Array, "B T"],
    last_BT: Int[Array, "B T"],
    *,
    scale: float,
    scores: int = SCORES,
) -> Float[Array, "B T H C"]:
    """Each query sees the keys first .. last."""
    keys = k_BJSC.shape[2]

    @jax.checkpoint
    def one(chunk: tuple[Array, Array, Array]) -> Array:
        q, first, last = chunk
        return attention(q, k_BJSC, v_BJSC, between(first, last, keys), scale=scale)

    return _in_chunks(one, (q_BTHC, first_BT, last_BT), max(1, scores // keys))


def block_attention(
    q_BAKHC: Float[Array, "B A K H C"],
    context_k_BJSC: Float[Array, "B J S C"],
    context_v_BJSC: Float[Array, "B J S C"],
    own_k_BJALC: Float[Array, "B J A L C"],
    own_v_BJALC: Float[Array, "B J A L C"],
    first_BAK: Int[Array, "B A K"],
    last_BAK: Int[Array, "B A K"],
    *,
    scale: float,
    scores: int = SCORES,
) -> Float[Array, "B A K H C"]:
    """Slots of A blocks see the context from first to last, and all L keys of their own block.

    A block's scores to its own keys are a product apart, merged with those to the context under one softmax:
    A K (S + L) scores instead of A K (S + A L).
    """
    keys, slots = context_k_BJSC.shape[2], q_BAKHC.shape[2]

    @jax.checkpoint
    def one(chunk: tuple[Array, ...]) -> Array:
        q, block_k, block_v, first, last = chunk
        batch, blocks, slots, _, channels = q.shape
        grouped = q.reshape(batch, blocks, slots, context_k_BJSC.shape[1], -1, channels)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        to_context = product("bakjgc,bjsc->bjgaks", grouped, context_k_BJSC) * scale
        seen = between(first.reshape(batch, -1), last.reshape(batch, -1), keys).reshape(batch, blocks, slots, keys)
        to_context = jnp.where(seen[:, None, None], to_context, jnp.finfo(jnp.float32).min)
        to_block = product("bakjgc,bajlc->bjgakl", grouped, block_k) * scale
        # One softmax over both, without laying them side by side.
        highest = jnp.maximum(jnp.max(to_context, axis=-1), jnp.max(to_block, axis=-1))
        highest = lax.stop_gradient(highest)[..., None]
        of_context, of_block = jnp.exp(to_context - highest), jnp.exp(to_block - highest)
        total = jnp.sum(of_context, axis=-1, keepdims=True) + jnp.sum(of_block, axis=-1, keepdims=True)
        of_context, of_block = ((part / total).astype(context_v_BJSC.dtype) for part in (of_context, of_block))
        mixed = jnp.einsum("bjgaks,bjsc->bakjgc", of_context, context_v_BJSC)
        mixed = mixed + jnp.einsum("bjgakl,bajlc->bakjgc", of_block, block_v)
        return mixed.reshape(q.shape).astype(q.dtype)

    by_block = (jnp.moveaxis(x, 1, 2) for x in (own_k_BJALC, own_v_BJALC))
    return _in_chunks(one, (q_BAKHC, *by_block, first_BAK, last_BAK), max(1, scores // (slots * keys)))


def _in_chunks(one, inputs: tuple[Array, ...], chunk: int) -> Array:
    """`one` over at most `chunk` entries of axis 1 at a time."""
    length = inputs[0].shape[1]
    if chunk >= length:
        return one(inputs)
    # Chunks of one size: the last is filled up with zeros, whose queries see the first key at most.
    count = -(-length // chunk)
    chunk = -(-length // count)

    def chunked(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(x.shape[0], count, chunk, *x.shape[2:]).swapaxes(0, 1)

    out = lax.map(one, tuple(map(chunked, inputs))).swapaxes(0, 1)
    return out.reshape(out.shape[0], count * chunk, *out.shape[3:])[:, :length]
