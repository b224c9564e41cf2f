"""What a round gives comes to the host in one array, unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.round import RoundOutput
from dspark_jax.decoding.transfer import Sent, words_shape, written

BATCH, MOST = 3, 7


@pytest.mark.parametrize("block", [0, 1, MOST])
@pytest.mark.parametrize("features", [1, 3])
def test_a_round_read_is_the_round_sent(block, features):
    rng = np.random.default_rng(block * 10 + features)
    confidence_BK = rng.random((BATCH, block), np.float32)
    evidence_BKF = rng.normal(size=(BATCH, block, features)).astype(np.float32)
    if block:
        # What a drafter's head may say: numbers, and none.
        evidence_BKF[:, 0, 0] = [-0.0, np.inf, np.nan]
    out = RoundOutput(
        tokens_BN=jnp.asarray(rng.integers(0, 2**31 - 1, (BATCH, block + 1)), jnp.int32),
        count_B=jnp.asarray(rng.integers(1, block + 2, BATCH), jnp.int32),
        verified_B=jnp.asarray(rng.integers(0, block + 1, BATCH), jnp.int32),
        confidence_BK=jnp.asarray(confidence_BK),
        evidence_BKF=jnp.asarray(evidence_BKF),
    )
    before_BW = jnp.asarray(rng.integers(0, 2**31 - 1, words_shape(BATCH, MOST, features)), jnp.int32)
    words_BW, free = jax.jit(written, donate_argnums=1)(out, before_BW), []
    assert words_BW.shape == (BATCH, 3 + MOST * (2 + features)), "rounds of few drafts take as much memory"
    read = Sent(words_BW=words_BW, free=free, drafts=block, features=features).read()
    assert free == [words_BW]
    for name, sent in vars(out).items():
        found = getattr(read, name)
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        assert found.tobytes() == np.asarray(sent).tobytes(), name
