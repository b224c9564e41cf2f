"""What is said of a draft's likeliest tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from dspark_jax.drafters.base import top_two
from dspark_jax.ops.sampling import two_largest


@pytest.mark.parametrize("vocab", [1, 2, 7, 64])
def test_the_two_largest_log_probabilities_are_those_of_a_sort_and_their_place_the_first(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(50, 1, vocab)).astype(np.float32)
    logits[0] = logits[0, 0, 0]
    logits[1, 0, -1] = logits[1, 0, 0] = 9.0
    logits[2, 0, 1:] = -np.inf
    logits[3, 0, vocab // 2 :] = 9.0
    wanted = np.sort(log_softmax(logits.astype(np.float64), axis=-1), axis=-1)[..., :-3:-1]
    # One token has no second.
    wanted = np.concatenate([wanted, np.full((50, 1, 2), -np.inf)], axis=-1)[..., :2]
    peaks = two_largest(jnp.asarray(logits))
    np.testing.assert_allclose(top_two(jnp.asarray(logits), peaks), wanted, atol=1e-5)
    np.testing.assert_array_equal(peaks[2], logits.argmax(axis=-1))
