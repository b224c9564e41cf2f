"""Where training blocks start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dspark_jax.drafters.anchors import sample_anchors

LENGTH, ANCHORS = 9, 4
jitted = jax.jit(sample_anchors, static_argnums=3)
ONE = np.zeros((3, LENGTH), np.int32)


def eligible(mask, second):
    """`second`: where a second document begins."""
    return {t for t in range(len(mask) - 1) if mask[t] and mask[t + 1] and t + 1 != second}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=3, max_size=3),
    st.integers(1, LENGTH),
    st.integers(0, 2**31),
)
def test_anchors_are_sorted_eligible_and_different_and_as_many_as_there_are(mask, second, seed):
    starts_BT = ONE + second * (np.arange(LENGTH) >= second)
    anchors_BA, keep_BA = jitted(jax.random.key(seed), np.array(mask), starts_BT, ANCHORS)
    for row in range(3):
        kept = np.asarray(anchors_BA[row])[np.asarray(keep_BA[row])].tolist()
        assert kept == sorted(set(kept))
        assert set(kept) <= eligible(mask[row], second)
        assert len(kept) == min(ANCHORS, len(eligible(mask[row], second)))
        assert np.asarray(keep_BA[row]).tolist() == [True] * len(kept) + [False] * (ANCHORS - len(kept))
        assert ((np.asarray(anchors_BA[row]) >= 0) & (np.asarray(anchors_BA[row]) < LENGTH)).all()


def test_every_eligible_position_is_as_likely_as_the_others():
    mask = jnp.array([[0, 1, 1, 1, 0, 1, 1, 1, 1]], bool)
    keys = jax.random.split(jax.random.key(0), 3000)
    anchors, keep = jax.jit(jax.vmap(lambda key: sample_anchors(key, mask, jnp.asarray(ONE[:1]), 2)))(keys)
    assert keep.all()
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=LENGTH)
    positions = [1, 2, 5, 6, 7]
    assert counts.sum() == counts[positions].sum()
    assert chisquare(counts[positions]).pvalue > 1e-3


@pytest.mark.parametrize("last", [0, 1])
def test_the_last_position_has_no_next_token(last):
    mask = np.array([[0] * 7 + [1, 1]], bool)
    mask[0, 0] = last
    _, keep = jitted(jax.random.key(0), np.repeat(mask, 3, axis=0), ONE, ANCHORS)
    assert keep.sum(axis=1).tolist() == [1, 1, 1]
