"""Norm, feed-forward and vocabulary against plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.nn.layers import GatedMLP, RMSNorm, Vocabulary, VocabularySpec, float32_product

RNG = np.random.default_rng(0)


def test_rms_norm():
    norm = RMSNorm(6, "model", eps=1e-2, dtype=jnp.float32)
    norm.scale[...] = jnp.arange(6.0)
    x = RNG.normal(size=(3, 6)).astype(np.float32) / 10
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-2) * np.arange(6)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_squares_narrow_inputs_in_float32():
    norm = RMSNorm(512, "model", eps=1e-5, dtype=jnp.bfloat16)
    x = jnp.asarray(1 + RNG.normal(size=(1, 512)) / 4, jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    found = norm(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), wide / np.sqrt((wide**2).mean()), rtol=2**-8)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5), (2, 1, 5)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_float32_product_is_one_however_few_rows_there_are(shape, dtype):
    x, w = jnp.asarray(RNG.normal(size=shape), dtype), jnp.asarray(RNG.normal(size=(7, 5)), dtype)
    found = float32_product("...d,vd->...v", x, w)
    assert (found.shape, found.dtype) == ((*shape[:-1], 7), jnp.float32)
    np.testing.assert_allclose(found, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, rtol=1e-5, atol=1e-6)


def test_gated_mlp_opens_its_first_half(built):
    mlp = built(lambda: GatedMLP(4, 6, activation="silu", rngs=nnx.Rngs(0), dtype=jnp.float32))
    x = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    gate, up = np.asarray(mlp.gate_up[...]).swapaxes(0, 1)
    opened = x @ gate
    expected = (opened / (1 + np.exp(-opened)) * (x @ up)) @ np.asarray(mlp.down[...])
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary(built, tied):
    spec = VocabularySpec(size=9, d_model=4, tied=tied)
    vocabulary = built(lambda: Vocabulary(spec, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    embedding = np.asarray(vocabulary.embedding[...], np.float32)
    tokens = np.array([[3, 0], [8, 3]])
    np.testing.assert_array_equal(vocabulary.embed(jnp.asarray(tokens)).astype(jnp.float32), embedding[tokens])
    assert (vocabulary.head is None) == tied
    head = embedding.T if vocabulary.head is None else np.asarray(vocabulary.head[...], np.float32)
    hidden = jnp.asarray(RNG.normal(size=(2, 4)), jnp.bfloat16)
    logits = vocabulary.logits(hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, np.asarray(hidden, np.float32) @ head, atol=1e-5)
