"""Masks equal double Python loops."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.ops.masks import cached_block_mask, causal_mask, training_block_mask

jitted = jax.jit(training_block_mask, static_argnums=(1, 2))


def test_causal_queries_see_positions_up_to_their_own():
    starts, queries, keys = [0, 3, 6], 3, 10
    found = np.asarray(causal_mask(jnp.array(starts), queries, keys))
    for row, start in enumerate(starts):
        for query in range(queries):
            for key in range(keys):
                assert found[row, query, key] == (key <= start + query)


def test_a_cached_block_sees_its_context_and_itself_both_ways():
    starts, block, keys = [0, 2, 5], 3, 8
    found = np.asarray(cached_block_mask(jnp.array(starts), block, keys))
    assert found.shape == (3, block, keys)
    for row, start in enumerate(starts):
        for query in range(block):
            for key in range(keys):
                in_context, in_block = key < start, start <= key < start + block
                assert found[row, query, key] == (in_context or in_block)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=2, max_size=2),
    st.sampled_from([1, 2, 3]),
)
def test_training_blocks_see_context_before_their_anchor_and_themselves(anchors, block):
    context = 7
    found = np.asarray(jitted(jnp.array(anchors), block, context))
    slots = len(anchors[0]) * block
    assert found.shape == (len(anchors), slots, context + slots)
    for row, of_row in enumerate(anchors):
        for query in range(slots):
            for key in range(context + slots):
                owner = query // block
                sees = key < of_row[owner] if key < context else (key - context) // block == owner
                assert found[row, query, key] == sees
