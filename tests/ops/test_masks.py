"""Masks equal double Python loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.ops.masks import (
    between,
    cached_block_mask,
    causal_mask,
    document_starts,
    first_seen,
    training_block_mask,
)

jitted = jax.jit(training_block_mask, static_argnums=(2, 3, 4))


WINDOWS = pytest.mark.parametrize("window", [None, 1, 3])


def near(query, key, window):
    return window is None or query - key < window


@WINDOWS
def test_causal_queries_see_positions_up_to_their_own(window):
    starts, queries, keys = [0, 3, 6], 3, 10
    found = np.asarray(causal_mask(jnp.array(starts), queries, keys, window))
    for row, start in enumerate(starts):
        for query in range(queries):
            for key in range(keys):
                sees = key <= start + query and near(start + query, key, window)
                assert found[row, query, key] == sees


@WINDOWS
def test_a_cached_block_sees_its_context_and_itself_both_ways(window):
    starts, block, keys = [0, 2, 5], 3, 8
    found = np.asarray(cached_block_mask(jnp.array(starts), block, keys, window))
    assert found.shape == (3, block, keys)
    for row, start in enumerate(starts):
        for query in range(block):
            for key in range(keys):
                in_context = key < start and near(start + query, key, window)
                in_block = start <= key < start + block
                assert found[row, query, key] == (in_context or in_block)


SEGMENTS = st.lists(
    st.lists(st.integers(0, 3), min_size=7, max_size=7).map(lambda steps: np.cumsum(np.array(steps) > 2).tolist()),
    min_size=2,
    max_size=2,
)


@settings(deadline=None, max_examples=30)
@given(SEGMENTS, st.sampled_from([None, 1, 3]))
def test_a_token_sees_its_document_up_to_itself(segments, window):
    starts_BT = document_starts(jnp.array(segments))
    index_BT = jnp.broadcast_to(jnp.arange(7), (2, 7))
    found = np.asarray(between(first_seen(starts_BT, index_BT, window), index_BT, 7))
    for row, query, key in np.ndindex(2, 7, 7):
        sees = key <= query and near(query, key, window) and segments[row][key] == segments[row][query]
        assert found[row, query, key] == sees


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=2, max_size=2),
    SEGMENTS,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 1, 3]),
)
def test_training_blocks_see_their_document_before_the_anchor_and_themselves(anchors, segments, block, window):
    context = 7
    starts_BA = np.take_along_axis(np.asarray(document_starts(jnp.array(segments))), np.array(anchors), axis=1)
    found = np.asarray(jitted(jnp.array(anchors), starts_BA, block, context, window))
    slots = len(anchors[0]) * block
    assert found.shape == (len(anchors), slots, context + slots)
    for row, of_row in enumerate(anchors):
        for query in range(slots):
            for key in range(context + slots):
                owner = query // block
                anchor, slot = of_row[owner], query % block
                in_context = key < anchor and near(anchor + slot, key, window)
                in_context = in_context and segments[row][key] == segments[row][anchor]
                sees = in_context if key < context else (key - context) // block == owner
                assert found[row, query, key] == sees
