"""What is said of a draft's likeliest tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from dspark_jax.drafters.base import top_two


@pytest.mark.parametrize("vocab", [2, 7, 64])
def test_the_two_largest_log_probabilities_are_those_of_a_sort(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(50, vocab)).astype(np.float32)
    logits[0] = logits[0, 0]
    logits[1, -1] = logits[1, 0] = 9.0
    logits[2, 1:] = -np.inf
    wanted = np.sort(log_softmax(logits.astype(np.float64), axis=-1), axis=-1)[:, :-3:-1]
    np.testing.assert_allclose(top_two(jnp.asarray(logits)), wanted, atol=1e-5)


def test_one_token_has_no_second():
    assert top_two(jnp.zeros((1, 1))).tolist() == [[0.0, -np.inf]]
