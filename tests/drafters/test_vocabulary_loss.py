"""The vocabulary loss in chunks against its plain twin: values, gradients, and the memory of both."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.drafters.vocabulary_loss import Positions, Trained, compare_laws, plainly_compare_laws
from dspark_jax.nn.layers import Vocabulary, VocabularySpec

ROWS, LENGTH, WIDTH, RANK, VOCAB = 2, 11, 8, 3, 23
SPEC = VocabularySpec(size=VOCAB, d_model=WIDTH, tied=False)
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("spec", "markov", "labels"),
    [
        (SPEC, True, True),
        (replace(SPEC, tied=True, soft_cap=2.0), True, True),
        (replace(SPEC, soft_cap=2.0), False, False),
    ],
    ids=["dspark", "tied-capped", "chain-capped"],
)
def test_values_and_gradients_are_those_of_the_twin(built, spec, markov, labels):
    vocabulary = built(lambda: Vocabulary(spec, rngs=nnx.Rngs(0), dtype=jnp.float32))
    trained = Trained(w2_VR=normal(VOCAB, RANK) if markov else None, draft_bias_V=normal(VOCAB) if markov else None)
    positions = Positions(
        hidden_BND=normal(ROWS, LENGTH, WIDTH) * 3,
        latent_BNR=normal(ROWS, LENGTH, RANK) if markov else None,
        aligned_BND=normal(ROWS, LENGTH, WIDTH) * 3,
        labels_BN=jnp.asarray(RNG.integers(0, VOCAB, (ROWS, LENGTH))) if labels else None,
    )
    mixer = normal(2, ROWS, LENGTH)

    @partial(jax.jit, static_argnums=0)
    def run(compute):
        def loss(trained, hidden_BND, latent_BNR):
            compared = compute(vocabulary, trained, positions.replace(hidden_BND=hidden_BND, latent_BNR=latent_BNR))
            return jnp.sum(compared.ce * mixer[0] + compared.l1 * mixer[1]), compared

        inputs = (trained, positions.hidden_BND, positions.latent_BNR)
        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)

    plain = run(plainly_compare_laws)
    for chunk in (4, 64):
        for ours, theirs in zip(
            jax.tree.leaves(run(partial(compare_laws, chunk=chunk))), jax.tree.leaves(plain), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def temporary_bytes(compute, *, vocab, length, width=16, chunk=16):
    """Of the compiled gradient to hidden states and Markov matrix, bfloat16 weights."""
    bf16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    spec = VocabularySpec(size=vocab, d_model=width, tied=False)
    vocabulary = nnx.eval_shape(lambda: Vocabulary(spec, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))

    def gradient(vocabulary, w2_VR, hidden_BND, latent_BNR, aligned_BND, labels_BN):
        def loss(w2_VR, hidden_BND, latent_BNR):
            positions = Positions(
                hidden_BND=hidden_BND, latent_BNR=latent_BNR, aligned_BND=aligned_BND, labels_BN=labels_BN
            )
            compared = compute(vocabulary, Trained(w2_VR=w2_VR, draft_bias_V=None), positions)
            return jnp.sum(compared.ce + compared.l1)

        return jax.grad(loss, argnums=(0, 1, 2))(w2_VR, hidden_BND, latent_BNR)

    states, labels = bf16((1, length, width)), jax.ShapeDtypeStruct((1, length), jnp.int32)
    lowered = jax.jit(gradient).lower(vocabulary, bf16((vocab, 1)), states, bf16((1, length, 1)), states, labels)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_d_49_memory_grows_with_the_chunk_not_with_the_positions():
    vocab = 4096
    small, large = (temporary_bytes(partial(compare_laws, chunk=16), vocab=vocab, length=n) for n in (64, 512))
    assert large - small < 512 * vocab
    assert large < 16 * vocab * 4 * 8
    assert temporary_bytes(plainly_compare_laws, vocab=vocab, length=512) > 512 * vocab * 4
