"""Attention in chunks against the dense twin: values and gradients, whatever the chunk."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.ops.attention import attention
from dspark_jax.ops.long_attention import block_attention, span_attention
from dspark_jax.ops.masks import between, document_starts, first_seen, training_block_mask

BATCH, LENGTH, HEADS, KV, CHANNELS, ANCHORS, BLOCK = 2, 9, 4, 2, 8, 5, 3
RNG = np.random.default_rng(0)
SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 3, 3, 3, 3, 3, 3]])
STARTS = document_starts(SEGMENTS)
INDEX = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
ANCHORS_BA = jnp.array([[0, 2, 3, 5, 6], [1, 1, 4, 7, 8]])


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def value_and_gradients(compute, *inputs):
    mixer = normal(*jax.eval_shape(compute, *inputs).shape)
    loss = jax.jit(jax.value_and_grad(lambda inputs: jnp.sum(compute(*inputs) * mixer)))
    RNG.bit_generator.state = STATE
    return loss(inputs)


STATE = RNG.bit_generator.state


def assert_same(ours, theirs):
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)
        assert np.abs(right).max() > 0.01


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [4, 9])
def test_spans_in_chunks_are_the_dense_attention(window, queries):
    RNG.bit_generator.state = STATE
    inputs = normal(BATCH, LENGTH, HEADS, CHANNELS), *normal(2, BATCH, KV, LENGTH, CHANNELS)
    first = first_seen(STARTS, INDEX, window)
    mask = between(first, INDEX, LENGTH)
    RNG.bit_generator.state = STATE
    ours = value_and_gradients(
        lambda q, k, v: span_attention(q, k, v, first, INDEX, scale=0.3, scores=queries * LENGTH), *inputs
    )
    assert_same(ours, value_and_gradients(lambda q, k, v: attention(q, k, v, mask, scale=0.3), *inputs))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("blocks", [2, 5])
def test_blocks_in_chunks_are_the_dense_attention(window, blocks):
    RNG.bit_generator.state = STATE
    slots = ANCHORS * BLOCK
    inputs = (
        normal(BATCH, slots, HEADS, CHANNELS),
        *normal(2, BATCH, KV, LENGTH, CHANNELS),
        *normal(2, BATCH, KV, slots, CHANNELS),
    )
    starts_BA = jnp.take_along_axis(STARTS, ANCHORS_BA, axis=1)
    mask = training_block_mask(ANCHORS_BA, starts_BA, BLOCK, LENGTH, window)
    query = ANCHORS_BA[..., None] + jnp.arange(BLOCK)
    start, last = (jnp.broadcast_to(x[..., None], query.shape) for x in (starts_BA, ANCHORS_BA - 1))

    def dense(q, k, v, own_k, own_v):
        keys, values = jnp.concatenate([k, own_k], axis=2), jnp.concatenate([v, own_v], axis=2)
        return attention(q, keys, values, mask, scale=0.3)

    def ours(q, k, v, own_k, own_v):
        own = (x.reshape(BATCH, KV, ANCHORS, BLOCK, CHANNELS) for x in (own_k, own_v))
        q = q.reshape(BATCH, ANCHORS, BLOCK, HEADS, CHANNELS)
        spans = first_seen(start, query, window), last
        mixed = block_attention(q, k, v, *own, *spans, scale=0.3, scores=blocks * BLOCK * LENGTH)
        return mixed.reshape(BATCH, slots, HEADS, CHANNELS)

    RNG.bit_generator.state = STATE
    found = value_and_gradients(ours, *inputs)
    assert_same(found, value_and_gradients(dense, *inputs))


def temporary_bytes(compute, *shapes):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    compiled = jax.jit(jax.grad(lambda *inputs: jnp.sum(compute(*inputs)))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_square_of_the_sequence():
    small, large = 256, 1024
    took = [
        temporary_bytes(
            partial(span_attention, scale=1.0, scores=16 * length),
            *[((1, length, 1, 8), jnp.float32), *[((1, 1, length, 8), jnp.float32)] * 2],
            *[((1, length), jnp.int32)] * 2,
        )
        for length in (small, large)
    ]
    assert took[1] < 6 * took[0]
    assert took[1] < large * large * 4
