"""Every sequential head against a plain loop over the slots of one block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.drafters.heads import GatedMarkov, MarkovHead, RnnMarkov, VanillaMarkov

D, R, V, K = 6, 3, 11, 4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain_bias(head, hidden_KD, previous_K):
    """W2 latent of every slot, in the words of the published formulas, float64."""
    w1, w2 = np.asarray(head.w1[...], np.float64), np.asarray(head.w2[...], np.float64)
    state, out = np.zeros(R), []
    for hidden, previous in zip(np.asarray(hidden_KD, np.float64), previous_K, strict=True):
        latent = w1[previous]
        if isinstance(head.spec, GatedMarkov):
            gate = np.concatenate([hidden, latent]) @ np.asarray(head.mix.w[...]) + np.asarray(head.mix.b[...])
            latent = sigmoid(gate) * latent
        if isinstance(head.spec, RnnMarkov):
            joint = np.concatenate([state, latent, hidden]) @ np.asarray(head.mix.w[...]) + np.asarray(head.mix.b[...])
            keep = sigmoid(joint[:R])
            state = keep * state + (1 - keep) * np.tanh(joint[R : 2 * R])
            latent = np.tanh(joint[2 * R :])
        out.append(w2 @ latent)
    return np.stack(out)


@pytest.mark.parametrize("spec", [VanillaMarkov(rank=R), GatedMarkov(rank=R), RnnMarkov(rank=R)], ids=repr)
def test_d_41_biases_are_those_of_a_plain_loop(built, spec):
    head = built(lambda: MarkovHead(spec, vocab_size=V, d_model=D, rngs=nnx.Rngs(0), dtype=jnp.float32))
    rng = np.random.default_rng(3)
    hidden, previous = rng.normal(size=(2, K, D)).astype(np.float32), rng.integers(0, V, (2, K))

    @jax.jit
    def biases(head):
        return head.bias(head.latents(jnp.asarray(hidden), head.embed(jnp.asarray(previous))))

    found = biases(head)
    for row in range(2):
        np.testing.assert_allclose(found[row], plain_bias(head, hidden[row], previous[row]), atol=1e-5)
