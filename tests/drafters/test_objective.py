"""The training objective against itself in other chunks, and its labels against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.drafters.objective import LossWeights, block_labels, block_objective

WEIGHTS = LossWeights()


def test_the_published_weights_are_the_defaults():
    assert LossWeights(ce=0.1, l1=0.9, confidence=1.0, decay=4.0) == WEIGHTS


def test_chunks_change_nothing(small, vocabulary):
    """21 slots in chunks of 21, 1, 4 (which does not divide them) and more."""
    rng = np.random.default_rng(0)
    inputs = {
        "tokens_BT": jnp.asarray(rng.integers(0, 19, (2, 12)), jnp.int32),
        "loss_mask_BT": jnp.asarray(rng.random((2, 12)) < 0.8),
        "features_BTE": jnp.asarray(rng.normal(size=(2, 12, 32)), jnp.float32),
        "hidden_BTD": jnp.asarray(rng.normal(size=(2, 12, 16)), jnp.float32),
        "anchors_BA": jnp.asarray(np.sort(rng.integers(0, 12, (2, 7)), axis=1), jnp.int32),
        "keep_BA": jnp.asarray(rng.random((2, 7)) < 0.8),
    }

    @jax.jit
    def run(drafter):
        return [
            block_objective(drafter, vocabulary, **inputs, weights=WEIGHTS, chunk=chunk) for chunk in (21, 1, 4, 100)
        ]

    whole, *others = run(small(num_layers=1))
    assert whole.ce.sum > 0
    for terms in others:
        for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(terms), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


LENGTH, BLOCK = 6, 3
jitted = jax.jit(block_labels, static_argnums=5)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
    st.lists(st.tuples(st.integers(0, LENGTH - 1), st.booleans()), min_size=2, max_size=2),
    st.integers(1, LENGTH),
)
def test_labels_are_supervised_as_a_prefix_inside_the_document(mask, blocks, second):
    anchors, keep = ([block[part] for block in blocks] for part in range(2))
    tokens = np.arange(LENGTH, dtype=np.int32)[None] + 10
    starts = np.where(np.arange(LENGTH) < second, 0, second)
    tokens_BAN, mask_BAK = jitted(tokens, np.array([mask]), np.array([anchors]), np.array([keep]), starts[None], BLOCK)
    for a, (anchor, kept) in enumerate(blocks):
        assert tokens_BAN[0, a, 0] == anchor + 10
        supervised = kept
        for slot in range(BLOCK):
            position = anchor + slot + 1
            supervised = supervised and position < (second if anchor < second else LENGTH) and mask[position]
            assert mask_BAK[0, a, slot] == supervised
            if position < LENGTH:
                assert tokens_BAN[0, a, slot + 1] == position + 10
